// One source for a GPU and for host code: how kernel files (worker/cuda/kernels.cu) name threads,
// barriers and shared memory, and how they reach device memory.
//
// A kernel is written as phases: code for each thread of a block, with barriers between. nvcc makes
// a __global__ function of it. Other compilers make a function that runs one whole block, thread by
// thread, phase by phase; the fake GPU of the tests calls it for each block of the grid.
//
//   ZS_KERNEL(zs_example, ExampleParams) {
//     ZS_SHARED float sums[kBlockThreads];
//     ZS_THREADS(thread) sums[thread] = First(params, BlockIndex(), thread);
//     ZS_BARRIER();
//     ZS_THREADS(thread) Second(params, sums, thread);
//   }
//
// Barriers stand outside of loops over threads and are reached by all. No variable but those in
// ZS_SHARED lives from one phase to the next.
#ifndef ZEROSHARD_WORKER_CUDA_KERNEL_LAUNCH_H_
#define ZEROSHARD_WORKER_CUDA_KERNEL_LAUNCH_H_

#include <cstdint>

#include "worker/kernel_math.h"

namespace zeroshard::gpu {

inline constexpr uint32_t kBlockThreads = 256;

#if defined(__CUDACC__)

// ZS_WIDE_KERNEL: for those that need more registers; two blocks a multiprocessor.
#define ZS_KERNEL(name, Params) \
  extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ Params params)
#define ZS_WIDE_KERNEL(name, Params) \
  extern "C" __global__ void __launch_bounds__(256, 2) name(const __grid_constant__ Params params)
#define ZS_SHARED __shared__
#define ZS_THREADS(thread) if (const uint32_t thread = threadIdx.x; true)
#define ZS_BARRIER() __syncthreads()
#define ZS_UNROLL _Pragma("unroll")

__device__ __forceinline__ uint32_t BlockIndex() { return blockIdx.x; }
__device__ __forceinline__ uint32_t BlockCount() { return gridDim.x; }
__device__ __forceinline__ uint32_t BlockRow() { return blockIdx.y; }

#else

#define ZS_KERNEL(name, Params) extern "C" void name(const Params& params)
#define ZS_WIDE_KERNEL(name, Params) ZS_KERNEL(name, Params)
#define ZS_SHARED
#define ZS_THREADS(thread) \
  for (uint32_t thread = 0; thread < ::zeroshard::gpu::kBlockThreads; ++thread)
#define ZS_BARRIER() static_cast<void>(0)
#define ZS_UNROLL _Pragma("GCC unroll 16")

// The block that runs on this thread.
struct HostBlock {
  uint32_t index = 0;
  uint32_t count = 1;
  uint32_t row = 0;
};
inline thread_local HostBlock host_block;

ZS_KERNEL_FN uint32_t BlockIndex() { return host_block.index; }
ZS_KERNEL_FN uint32_t BlockCount() { return host_block.count; }
ZS_KERNEL_FN uint32_t BlockRow() { return host_block.row; }

#endif

// The object of type T at a device address, or the element `index` of an array of such.
template <class T>
ZS_KERNEL_FN T* At(uint64_t address, uint64_t index = 0) {
  T* const pointer = reinterpret_cast<T*>(address) + index;
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(pointer));
#endif
  return pointer;
}

// One access of 16 bytes, and of 8.
struct alignas(16) Words4 {
  uint32_t x, y, z, w;
};
struct alignas(8) Words2 {
  uint32_t x, y;
};

// Elements that a thread handles at a time: 16 bytes of fp32.
inline constexpr uint32_t kVector = 4;

// The same of kernels whose arrays are of 16-bit elements.
inline constexpr uint32_t kOctet = 8;

// Four elements in fp32.
struct Floats {
  float at[kVector];
};

// The order of DType (base/dtype.h).
enum Type : uint32_t { kTypeFloat32, kTypeBfloat16, kTypeFloat16 };

// `value` is stored as it is: whoever computed it has made its NaNs canonical.
ZS_KERNEL_FN void StoreFloat32(uint64_t address, uint64_t element, const Floats& value) {
  *At<Words4>(address, element / kVector) = {
      kernel::BitsOf(value.at[0]), kernel::BitsOf(value.at[1]), kernel::BitsOf(value.at[2]),
      kernel::BitsOf(value.at[3])};
}

template <class Format>
ZS_KERNEL_FN Floats WidenHalves(const Words2& words) {
  return {{Format::Load(static_cast<uint16_t>(words.x)),
           Format::Load(static_cast<uint16_t>(words.x >> 16)),
           Format::Load(static_cast<uint16_t>(words.y)),
           Format::Load(static_cast<uint16_t>(words.y >> 16))}};
}

template <class Format>
ZS_KERNEL_FN Words2 NarrowToHalves(const Floats& value) {
  const auto pair = [&](uint32_t first) __attribute__((always_inline)) {
    return static_cast<uint32_t>(Format::Store(value.at[first])) |
           static_cast<uint32_t>(Format::Store(value.at[first + 1])) << 16;
  };
  return {pair(0), pair(2)};
}

// Elements [element, element + 4) of an array as they lie in memory; of 16-bit types in x and y.
ZS_KERNEL_FN Words4 LoadRaw(uint32_t type, uint64_t address, uint64_t element) {
  if (type == kTypeFloat32) return *At<const Words4>(address, element / kVector);
  const Words2 words = *At<const Words2>(address, element / kVector);
  return {words.x, words.y, 0, 0};
}

// Their values, exactly. Apart from the load, so that a thread asks for all that it needs before it
// waits for any of it.
ZS_KERNEL_FN Floats Widen(uint32_t type, const Words4& raw) {
  if (type == kTypeFloat32) {
    return {{kernel::FloatOf(raw.x), kernel::FloatOf(raw.y), kernel::FloatOf(raw.z),
             kernel::FloatOf(raw.w)}};
  }
  return type == kTypeBfloat16 ? WidenHalves<kernel::Bf16>({raw.x, raw.y})
                               : WidenHalves<kernel::Fp16>({raw.x, raw.y});
}

ZS_KERNEL_FN Floats Load(uint32_t type, uint64_t address, uint64_t element) {
  return Widen(type, LoadRaw(type, address, element));
}

// Rounded to nearest even, NaNs made canonical.
ZS_KERNEL_FN void Store(uint32_t type, uint64_t address, uint64_t element, Floats value) {
  if (type == kTypeFloat32) {
    ZS_UNROLL for (uint32_t i = 0; i < kVector; ++i) {
      value.at[i] = kernel::CanonicalNan(value.at[i]);
    }
    return StoreFloat32(address, element, value);
  }
  *At<Words2>(address, element / kVector) = type == kTypeBfloat16
                                                ? NarrowToHalves<kernel::Bf16>(value)
                                                : NarrowToHalves<kernel::Fp16>(value);
}

}  // namespace zeroshard::gpu

#endif  // ZEROSHARD_WORKER_CUDA_KERNEL_LAUNCH_H_
