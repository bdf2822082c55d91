// What DeviceMemory and DeviceRange share: sizes, and who may touch a mapping.
#ifndef ZEROSHARD_DEVICE_CUDA_MAPPING_H_
#define ZEROSHARD_DEVICE_CUDA_MAPPING_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "base/shared_memory.h"
#include "device/cuda/device.h"

namespace zeroshard {

inline uint64_t RoundUpTo(uint64_t bytes, uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Gives `device`, which is current, access to mapped addresses, and says which it got: where the
// driver has no read-only mappings of device memory, a writable one.
absl::StatusOr<Access> AllowAccess(const CudaDevice& device, DeviceAddress address, uint64_t bytes,
                                   Access access);

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CUDA_MAPPING_H_
