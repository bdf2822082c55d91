// Compiled once per instruction set, ZS_ISA being V2, V3 or V4 (worker/kernels.bzl). All functions
// have internal linkage or are always inlined, so that the linker cannot mix instruction sets.
#include "worker/kernel_math.h"
#include "worker/norm_table.h"
#include "worker/squares_kernel.h"

#define ZS_CONCAT_INNER(a, b) a##b
#define ZS_CONCAT(a, b) ZS_CONCAT_INNER(a, b)

namespace zeroshard::norm_internal {
namespace {

using kernel::Bf16;
using kernel::Fp16;
using kernel::Fp32;
using kernel::SumSquares;

static_assert(kGrain == kernel::kSquaresGrain);

template <class Type>
double Grain(const void* data, uint64_t begin) {
  const auto* __restrict values = static_cast<const typename Type::Storage*>(data) + begin;
  if constexpr (__is_same(Type, Fp32)) {
    return SumSquares(values);
  } else {
    alignas(64) float block[kGrain];
    for (int i = 0; i < kGrain; ++i) block[i] = Type::Load(values[i]);
    return SumSquares(block);
  }
}

template <class Type>
double Masked(const void* data, uint64_t begin, uint32_t elements, const uint8_t* included) {
  const auto* __restrict values = static_cast<const typename Type::Storage*>(data) + begin;
  alignas(64) float block[kGrain] = {};
  for (uint32_t i = 0; i < elements; ++i) {
    block[i] = included[i] != 0 ? Type::Load(values[i]) : 0.0f;
  }
  return SumSquares(block);
}

}  // namespace

const NormTable ZS_CONCAT(kNormTable, ZS_ISA) = {
    {Grain<Fp32>, Grain<Bf16>, Grain<Fp16>},
    {Masked<Fp32>, Masked<Bf16>, Masked<Fp16>},
};

}  // namespace zeroshard::norm_internal
