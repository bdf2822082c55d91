// The CUDA driver, opened at run time. No program of ours links a CUDA library: libcuda.so.1 is
// found when it is first asked for, so that everything starts on a machine without it and says what
// is missing. The functions' types come from the toolkit's cuda.h.
//
// Loaded once a process and never unloaded, as the driver has threads of its own. Any thread.
#ifndef ZEROSHARD_DEVICE_CUDA_DRIVER_H_
#define ZEROSHARD_DEVICE_CUDA_DRIVER_H_

#include <cuda.h>

#include <optional>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "device/cuda/address.h"

// All functions that we call, by their name without `cu`. cuda.h makes macros of those that have
// versions, which is why the second argument must be spelt as the toolkit documents it.
#define ZS_CUDA_FUNCTIONS(X)                                                      \
  X(GetErrorName, cuGetErrorName)                                                 \
  X(GetErrorString, cuGetErrorString)                                             \
  X(Init, cuInit)                                                                 \
  X(DriverGetVersion, cuDriverGetVersion)                                         \
  X(DeviceGet, cuDeviceGet)                                                       \
  X(DeviceGetCount, cuDeviceGetCount)                                             \
  X(DeviceGetName, cuDeviceGetName)                                               \
  X(DeviceGetUuid, cuDeviceGetUuid)                                               \
  X(DeviceGetAttribute, cuDeviceGetAttribute)                                     \
  X(DeviceGetPCIBusId, cuDeviceGetPCIBusId)                                       \
  X(DeviceTotalMem, cuDeviceTotalMem)                                             \
  X(DevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain)                             \
  X(DevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease)                           \
  X(CtxGetCurrent, cuCtxGetCurrent)                                               \
  X(CtxSetCurrent, cuCtxSetCurrent)                                               \
  X(CtxPushCurrent, cuCtxPushCurrent)                                             \
  X(CtxPopCurrent, cuCtxPopCurrent)                                               \
  X(CtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange)                       \
  X(MemGetInfo, cuMemGetInfo)                                                     \
  X(MemGetAllocationGranularity, cuMemGetAllocationGranularity)                   \
  X(MemCreate, cuMemCreate)                                                       \
  X(MemRelease, cuMemRelease)                                                     \
  X(MemAddressReserve, cuMemAddressReserve)                                       \
  X(MemAddressFree, cuMemAddressFree)                                             \
  X(MemMap, cuMemMap)                                                             \
  X(MemUnmap, cuMemUnmap)                                                         \
  X(MemSetAccess, cuMemSetAccess)                                                 \
  X(MemExportToShareableHandle, cuMemExportToShareableHandle)                     \
  X(MemImportFromShareableHandle, cuMemImportFromShareableHandle)                 \
  X(MemGetAllocationPropertiesFromHandle, cuMemGetAllocationPropertiesFromHandle) \
  X(MemHostAlloc, cuMemHostAlloc)                                                 \
  X(MemFreeHost, cuMemFreeHost)                                                   \
  X(MemHostRegister, cuMemHostRegister)                                           \
  X(MemHostUnregister, cuMemHostUnregister)                                       \
  X(MemHostGetDevicePointer, cuMemHostGetDevicePointer)                           \
  X(MemcpyHtoDAsync, cuMemcpyHtoDAsync)                                           \
  X(MemcpyDtoHAsync, cuMemcpyDtoHAsync)                                           \
  X(MemcpyDtoDAsync, cuMemcpyDtoDAsync)                                           \
  X(MemsetD8Async, cuMemsetD8Async)                                               \
  X(StreamCreateWithPriority, cuStreamCreateWithPriority)                         \
  X(StreamDestroy, cuStreamDestroy)                                               \
  X(StreamQuery, cuStreamQuery)                                                   \
  X(StreamWaitEvent, cuStreamWaitEvent)                                           \
  X(StreamWriteValue64, cuStreamWriteValue64)                                     \
  X(StreamWaitValue64, cuStreamWaitValue64)                                       \
  X(LaunchHostFunc, cuLaunchHostFunc)                                             \
  X(EventCreate, cuEventCreate)                                                   \
  X(EventDestroy, cuEventDestroy)                                                 \
  X(EventRecord, cuEventRecord)                                                   \
  X(EventQuery, cuEventQuery)                                                     \
  X(EventElapsedTime, cuEventElapsedTime)                                         \
  X(ModuleLoadData, cuModuleLoadData)                                             \
  X(ModuleUnload, cuModuleUnload)                                                 \
  X(ModuleGetFunction, cuModuleGetFunction)                                       \
  X(FuncGetAttribute, cuFuncGetAttribute)                                         \
  X(LaunchKernel, cuLaunchKernel)

namespace zeroshard {

struct CudaDriver {
#define ZS_CUDA_MEMBER(name, function) decltype(&function) name = nullptr;
  ZS_CUDA_FUNCTIONS(ZS_CUDA_MEMBER)
#undef ZS_CUDA_MEMBER

  // What the driver supports, 1000 * major + 10 * minor.
  int version = 0;
  // As the loader found it, for messages.
  std::string path;

  // The library's table; does not initialise the driver (see InitializeCuda). The first answer is
  // kept for the life of the process. Unavailable "no CUDA device: libcuda.so.1 cannot be opened
  // (...): ..."; FailedPrecondition, with both versions, where the driver is older than the toolkit
  // that this program was built with.
  static absl::StatusOr<const CudaDriver*> Load();
};

// The toolkit's version that this program was built with, as CudaDriver::version.
inline constexpr int kCudaToolkitVersion = CUDA_VERSION;

// "13.0"
std::string CudaVersionText(int version);

// Load(), then cuInit, which may be repeated. Unavailable "no CUDA device: ..." with what to do. A
// process that has forked since its first call gets an error for good: CUDA does not survive fork.
absl::StatusOr<const CudaDriver*> InitializeCuda();

// The status of a call: OK, or "`what`: <the driver's words> (CUDA_ERROR_...)" and what to do where
// that is known. Codes: ResourceExhausted (out of memory; the caller adds figures), Aborted "device
// lost" (see IsDeviceLost), Unavailable (not initialised, no device, MPS server gone), NotFound (no
// such device), FailedPrecondition (versions that do not fit, a kind of device without the
// function), DeadlineExceeded, AlreadyExists, Internal (wrong arguments: our bug).
absl::Status CudaStatus(CUresult result, std::string_view what);

// The CUresult behind a status that CudaStatus made; survives Annotate.
std::optional<CUresult> CudaErrorOf(const absl::Status& status);

// Whether the status says that the device, or this process's context on it, is gone for good: an
// uncorrectable memory error, a kernel that touched a wrong address. Every later call in this
// process fails likewise; other processes may go on, or see the same.
bool IsDeviceLost(const absl::Status& status);

// Whether such a status says that the device's memory failed: what it held is not to be used by any
// process.
bool IsMemoryFailure(const absl::Status& status);

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CUDA_DRIVER_H_
