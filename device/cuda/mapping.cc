#include "device/cuda/mapping.h"

#include "base/status.h"

namespace zeroshard {

absl::StatusOr<Access> AllowAccess(const CudaDevice& device, DeviceAddress address, uint64_t bytes,
                                   Access access) {
  CUmemAccessDesc allowed = {};
  allowed.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  allowed.location.id = device.handle();
  if (access == Access::kReadOnly) {
    allowed.flags = CU_MEM_ACCESS_FLAGS_PROT_READ;
    const CUresult result = device.driver().MemSetAccess(address, bytes, &allowed, 1);
    if (result == CUDA_SUCCESS) return Access::kReadOnly;
    if (result != CUDA_ERROR_NOT_SUPPORTED && result != CUDA_ERROR_INVALID_VALUE) {
      return device.Error(result, "cuMemSetAccess", bytes);
    }
  }
  allowed.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  ZS_RETURN_IF_ERROR(device.Error(device.driver().MemSetAccess(address, bytes, &allowed, 1),
                                  "cuMemSetAccess", bytes));
  return Access::kReadWrite;
}

}  // namespace zeroshard
