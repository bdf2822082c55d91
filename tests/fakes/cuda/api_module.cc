// Modules, libraries and kernels of the fake driver.

#include <cuda.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/fakes/cuda/image.h"
#include "tests/fakes/cuda/kernels.h"
#include "tests/fakes/cuda/runtime.h"

using zeroshard::fake_cuda::CheckImage;
using zeroshard::fake_cuda::Complain;
using zeroshard::fake_cuda::Dim3;
using zeroshard::fake_cuda::FakeKernel;
using zeroshard::fake_cuda::FindFakeKernel;
using zeroshard::fake_cuda::Function;
using zeroshard::fake_cuda::KernelRange;
using zeroshard::fake_cuda::Module;
using zeroshard::fake_cuda::Need;
using zeroshard::fake_cuda::Range;
using zeroshard::fake_cuda::RangeAccess;
using zeroshard::fake_cuda::Runtime;
using zeroshard::fake_cuda::Stream;
using zeroshard::fake_cuda::Work;

namespace {

Runtime& Fake() { return Runtime::Get(); }

// Parameters as the launch found them.
class Arguments {
 public:
  Arguments(const FakeKernel& kernel, void** params) {
    for (size_t i = 0; i < kernel.parameter_bytes.size(); ++i) {
      const size_t units = (kernel.parameter_bytes[i] + sizeof(Unit) - 1) / sizeof(Unit);
      copies_.emplace_back(new Unit[units]);
      std::memcpy(copies_.back().get(), params[i], kernel.parameter_bytes[i]);
      pointers_.push_back(copies_.back().get());
    }
  }
  void** get() { return pointers_.data(); }

