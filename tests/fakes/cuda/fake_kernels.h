#ifndef ZEROSHARD_TESTS_FAKES_CUDA_FAKE_KERNELS_H_
#define ZEROSHARD_TESTS_FAKES_CUDA_FAKE_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace zeroshard::fake_cuda {

struct Dim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

enum class RangeAccess { kRead, kWrite };

// Bytes that a kernel reads, or reads and writes. `what` names the argument in a complaint.
struct KernelRange {
  uint64_t address = 0;
  uint64_t bytes = 0;
  RangeAccess access = RangeAccess::kRead;
  const char* what = "";
};

// A kernel of the fake device: host code under the kernel's name. Linked into libcuda.so.1, found
// by cuModuleGetFunction and cuLibraryGetKernel in whatever image is loaded.
//
// cuLaunchKernel copies parameter_bytes[i] bytes of parameter i at the call. The stream's thread
// then asks `pointers` for the device memory that the kernel touches: a range that is not mapped,
// was freed, lies outside its allocation, is not accessible to the stream's device or is host
// memory that was not registered ends the process with one sentence. Device memory that `pointers`
// does not name stays inaccessible while `run` runs, so that an undeclared access is a SIGSEGV.
struct FakeKernel {
  std::vector<size_t> parameter_bytes;
  std::function<void(void** params, Dim3 grid, Dim3 block, unsigned shared_bytes)> run;
  std::function<std::vector<KernelRange>(void** params)> pointers;
  unsigned max_threads_per_block = 1024;
};

// Before main only (a static FakeKernelRegistration); a name registered twice ends the process.
void RegisterFakeKernel(const std::string& name, FakeKernel kernel);

struct FakeKernelRegistration {
  FakeKernelRegistration(const std::string& name, FakeKernel kernel) {
    RegisterFakeKernel(name, std::move(kernel));
  }
};

// For `pointers`, where the addresses lie in device memory themselves: copies `bytes` at a device
// address (or in registered host memory) to `to`.
void ReadDevice(uint64_t address, void* to, size_t bytes);

}  // namespace zeroshard::fake_cuda

#endif  // ZEROSHARD_TESTS_FAKES_CUDA_FAKE_KERNELS_H_
