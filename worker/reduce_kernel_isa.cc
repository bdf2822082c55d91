// Compiled once per instruction set, ZS_ISA being V2, V3 or V4 (worker/kernels.bzl). All functions
// have internal linkage or are always inlined, so that the linker cannot mix instruction sets.
#include "worker/kernel_math.h"
#include "worker/reduce_table.h"

#define ZS_CONCAT_INNER(a, b) a##b
#define ZS_CONCAT(a, b) ZS_CONCAT_INNER(a, b)

namespace zeroshard::reduce_internal {
namespace {

using kernel::Bf16;
using kernel::Fp16;
using kernel::Fp32;

template <class Type, bool kAdd, bool kWeighted>
void Source(float* __restrict block, const void* source, uint64_t begin, uint32_t elements,
            float weight) {
  const auto* __restrict values = static_cast<const typename Type::Storage*>(source) + begin;
  for (uint32_t i = 0; i < elements; ++i) {
    float value = Type::Load(values[i]);
    if constexpr (kWeighted) value = value * weight;
    block[i] = kAdd ? block[i] + value : value;
  }
}

template <class Type, bool kAdd>
void Target(const float* __restrict block, void* target, uint64_t begin, uint32_t elements) {
  auto* __restrict values = static_cast<typename Type::Storage*>(target) + begin;
  for (uint32_t i = 0; i < elements; ++i) {
    values[i] = Type::Store(kAdd ? Type::Load(values[i]) + block[i] : block[i]);
  }
}

void AddBlock(float* __restrict block, const float* __restrict other, uint32_t elements) {
  for (uint32_t i = 0; i < elements; ++i) block[i] = block[i] + other[i];
}

}  // namespace

#define ZS_SOURCES(add)                                      \
  {                                                          \
    {Source<Fp32, add, false>, Source<Fp32, add, true>},     \
        {Source<Bf16, add, false>, Source<Bf16, add, true>}, \
        {Source<Fp16, add, false>, Source<Fp16, add, true>}, \
  }

const ReduceTable ZS_CONCAT(kReduceTable, ZS_ISA) = {
    ZS_SOURCES(false),
    ZS_SOURCES(true),
    {{Target<Fp32, false>, Target<Fp32, true>},
     {Target<Bf16, false>, Target<Bf16, true>},
     {Target<Fp16, false>, Target<Fp16, true>}},
    AddBlock,
};

}  // namespace zeroshard::reduce_internal
