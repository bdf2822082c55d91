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
      const float canonical = kernel::CanonicalMaster(p);
      high[i] = kernel::HighHalf(canonical);
      low[i] = kernel::LowHalf(canonical);
    } else {
      const float canonical = kernel::CanonicalNan(p);
      param[i] = canonical;
      if constexpr (kMaster == kCoreFloat32ToBf16) out[i] = Bf16::StoreCanonical(canonical);
    }
    if constexpr (Functor::kStates > 0) state0[i] = Fp32::Store(s0);
    if constexpr (Functor::kStates > 1) state1[i] = Fp32::Store(s1);
  }
}

template <class Functor, class Grad, CoreMaster kMaster>
void Update(const CoreArrays& arrays, uint64_t n, float grad_scale, const UpdateArgs& args) {
  Loop<Functor, Grad, kMaster>(static_cast<const typename Grad::Storage*>(arrays.grad),
                               arrays.param, arrays.high, arrays.low, arrays.state[0],
                               arrays.state[1], arrays.out, n, grad_scale, args);
}

}  // namespace

#define ZS_MASTERS(functor, grad)                                                   \
  {                                                                                 \
    Update<functor, grad, kCoreFloat32>, Update<functor, grad, kCoreFloat32ToBf16>, \
        Update<functor, grad, kCoreSplit>                                           \
  }
#define ZS_ROW(kind, functor) {ZS_MASTERS(functor, Fp32), ZS_MASTERS(functor, Bf16)},

const CoreTable ZS_CONCAT(kCoreTable, ZS_ISA) = {{ZS_FOR_EACH_OPTIMIZER(ZS_ROW)}};

}  // namespace zeroshard::optim_internal
