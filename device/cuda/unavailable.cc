// The answers of a build without the CUDA Toolkit.
#include "device/cuda/available.h"

namespace zeroshard {

absl::Status CheckCudaUsable() {
  return absl::FailedPreconditionError(
      "no CUDA device: this build has no CUDA: build ZeroShard where the CUDA Toolkit 13 is "
      "(CUDA_HOME, by default /usr/local/cuda), or use --device cpu:0");
}

absl::Status CheckCudaDevice(std::string_view) { return CheckCudaUsable(); }

absl::StatusOr<std::string> DescribeCudaDevices() { return CheckCudaUsable(); }

}  // namespace zeroshard
