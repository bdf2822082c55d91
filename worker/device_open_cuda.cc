#include "worker/cuda/cuda_shard.h"
#include "worker/device_open.h"

namespace zeroshard {

absl::StatusOr<std::unique_ptr<DeviceShard>> OpenDeviceShard(JobMemory& memory) {
  return CudaShard::Open(memory);
}

}  // namespace zeroshard