 private:
  struct alignas(16) Unit {
    char bytes[16];
  };
  std::vector<std::unique_ptr<Unit[]>> copies_;
  std::vector<void*> pointers_;
};

template <typename Handle>
CUresult Load(Handle* loaded, const void* image, zeroshard::fake_cuda::Context* context) {
  const auto& settings = Fake().settings();
  const CUresult result = CheckImage(image, settings.major, settings.minor);
  if (result != CUDA_SUCCESS) return result;
  auto module = std::make_shared<Module>();
  module->context = context;
  *loaded = Fake().modules.Add<Handle>(std::move(module));
  return CUDA_SUCCESS;
}

template <typename Handle>
CUresult Unload(Handle handle) {
  const std::shared_ptr<Module> module = Fake().modules.Remove(handle);
  if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  for (const std::shared_ptr<Function>& function : Fake().functions.All()) {
    if (function->module == module.get()) Fake().functions.Remove(function.get());
  }
  return CUDA_SUCCESS;
}

template <typename Handle, typename Owner>
CUresult FindKernel(Handle* found, Owner owner, const char* name) {
  const std::shared_ptr<Module> module = Fake().modules.Find(owner);
  if (module == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const FakeKernel* const kernel = FindFakeKernel(name);
  if (kernel == nullptr) return CUDA_ERROR_NOT_FOUND;
  for (const std::shared_ptr<Function>& known : Fake().functions.All()) {
    if (known->module != module.get() || known->kernel != kernel) continue;
    *found = reinterpret_cast<Handle>(known.get());
    return CUDA_SUCCESS;
  }
  auto function = std::make_shared<Function>();
  function->name = name;
  function->kernel = kernel;
  function->module = module.get();
  *found = Fake().functions.Add<Handle>(std::move(function));
  return CUDA_SUCCESS;
}

bool FitsDevice(const Function& function, Dim3 grid, Dim3 block, unsigned shared_bytes) {
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  return grid.x > 0 && grid.y > 0 && grid.z > 0 && threads > 0 && grid.x <= 0x7fffffff &&
         grid.y <= 65535 && grid.z <= 65535 && block.x <= 1024 && block.y <= 1024 &&
         block.z <= 64 && threads <= function.kernel->max_threads_per_block &&
         shared_bytes <= static_cast<unsigned>(function.max_dynamic_shared);
}

std::vector<Range> RangesOf(const FakeKernel& kernel, void** params) {
  std::vector<Range> ranges;
  if (!kernel.pointers) return ranges;
  for (const KernelRange& range : kernel.pointers(params)) {
    ranges.push_back(
        {range.address, range.bytes, range.access == RangeAccess::kWrite, range.what, false});
  }
  return ranges;
}

CUresult Launch(CUfunction handle, Dim3 grid, Dim3 block, unsigned shared_bytes, CUstream on,
                void** params, void** extra) {
  const std::shared_ptr<Function> function = Fake().functions.Find(handle);
  const std::shared_ptr<Stream> stream = Fake().FindStream(on);
  if (function == nullptr || stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (stream->context() != Runtime::Current()) return CUDA_ERROR_INVALID_HANDLE;
  const FakeKernel* const kernel = function->kernel;
  if (!FitsDevice(*function, grid, block, shared_bytes) || extra != nullptr ||
      (params == nullptr && !kernel->parameter_bytes.empty())) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  auto arguments = std::make_shared<Arguments>(*kernel, params);
  Work work;
  work.name = function->name.c_str();
  work.more_ranges = [kernel, arguments] { return RangesOf(*kernel, arguments->get()); };
  work.run = [function, arguments, grid, block, shared_bytes] {
    function->kernel->run(arguments->get(), grid, block, shared_bytes);
    return CUDA_SUCCESS;
  };
  stream->Enqueue(std::move(work));
  return CUDA_SUCCESS;
}

CUresult GetAttribute(const Function& function, CUfunction_attribute attribute, int* value) {
  switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
      *value = static_cast<int>(function.kernel->max_threads_per_block);
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
      *value = function.max_dynamic_shared;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_NUM_REGS:
      *value = 32;
      return CUDA_SUCCESS;
    case CU_FUNC_ATTRIBUTE_PTX_VERSION:
    case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
      *value = Fake().settings().major * 10 + Fake().settings().minor;
      return CUDA_SUCCESS;
    default:
      *value = 0;
      return attribute < CU_FUNC_ATTRIBUTE_MAX ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  }
}

CUresult SetAttribute(Function* function, CUfunction_attribute attribute, int value) {
  if (attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) return CUDA_SUCCESS;
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 ||
      value > 227 << 10) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  function->max_dynamic_shared = value;
  return CUDA_SUCCESS;
}

// Offsets as a compiler for this host lays out a struct of the parameters, each aligned to at
// most 16.
CUresult ParameterInfo(const Function& function, size_t index, size_t* offset, size_t* bytes) {
  const std::vector<size_t>& sizes = function.kernel->parameter_bytes;
  if (index >= sizes.size()) return CUDA_ERROR_INVALID_VALUE;
  size_t at = 0;
  for (size_t i = 0;; ++i) {
    const size_t alignment = std::min<size_t>(sizes[i] & -sizes[i], 8);
    at = (at + alignment - 1) / alignment * alignment;
    if (i == index) break;
    at += sizes[i];
  }
  *offset = at;
  if (bytes != nullptr) *bytes = sizes[index];
  return CUDA_SUCCESS;
}

}  // namespace

#define REQUIRE_FUNCTION(handle)                                            \
  const std::shared_ptr<Function> function = Fake().functions.Find(handle); \
  if (function == nullptr) return CUDA_ERROR_INVALID_HANDLE

extern "C" {

CUresult CUDAAPI cuModuleLoadData(CUmodule* module, const void* image) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Load(module, image, Runtime::Current());
}

CUresult CUDAAPI cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned int,
                                    CUjit_option*, void**) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Load(module, image, Runtime::Current());
}

CUresult CUDAAPI cuModuleLoadFatBinary(CUmodule* module, const void* fatCubin) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Load(module, fatCubin, Runtime::Current());
}

CUresult CUDAAPI cuModuleUnload(CUmodule hmod) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Unload(hmod);
}

CUresult CUDAAPI cuModuleGetFunction(CUfunction* hfunc, CUmodule hmod, const char* name) {
  FAKE_CUDA_ENTER(Need::kContext);
  return FindKernel(hfunc, hmod, name);
}

