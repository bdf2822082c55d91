// Compiled once per instruction set, ZS_ISA being V2, V3 or V4 (worker/kernels.bzl). All functions
// have internal linkage or are always inlined, so that the linker cannot mix instruction sets.
#include "worker/kernel_math.h"
#include "worker/norm_table.h"

#define ZS_CONCAT_INNER(a, b) a##b
#define ZS_CONCAT(a, b) ZS_CONCAT_INNER(a, b)

namespace zeroshard::norm_internal {
namespace {

using kernel::Bf16;
using kernel::Fp16;
using kernel::Fp32;

constexpr int kLanes = 16;
typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
typedef double Doubles __attribute__((vector_size(kLanes * sizeof(double))));

// The definition in grad_norm.h, on 256 floats.
ZS_KERNEL_FN double SumSquares(const float* values) {
  Doubles sums = {};
  for (int i = 0; i < kGrain; i += kLanes) {
    Floats floats;
    __builtin_memcpy(&floats, values + i, sizeof(floats));
    const Doubles wide = __builtin_convertvector(floats, Doubles);
    sums += wide * wide;
  }
  double lanes[kLanes];
  __builtin_memcpy(lanes, &sums, sizeof(lanes));
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    for (int k = 0; k < distance; ++k) lanes[k] += lanes[k + distance];
  }
  return lanes[0];
}

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
