// Builds without the CUDA Toolkit.
#include "tests/e2e/trainer_device.h"

namespace zeroshard {

absl::StatusOr<std::unique_ptr<TrainerDevice>> TrainerDevice::Open(int /*ordinal*/) {
  return absl::FailedPreconditionError("this trainer was built without CUDA");
}

}  // namespace zeroshard