CUresult CUDAAPI cuLibraryLoadData(CUlibrary* library, const void* code, CUjit_option*, void**,
                                   unsigned int, CUlibraryOption*, void**, unsigned int) {
  FAKE_CUDA_ENTER(Need::kInit);
  return Load(library, code, nullptr);
}

CUresult CUDAAPI cuLibraryUnload(CUlibrary library) {
  FAKE_CUDA_ENTER(Need::kInit);
  return Unload(library);
}

CUresult CUDAAPI cuLibraryGetKernel(CUkernel* pKernel, CUlibrary library, const char* name) {
  FAKE_CUDA_ENTER(Need::kInit);
  return FindKernel(pKernel, library, name);
}

CUresult CUDAAPI cuLibraryGetModule(CUmodule* pMod, CUlibrary library) {
  FAKE_CUDA_ENTER(Need::kContext);
  if (Fake().modules.Find(library) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *pMod = reinterpret_cast<CUmodule>(library);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuKernelGetFunction(CUfunction* pFunc, CUkernel kernel) {
  FAKE_CUDA_ENTER(Need::kContext);
  REQUIRE_FUNCTION(kernel);
  *pFunc = reinterpret_cast<CUfunction>(kernel);
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuKernelGetName(const char** name, CUkernel kernel) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_FUNCTION(kernel);
  *name = function->name.c_str();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuFuncGetName(const char** name, CUfunction hfunc) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_FUNCTION(hfunc);
  *name = function->name.c_str();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuKernelGetAttribute(int* pi, CUfunction_attribute attrib, CUkernel kernel,
                                      CUdevice) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_FUNCTION(kernel);
  return GetAttribute(*function, attrib, pi);
}

CUresult CUDAAPI cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel,
                                      CUdevice) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_FUNCTION(kernel);
  return SetAttribute(function.get(), attrib, val);
}

CUresult CUDAAPI cuKernelGetParamInfo(CUkernel kernel, size_t paramIndex, size_t* paramOffset,
                                      size_t* paramSize) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_FUNCTION(kernel);
  return ParameterInfo(*function, paramIndex, paramOffset, paramSize);
}

CUresult CUDAAPI cuFuncGetParamInfo(CUfunction func, size_t paramIndex, size_t* paramOffset,
                                    size_t* paramSize) {
  FAKE_CUDA_ENTER(Need::kInit);
  REQUIRE_FUNCTION(func);
  return ParameterInfo(*function, paramIndex, paramOffset, paramSize);
}

CUresult CUDAAPI cuFuncGetAttribute(int* pi, CUfunction_attribute attrib, CUfunction hfunc) {
  FAKE_CUDA_ENTER(Need::kContext);
  REQUIRE_FUNCTION(hfunc);
  return GetAttribute(*function, attrib, pi);
}

CUresult CUDAAPI cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value) {
  FAKE_CUDA_ENTER(Need::kContext);
  REQUIRE_FUNCTION(hfunc);
  return SetAttribute(function.get(), attrib, value);
}

CUresult CUDAAPI cuOccupancyMaxActiveBlocksPerMultiprocessor(int* numBlocks, CUfunction func,
                                                             int blockSize, size_t) {
  FAKE_CUDA_ENTER(Need::kContext);
  REQUIRE_FUNCTION(func);
  if (blockSize <= 0) return CUDA_ERROR_INVALID_VALUE;
  *numBlocks = 2048 / blockSize;
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
                                unsigned int gridDimZ, unsigned int blockDimX,
                                unsigned int blockDimY, unsigned int blockDimZ,
                                unsigned int sharedMemBytes, CUstream hStream, void** kernelParams,
                                void** extra) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Launch(f, {gridDimX, gridDimY, gridDimZ}, {blockDimX, blockDimY, blockDimZ},
                sharedMemBytes, hStream, kernelParams, extra);
}

CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction f, void** kernelParams,
                                  void** extra) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Launch(f, {config->gridDimX, config->gridDimY, config->gridDimZ},
                {config->blockDimX, config->blockDimY, config->blockDimZ}, config->sharedMemBytes,
                config->hStream, kernelParams, extra);
}

}  // extern "C"
