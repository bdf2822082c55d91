// Initialisation, errors, devices and contexts of the fake driver.

#include <cuda.h>
#include <dlfcn.h>

#include <cstring>
#include <map>

#include "tests/fakes/cuda/runtime.h"

using zeroshard::fake_cuda::Context;
using zeroshard::fake_cuda::Need;
using zeroshard::fake_cuda::Runtime;

namespace {

Runtime& Fake() { return Runtime::Get(); }

CUcontext Handle(Context* context) { return reinterpret_cast<CUcontext>(context); }
Context* FromHandle(CUcontext context) { return reinterpret_cast<Context*>(context); }

// "ZSFAKE" + what tells nodes apart + kind + device.
void FillUuid(CUuuid* uuid, int device, bool of_slice) {
  uint64_t node = 1469598103934665603ull;
  for (const char c : Fake().settings().node)
    node = (node ^ static_cast<uint8_t>(c)) * 1099511628211ull;
  std::memset(uuid, 0, sizeof(*uuid));
  std::memcpy(uuid->bytes, "ZSFAKE", 6);
  std::memcpy(uuid->bytes + 6, &node, 8);
  uuid->bytes[14] = of_slice ? 'm' : 'g';
  uuid->bytes[15] = static_cast<char>(device + 1);
}

int PciBus(int device) { return 0x10 + device; }

// What CUDA's tables give for an H100; 0 for attributes that are not here.
int Attribute(CUdevice_attribute attribute, int device) {
  const auto& settings = Fake().settings();
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
      return settings.major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
      return settings.minor;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
      return PciBus(device);
    default:
      break;
  }
  static const auto* const values = new std::map<CUdevice_attribute, int>{
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
      {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 48 << 10},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 227 << 10},
      {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 228 << 10},
      {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
      {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
      {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
      {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 4},
      {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
      {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 50 << 20},
      {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
      {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
      {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
      {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR, 1},
      {CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, 0},
      {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
      {CU_DEVICE_ATTRIBUTE_ECC_ENABLED, 1},
      {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1980000},
      {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2619000},
      {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 5120},
      {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 64 << 10},
      {CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, CU_COMPUTEMODE_DEFAULT},
  };
  const auto it = values->find(attribute);
  return it == values->end() ? 0 : it->second;
}

std::string PciBusId(int device) {
  char text[16];
  std::snprintf(text, sizeof(text), "0000:%02X:00.0", PciBus(device));
  return text;
}

}  // namespace

#define REQUIRE_DEVICE(dev) \
  if (!Fake().IsOrdinal(dev)) return CUDA_ERROR_INVALID_DEVICE

extern "C" {

CUresult CUDAAPI cuInit(unsigned int flags) {
  FAKE_CUDA_ENTER(Need::kNothing);
  return flags != 0 ? CUDA_ERROR_INVALID_VALUE : Fake().Init();
}

CUresult CUDAAPI cuDriverGetVersion(int* driverVersion) {
  FAKE_CUDA_ENTER(Need::kNothing);
  *driverVersion = Fake().settings().driver;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorName(CUresult error, const char** pStr) {
  *pStr = zeroshard::fake_cuda::ErrorName(error);
  return *pStr == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuGetErrorString(CUresult error, const char** pStr) {
  *pStr = zeroshard::fake_cuda::ErrorText(error);
  return *pStr == nullptr ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

// Gives the newest version of a function, as the driver does for callers built with this cuda.h.
CUresult CUDAAPI cuGetProcAddress(const char* symbol, void** pfn, int cudaVersion, cuuint64_t,
                                  CUdriverProcAddressQueryResult* symbolStatus) {
  FAKE_CUDA_ENTER(Need::kNothing);
  *pfn = nullptr;
  if (symbolStatus != nullptr) *symbolStatus = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  if (cudaVersion > Fake().settings().driver) {
    if (symbolStatus != nullptr) *symbolStatus = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    return CUDA_ERROR_NOT_FOUND;
  }
  Dl_info here;
  dladdr(reinterpret_cast<void*>(&zeroshard::fake_cuda::ErrorName), &here);
  void* const self = dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  if (self == nullptr) return CUDA_ERROR_NOT_FOUND;
  for (const char* suffix : {"_v4", "_v3", "_v2", ""}) {
    *pfn = dlsym(self, (std::string(symbol) + suffix).c_str());
    if (*pfn != nullptr) break;
  }
  dlclose(self);
  if (*pfn == nullptr) return CUDA_ERROR_NOT_FOUND;
  if (symbolStatus != nullptr) *symbolStatus = CU_GET_PROC_ADDRESS_SUCCESS;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetCount(int* count) {
  FAKE_CUDA_ENTER(Need::kInit);
  *count = Fake().visible();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGet(CUdevice* device, int ordinal) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_DEVICE(ordinal);
  *device = ordinal;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetName(char* name, int len, CUdevice dev) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_DEVICE(dev);
  if (len <= 0) return CUDA_ERROR_INVALID_VALUE;
  const auto& settings = Fake().settings();
  const std::string full = settings.name + (settings.mig ? " MIG 1g.10gb" : "");
  std::snprintf(name, static_cast<size_t>(len), "%s", full.c_str());
  return CUDA_SUCCESS;
}

// Of the GPU that a MIG slice lies on: cuDeviceGetUuid_v2 gives the slice's.
#undef cuDeviceGetUuid
CUresult CUDAAPI cuDeviceGetUuid(CUuuid* uuid, CUdevice dev) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_DEVICE(dev);
  FillUuid(uuid, Fake().DeviceOf(dev), false);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice dev) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_DEVICE(dev);
  FillUuid(uuid, Fake().DeviceOf(dev), Fake().settings().mig);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceTotalMem(size_t* bytes, CUdevice dev) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_DEVICE(dev);
  *bytes = Fake().settings().memory;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetAttribute(int* pi, CUdevice_attribute attrib, CUdevice dev) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_DEVICE(dev);
  *pi = Attribute(attrib, Fake().DeviceOf(dev));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetPCIBusId(char* pciBusId, int len, CUdevice dev) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_DEVICE(dev);
  const std::string id = PciBusId(Fake().DeviceOf(dev));
  if (len < static_cast<int>(id.size()) + 1) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(pciBusId, id.c_str(), id.size() + 1);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDeviceGetByPCIBusId(CUdevice* dev, const char* pciBusId) {
  FAKE_CUDA_ENTER(Need::kInit);
  for (CUdevice ordinal = 0; ordinal < Fake().visible(); ++ordinal) {
    if (strcasecmp(PciBusId(Fake().DeviceOf(ordinal)).c_str(), pciBusId) != 0) continue;
    *dev = ordinal;
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_DEVICE;
}

CUresult CUDAAPI cuDeviceCanAccessPeer(int* canAccessPeer, CUdevice dev, CUdevice peerDev) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_DEVICE(dev);
  REQUIRE_DEVICE(peerDev);
  *canAccessPeer = dev != peerDev ? 1 : 0;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRetain(CUcontext* pctx, CUdevice dev) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_DEVICE(dev);
  const CUresult lost = Fake().LostError(Fake().DeviceOf(dev));
  if (lost != CUDA_SUCCESS) return lost;
  *pctx = Handle(Fake().RetainPrimary(dev));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxRelease(CUdevice dev) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_DEVICE(dev);
  return Fake().ReleasePrimary(dev);
}

CUresult CUDAAPI cuDevicePrimaryCtxGetState(CUdevice dev, unsigned int* flags, int* active) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_DEVICE(dev);
  const Context* const primary = Fake().PrimaryOf(dev);
  *active = primary != nullptr ? 1 : 0;
  *flags = primary != nullptr ? primary->flags : 0;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuDevicePrimaryCtxSetFlags(CUdevice dev, unsigned int flags) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_DEVICE(dev);
  Context* const primary = Fake().PrimaryOf(dev);
  if (primary != nullptr) primary->flags = flags;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxCreate(CUcontext* pctx, CUctxCreateParams*, unsigned int flags,
                             CUdevice dev) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_DEVICE(dev);
  Context* const context = Fake().NewContext(dev, flags);
  Runtime::Stack().push_back(context);
  *pctx = Handle(context);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxDestroy(CUcontext ctx) {
  FAKE_CUDA_ENTER(Need::kInit);
  Context* const context = FromHandle(ctx);
  if (!Fake().IsContext(context) || context->primary) return CUDA_ERROR_INVALID_CONTEXT;
  Fake().DestroyContext(context);
  auto& stack = Runtime::Stack();
  if (!stack.empty() && stack.back() == context) stack.pop_back();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPushCurrent(CUcontext ctx) {
  FAKE_CUDA_ENTER(Need::kInit);
  if (!Fake().IsContext(FromHandle(ctx))) return CUDA_ERROR_INVALID_CONTEXT;
  Runtime::Stack().push_back(FromHandle(ctx));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxPopCurrent(CUcontext* pctx) {
  FAKE_CUDA_ENTER(Need::kInit);
  auto& stack = Runtime::Stack();
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (pctx != nullptr) *pctx = Handle(stack.back());
  stack.pop_back();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSetCurrent(CUcontext ctx) {
  FAKE_CUDA_ENTER(Need::kInit);
  auto& stack = Runtime::Stack();
  if (ctx != nullptr && !Fake().IsContext(FromHandle(ctx))) return CUDA_ERROR_INVALID_CONTEXT;
  if (!stack.empty()) stack.pop_back();
  if (ctx != nullptr) stack.push_back(FromHandle(ctx));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetCurrent(CUcontext* pctx) {
  FAKE_CUDA_ENTER(Need::kInit);
  *pctx = Handle(Runtime::Current());
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetDevice(CUdevice* device) {
  FAKE_CUDA_ENTER(Need::kInit);
  if (Runtime::Current() == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
  *device = Fake().OrdinalOf(Runtime::Current()->device);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetFlags(unsigned int* flags) {
  FAKE_CUDA_ENTER(Need::kContext);
  *flags = Runtime::Current()->flags;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetApiVersion(CUcontext, unsigned int* version) {
  FAKE_CUDA_ENTER(Need::kInit);
  *version = 3020;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxGetStreamPriorityRange(int* leastPriority, int* greatestPriority) {
  FAKE_CUDA_ENTER(Need::kContext);
  if (leastPriority != nullptr) *leastPriority = 0;
  if (greatestPriority != nullptr) *greatestPriority = -5;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuCtxSynchronize(void) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Fake().SynchronizeContext(Runtime::Current());
}

CUresult CUDAAPI cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Fake().IsContext(FromHandle(peerContext)) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

}  // extern "C"
