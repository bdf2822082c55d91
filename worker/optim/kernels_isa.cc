// Compiled once per instruction set, ZS_ISA being V2, V3 or V4 (see worker/kernels.bzl). All
// functions have internal linkage or are always inlined, so that the linker cannot give one
// instruction set's code to another.
#include "worker/kernel_math.h"
#include "worker/optim/kernel_table.h"
#include "worker/optim/split_master.h"

#define ZS_CONCAT_INNER(a, b) a##b
#define ZS_CONCAT(a, b) ZS_CONCAT_INNER(a, b)

namespace zeroshard::optim_internal {
namespace {

using kernel::Bf16;
using kernel::Fp32;

// A template of its own, because a compiler trusts __restrict of parameters only.
template <class Functor, class Grad, CoreMaster kMaster>
ZS_KERNEL_FN void Loop(const typename Grad::Storage* __restrict grad, float* __restrict param,
                       uint16_t* __restrict high, uint16_t* __restrict low,
                       float* __restrict state0, float* __restrict state1, uint16_t* __restrict out,
                       uint64_t n, float grad_scale, const UpdateArgs args) {
  for (uint64_t i = 0; i < n; ++i) {
    float p;
    if constexpr (kMaster == kCoreSplit) {
      p = kernel::JoinedMaster(high[i], low[i]);
    } else {
      p = param[i];
    }
    float s0 = 0;
    float s1 = 0;
    if constexpr (Functor::kStates > 0) s0 = state0[i];
    if constexpr (Functor::kStates > 1) s1 = state1[i];
    Functor::Update(args, Grad::Load(grad[i]) * grad_scale, p, s0, s1);
    if constexpr (kMaster == kCoreSplit) {
      const kernel::Halves halves = kernel::SplitOf(p);
      high[i] = halves.high;
      low[i] = halves.low;
    } else {
      const float canonical = kernel::CanonicalNan(p);
      param[i] = canonical;
      if constexpr (kMaster == kCoreFloat32ToBf16) out[i] = Bf16::StoreCanonical(canonical);
    }
    if constexpr (Functor::kStates > 0) state0[i] = Fp32::Store(s0);
    if constexpr (Functor::kStates > 1) state1[i] = Fp32::Store(s1);
  }
}

// The widest vector that this instruction set stores past the caches.
#if defined(__AVX512F__)
typedef float StreamVector __attribute__((vector_size(64)));
#elif defined(__AVX2__)
typedef float StreamVector __attribute__((vector_size(32)));
#else
typedef float StreamVector __attribute__((vector_size(16)));
#endif

ZS_KERNEL_FN void StreamOne(float* target, StreamVector vector) {
#if defined(__AVX512F__)
  __builtin_ia32_movntps512(target, vector);
#elif defined(__AVX2__)
  __builtin_ia32_movntps256(target, vector);
#elif defined(__SSE2__)
  __builtin_ia32_movntps(target, vector);
#else
  __builtin_memcpy(target, &vector, sizeof(vector));
#endif
}

ZS_KERNEL_FN void StreamBf16(const uint16_t* __restrict in, uint64_t n, uint16_t* __restrict out) {
  constexpr uint64_t kLine = 32;  // elements
  uint64_t at = 0;
  if (reinterpret_cast<uintptr_t>(out) % (2 * kLine) == 0) {
    for (; at + kLine <= n; at += kLine) {
      for (uint64_t part = 0; part < kLine; part += sizeof(StreamVector) / 2) {
        StreamVector vector;
        __builtin_memcpy(&vector, in + at + part, sizeof(vector));
        StreamOne(reinterpret_cast<float*>(out + at + part), vector);
      }
    }
  }
  for (; at < n; ++at) out[at] = in[at];
}

template <class Functor, class Grad, CoreMaster kMaster>
ZS_KERNEL_FN void LoopFrom(const CoreArrays& arrays, uint64_t begin, uint64_t n, uint16_t* out,
                           float grad_scale, const UpdateArgs& args) {
  const auto at = [begin](auto* element0, bool used) __attribute__((always_inline)) {
    return used ? element0 + begin : nullptr;
  };
  constexpr bool kSplit = kMaster == kCoreSplit;
  Loop<Functor, Grad, kMaster>(static_cast<const typename Grad::Storage*>(arrays.grad) + begin,
                               at(arrays.param, !kSplit), at(arrays.high, kSplit),
                               at(arrays.low, kSplit), at(arrays.state[0], Functor::kStates > 0),
                               at(arrays.state[1], Functor::kStates > 1), out, n, grad_scale, args);
}

template <class Functor, class Grad, CoreMaster kMaster>
void Update(const CoreArrays& arrays, uint64_t begin, uint64_t end, float grad_scale,
            const UpdateArgs& args) {
  if constexpr (kMaster == kCoreFloat32ToBf16Streamed) {
    constexpr uint64_t kPart = 128;
    alignas(64) uint16_t out[kPart];
    for (uint64_t at = begin; at < end;) {
      const uint64_t next = (at / kPart + 1) * kPart;
      const uint64_t n = (next < end ? next : end) - at;
      LoopFrom<Functor, Grad, kCoreFloat32ToBf16>(arrays, at, n, out, grad_scale, args);
      StreamBf16(out, n, arrays.out + at);
      at += n;
    }
  } else {
    uint16_t* out = kMaster == kCoreFloat32ToBf16 ? arrays.out + begin : nullptr;
    LoopFrom<Functor, Grad, kMaster>(arrays, begin, end - begin, out, grad_scale, args);
  }
}

}  // namespace

#define ZS_MASTERS(functor, grad)                                                            \
  {                                                                                          \
    Update<functor, grad, kCoreFloat32>, Update<functor, grad, kCoreFloat32ToBf16>,          \
        Update<functor, grad, kCoreFloat32ToBf16Streamed>, Update<functor, grad, kCoreSplit> \
  }
#define ZS_ROW(kind, functor) {ZS_MASTERS(functor, Fp32), ZS_MASTERS(functor, Bf16)},

const CoreTable ZS_CONCAT(kCoreTable, ZS_ISA) = {{ZS_FOR_EACH_OPTIMIZER(ZS_ROW)}};

}  // namespace zeroshard::optim_internal
