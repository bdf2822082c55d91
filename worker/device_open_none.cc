#include "worker/device_open.h"

namespace zeroshard {

absl::StatusOr<std::unique_ptr<DeviceShard>> OpenDeviceShard(JobMemory&) {
  return absl::FailedPreconditionError(
      "this build has no CUDA: build it where the CUDA Toolkit is (CUDA_HOME)");
}

}  // namespace zeroshard
