// The worker's way to its GPU, in every build.
#ifndef ZEROSHARD_WORKER_DEVICE_OPEN_H_
#define ZEROSHARD_WORKER_DEVICE_OPEN_H_

#include <memory>

#include "absl/status/statusor.h"
#include "worker/device_shard.h"
#include "worker/job_memory.h"

namespace zeroshard {

// Opens the device of a worker of a job with a data plane. Errors are those of CudaShard::Open;
// FailedPrecondition in a build without the CUDA Toolkit. `memory` must outlive the result.
absl::StatusOr<std::unique_ptr<DeviceShard>> OpenDeviceShard(JobMemory& memory);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_DEVICE_OPEN_H_
