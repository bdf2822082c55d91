// Compiled once per instruction set, ZS_ISA being V2, V3 or V4 (see worker/kernels.bzl). All
// functions have internal linkage or are always inlined, so that the linker cannot give one
// instruction set's code to another.
#include "worker/kernel_math.h"
#include "worker/optim/kernel_table.h"

#define ZS_CONCAT_INNER(a, b) a##b
#define ZS_CONCAT(a, b) ZS_CONCAT_INNER(a, b)

namespace zeroshard::optim_internal {
namespace {

using kernel::Bf16;
using kernel::Fp16;
using kernel::Fp32;

struct NoOutput {
  using Storage = uint16_t;
};

template <class Functor, class Grad, class Out>
void Update(const KernelArrays& arrays, uint64_t begin, uint64_t end, float grad_scale,
            const UpdateArgs& args) {
  const auto* __restrict grad = static_cast<const typename Grad::Storage*>(arrays.grad);
  float* __restrict param = arrays.param;
  float* __restrict state0 = arrays.state[0];
  float* __restrict state1 = arrays.state[1];
  auto* __restrict out = static_cast<typename Out::Storage*>(arrays.out);
  const UpdateArgs constants = args;
  for (uint64_t i = begin; i < end; ++i) {
    float p = param[i];
    float s0 = 0;
    float s1 = 0;
    if constexpr (Functor::kStates > 0) s0 = state0[i];
    if constexpr (Functor::kStates > 1) s1 = state1[i];
    Functor::Update(constants, Grad::Load(grad[i]) * grad_scale, p, s0, s1);
    param[i] = Fp32::Store(p);
    if constexpr (Functor::kStates > 0) state0[i] = Fp32::Store(s0);
    if constexpr (Functor::kStates > 1) state1[i] = Fp32::Store(s1);
    if constexpr (!__is_same(Out, NoOutput)) out[i] = Out::Store(p);
  }
}

}  // namespace

#define ZS_OUTPUTS(functor, grad)                                                              \
  {                                                                                            \
    Update<functor, grad, NoOutput>, Update<functor, grad, Fp32>, Update<functor, grad, Bf16>, \
        Update<functor, grad, Fp16>                                                            \
  }
#define ZS_ROW(kind, functor) \
  {ZS_OUTPUTS(functor, Fp32), ZS_OUTPUTS(functor, Bf16), ZS_OUTPUTS(functor, Fp16)},

const UpdateTable ZS_CONCAT(kUpdateTable, ZS_ISA) = {{ZS_FOR_EACH_OPTIMIZER(ZS_ROW)}};

}  // namespace zeroshard::optim_internal
