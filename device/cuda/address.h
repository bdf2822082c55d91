// The address of device memory, and the counters that processes order their device work by. No CUDA
// in here: also code that never touches a GPU names such addresses and counters.
#ifndef ZEROSHARD_DEVICE_CUDA_ADDRESS_H_
#define ZEROSHARD_DEVICE_CUDA_ADDRESS_H_

#include <cstdint>

namespace zeroshard {

// A CUdeviceptr: of device memory, or of host memory that is registered (device/cuda/memory.h).
// Only kernels and copies may use it, never a host pointer.
using DeviceAddress = uint64_t;

// What a counter of a dead generation is set to, so that every wait for it ends. Counters are at
// most this: a wait on the device compares cyclically (int64_t(counter - value) >= 0), so all ones
// would be *less* than any value waited for.
inline constexpr uint64_t kDeadCounter = INT64_MAX;

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CUDA_ADDRESS_H_
