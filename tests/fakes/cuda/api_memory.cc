// Virtual memory management and allocations of the fake driver.

#include <cuda.h>

#include <algorithm>
#include <utility>

#include "tests/fakes/cuda/runtime.h"

using zeroshard::fake_cuda::Context;
using zeroshard::fake_cuda::HostRange;
using zeroshard::fake_cuda::kGranularity;
using zeroshard::fake_cuda::Located;
using zeroshard::fake_cuda::MemoryHandle;
using zeroshard::fake_cuda::Need;
using zeroshard::fake_cuda::Physical;
using zeroshard::fake_cuda::Runtime;

namespace {

Runtime& Fake() { return Runtime::Get(); }

bool IsDeviceLocation(const CUmemLocation& location) {
  return location.type == CU_MEM_LOCATION_TYPE_DEVICE && Fake().IsOrdinal(location.id);
}

bool IsSupported(const CUmemAllocationProp& prop) {
  return prop.type == CU_MEM_ALLOCATION_TYPE_PINNED && IsDeviceLocation(prop.location) &&
         (prop.requestedHandleTypes == CU_MEM_HANDLE_TYPE_NONE ||
          prop.requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
}

CUmemGenericAllocationHandle AddHandle(std::shared_ptr<Physical> memory) {
  auto handle = std::make_shared<MemoryHandle>();
  handle->memory = std::move(memory);
  return Fake().memories.Add<CUmemGenericAllocationHandle>(std::move(handle));
}

// Memory goes when the work that uses it is done, as the driver has it.
void WaitForWork() {
  if (Runtime::Current() != nullptr) Fake().SynchronizeContext(Runtime::Current());
}

}  // namespace

extern "C" {

CUresult CUDAAPI cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* prop,
                                               CUmemAllocationGranularity_flags) {
  FAKE_CUDA_ENTER(Need::kInit);
  if (!IsSupported(*prop)) return CUDA_ERROR_INVALID_VALUE;
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAddressReserve(CUdeviceptr* ptr, size_t size, size_t alignment,
                                     CUdeviceptr /*addr*/, unsigned long long flags) {
  FAKE_CUDA_ENTER(Need::kInit);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  uint64_t address = 0;
  const CUresult result = Fake().memory().Reserve(size, alignment, &address);
  if (result == CUDA_SUCCESS) *ptr = address;
  return result;
}

CUresult CUDAAPI cuMemAddressFree(CUdeviceptr ptr, size_t size) {
  FAKE_CUDA_ENTER(Need::kInit);
  return Fake().memory().Free(ptr, size);
}

CUresult CUDAAPI cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                             const CUmemAllocationProp* prop, unsigned long long flags) {
  FAKE_CUDA_ENTER(Need::kInit);
  if (flags != 0 || size == 0 || size % kGranularity != 0 || !IsSupported(*prop)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int device = Fake().DeviceOf(prop->location.id);
  CUresult result = Fake().LostError(device);
  if (result != CUDA_SUCCESS) return result;
  std::shared_ptr<Physical> memory = Fake().pool().Create(device, size, *prop, &result);
  if (memory != nullptr) *handle = AddHandle(std::move(memory));
  return result;
}

CUresult CUDAAPI cuMemRelease(CUmemGenericAllocationHandle handle) {
  FAKE_CUDA_ENTER(Need::kInit);
  const std::shared_ptr<MemoryHandle> found = Fake().memories.Find(handle);
  if (found == nullptr) return CUDA_ERROR_INVALID_VALUE;
  if (--found->references == 0) Fake().memories.Remove(handle);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* addr) {
  FAKE_CUDA_ENTER(Need::kInit);
  std::shared_ptr<Physical> memory = Fake().memory().MemoryAt(reinterpret_cast<uint64_t>(addr));
  if (memory == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (const std::shared_ptr<MemoryHandle>& known : Fake().memories.All()) {
    if (known->memory != memory) continue;
    ++known->references;
    *handle = reinterpret_cast<CUmemGenericAllocationHandle>(known.get());
    return CUDA_SUCCESS;
  }
  *handle = AddHandle(std::move(memory));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop,
                                                        CUmemGenericAllocationHandle handle) {
  FAKE_CUDA_ENTER(Need::kInit);
  const std::shared_ptr<MemoryHandle> found = Fake().memories.Find(handle);
  if (found == nullptr) return CUDA_ERROR_INVALID_VALUE;
  *prop = found->memory->prop;
  prop->location.id = Fake().OrdinalOf(found->memory->device);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemMap(CUdeviceptr ptr, size_t size, size_t offset,
                          CUmemGenericAllocationHandle handle, unsigned long long flags) {
  FAKE_CUDA_ENTER(Need::kInit);
  const std::shared_ptr<MemoryHandle> found = Fake().memories.Find(handle);
  if (found == nullptr || offset != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  return Fake().memory().Map(ptr, size, found->memory);
}

CUresult CUDAAPI cuMemUnmap(CUdeviceptr ptr, size_t size) {
  FAKE_CUDA_ENTER(Need::kInit);
  return Fake().memory().Unmap(ptr, size);
}

CUresult CUDAAPI cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc* desc,
                                size_t count) {
  FAKE_CUDA_ENTER(Need::kInit);
  for (size_t i = 0; i < count; ++i) {
    if (!IsDeviceLocation(desc[i].location)) return CUDA_ERROR_INVALID_VALUE;
    const CUresult result =
        Fake().memory().SetAccess(ptr, size, Fake().DeviceOf(desc[i].location.id), desc[i].flags);
    if (result != CUDA_SUCCESS) return result;
  }
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location,
                                CUdeviceptr ptr) {
  FAKE_CUDA_ENTER(Need::kInit);
  if (!IsDeviceLocation(*location)) return CUDA_ERROR_INVALID_VALUE;
  return Fake().memory().GetAccess(ptr, Fake().DeviceOf(location->id), flags);
}

CUresult CUDAAPI cuMemExportToShareableHandle(void* shareableHandle,
                                              CUmemGenericAllocationHandle handle,
                                              CUmemAllocationHandleType handleType,
                                              unsigned long long flags) {
  FAKE_CUDA_ENTER(Need::kInit);
  const std::shared_ptr<MemoryHandle> found = Fake().memories.Find(handle);
  if (found == nullptr || flags != 0 || handleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
      found->memory->prop.requestedHandleTypes != handleType) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  const int fd = found->memory->DuplicateFd();
  if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  *static_cast<int*>(shareableHandle) = fd;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle,
                                                void* osHandle,
                                                CUmemAllocationHandleType shHandleType) {
  FAKE_CUDA_ENTER(Need::kInit);
  if (shHandleType != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return CUDA_ERROR_INVALID_VALUE;
  const int fd = static_cast<int>(reinterpret_cast<intptr_t>(osHandle));
  std::shared_ptr<Physical> memory = Fake().pool().Import(fd);
  if (memory == nullptr || Fake().OrdinalOf(memory->device) < 0) return CUDA_ERROR_INVALID_VALUE;
  *handle = AddHandle(std::move(memory));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemGetInfo(size_t* free, size_t* total) {
  FAKE_CUDA_ENTER(Need::kContext);
  *total = Fake().settings().memory;
  *free = *total - std::min<uint64_t>(*total, Fake().pool().Used(Runtime::Current()->device));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemAlloc(CUdeviceptr* dptr, size_t bytesize) {
  FAKE_CUDA_ENTER(Need::kContext);
  if (bytesize == 0) return CUDA_ERROR_INVALID_VALUE;
  const int device = Runtime::Current()->device;
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, {Fake().OrdinalOf(device)}};
  CUresult result = CUDA_SUCCESS;
  const uint64_t pages = (bytesize + 4095) / 4096 * 4096;
  std::shared_ptr<Physical> memory = Fake().pool().Create(device, pages, prop, &result);
  if (memory == nullptr) return result;
  uint64_t address = 0;
  result = Fake().memory().Allocate(std::move(memory), bytesize, &address);
  if (result == CUDA_SUCCESS) *dptr = address;
  return result;
}

CUresult CUDAAPI cuMemFree(CUdeviceptr dptr) {
  FAKE_CUDA_ENTER(Need::kContext);
  if (dptr == 0) return CUDA_SUCCESS;
  WaitForWork();
  return Fake().memory().Release(dptr);
}

CUresult CUDAAPI cuMemGetAddressRange(CUdeviceptr* pbase, size_t* psize, CUdeviceptr dptr) {
  FAKE_CUDA_ENTER(Need::kContext);
  const std::optional<Located> located = Fake().memory().Locate(dptr);
  if (!located.has_value()) return CUDA_ERROR_NOT_FOUND;
  if (pbase != nullptr) *pbase = located->begin;
  if (psize != nullptr) *psize = located->bytes;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemHostAlloc(void** pp, size_t bytesize, unsigned int Flags) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Fake().memory().AllocateHost(bytesize, Flags, pp);
}

CUresult CUDAAPI cuMemAllocHost(void** pp, size_t bytesize) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Fake().memory().AllocateHost(bytesize, 0, pp);
}

CUresult CUDAAPI cuMemFreeHost(void* p) {
  FAKE_CUDA_ENTER(Need::kContext);
  WaitForWork();
  return Fake().memory().ReleaseHost(p);
}

CUresult CUDAAPI cuMemHostRegister(void* p, size_t bytesize, unsigned int Flags) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Fake().memory().RegisterHost(p, bytesize, Flags);
}

CUresult CUDAAPI cuMemHostUnregister(void* p) {
  FAKE_CUDA_ENTER(Need::kContext);
  WaitForWork();
  return Fake().memory().UnregisterHost(p);
}

CUresult CUDAAPI cuMemHostGetDevicePointer(CUdeviceptr* pdptr, void* p, unsigned int Flags) {
  FAKE_CUDA_ENTER(Need::kContext);
  if (Flags != 0 || !Fake().memory().HostAt(reinterpret_cast<uint64_t>(p), 1).has_value()) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  *pdptr = reinterpret_cast<CUdeviceptr>(p);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuMemHostGetFlags(unsigned int* pFlags, void* p) {
  FAKE_CUDA_ENTER(Need::kContext);
  const std::optional<HostRange> host = Fake().memory().HostAt(reinterpret_cast<uint64_t>(p), 1);
  if (!host.has_value()) return CUDA_ERROR_INVALID_VALUE;
  *pFlags = host->flags;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuPointerGetAttribute(void* data, CUpointer_attribute attribute, CUdeviceptr ptr) {
  FAKE_CUDA_ENTER(Need::kInit);
  const std::optional<Located> at = Fake().memory().Locate(ptr);
  if (!at.has_value()) return CUDA_ERROR_INVALID_VALUE;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<CUmemorytype*>(data) = at->host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
      *static_cast<CUdeviceptr*>(data) = ptr;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
      if (!at->host) return CUDA_ERROR_INVALID_VALUE;
      *static_cast<CUdeviceptr*>(data) = ptr;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(data) = Fake().OrdinalOf(at->device);
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
      *static_cast<CUdeviceptr*>(data) = at->begin;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
      *static_cast<size_t*>(data) = at->bytes;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPED:
      *static_cast<int*>(data) = 1;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
      *static_cast<unsigned*>(data) = 0;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_NOT_SUPPORTED;
  }
}

}  // extern "C"
