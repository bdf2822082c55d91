// Kernels on the first CUDA device, as product code launches them.
#ifndef ZEROSHARD_TESTS_WORKER_CUDA_CUDA_KERNEL_DEVICE_H_
#define ZEROSHARD_TESTS_WORKER_CUDA_CUDA_KERNEL_DEVICE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "device/cuda/device.h"
#include "tests/worker/cuda/kernel_device.h"

namespace zeroshard {

// `device` outlives the result.
absl::StatusOr<std::unique_ptr<KernelDevice>> MakeCudaKernelDevice(const CudaDevice& device);

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_WORKER_CUDA_CUDA_KERNEL_DEVICE_H_
