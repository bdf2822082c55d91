// The GPU kernels (worker/cuda/kernels.cu) compiled as host code: one table, by name. The fake
// device runs them for launches of product code, tests run them directly.
#ifndef ZEROSHARD_TESTS_FAKES_CUDA_HOST_KERNELS_H_
#define ZEROSHARD_TESTS_FAKES_CUDA_HOST_KERNELS_H_

#include <cstddef>
#include <cstdint>
#include <span>

namespace zeroshard {

struct HostKernel {
  const char* name = "";
  size_t params_bytes = 0;
  // Runs all blocks of a grid, one after another, row by row. `params` points to the kernel's
  // parameter, in which addresses are host addresses; aligned as malloc aligns.
  void (*run)(const void* params, uint32_t blocks, uint32_t rows) = nullptr;
};

// All kernels, in the order of gpu::KernelNames().
std::span<const HostKernel> HostKernels();

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_FAKES_CUDA_HOST_KERNELS_H_
