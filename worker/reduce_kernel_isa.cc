// Compiled once per instruction set, ZS_ISA being V2, V3 or V4 (worker/kernels.bzl). All functions
// have internal linkage or are always inlined, so that the linker cannot mix instruction sets.
#include "worker/kernel_math.h"
#include "worker/reduce_table.h"
#include "worker/squares_kernel.h"

#define ZS_CONCAT_INNER(a, b) a##b
#define ZS_CONCAT(a, b) ZS_CONCAT_INNER(a, b)

namespace zeroshard::reduce_internal {
namespace {

using kernel::Bf16;
using kernel::FloatVector;
using kernel::Fp16;
using kernel::Fp32;

static_assert(kGrain == kernel::kSquaresGrain);

template <class Type>
ZS_KERNEL_FN const typename Type::Storage* At(const void* data, uint64_t begin) {
  return static_cast<const typename Type::Storage*>(data) + begin;
}

template <class Type, bool kAdd, bool kWeighted>
void Source(float* __restrict block, const void* source, uint64_t begin, uint32_t elements,
            float weight) {
  const auto* __restrict values = At<Type>(source, begin);
  for (uint32_t i = 0; i < elements; ++i) {
    float value = Type::Load(values[i]);
    if constexpr (kWeighted) value = value * weight;
    block[i] = kAdd ? block[i] + value : value;
  }
}

template <class Type>
void Pair(float* __restrict block, const void* const* sources, uint64_t begin, uint32_t elements) {
  const auto* __restrict a = At<Type>(sources[0], begin);
  const auto* __restrict b = At<Type>(sources[1], begin);
  for (uint32_t i = 0; i < elements; ++i) block[i] = Type::Load(a[i]) + Type::Load(b[i]);
}

template <class Type>
void Quad(float* __restrict block, const void* const* sources, uint64_t begin, uint32_t elements) {
  const auto* __restrict a = At<Type>(sources[0], begin);
  const auto* __restrict b = At<Type>(sources[1], begin);
  const auto* __restrict c = At<Type>(sources[2], begin);
  const auto* __restrict d = At<Type>(sources[3], begin);
  for (uint32_t i = 0; i < elements; ++i) {
    block[i] = (Type::Load(a[i]) + Type::Load(b[i])) + (Type::Load(c[i]) + Type::Load(d[i]));
  }
}

template <class Type, bool kAdd>
void Target(const float* __restrict block, void* target, uint64_t begin, uint32_t elements) {
  auto* __restrict values = static_cast<typename Type::Storage*>(target) + begin;
  for (uint32_t i = 0; i < elements; ++i) {
    values[i] = Type::Store(kAdd ? Type::Load(values[i]) + block[i] : block[i]);
  }
}

// One vector, past the caches.
ZS_KERNEL_FN void Stream(float* target, FloatVector vector) {
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

template <class Type, bool kAdd, bool kStreamed>
double Grain(const float* __restrict block, void* target, uint64_t begin) {
  using Storage = typename Type::Storage;
  auto* values = static_cast<Storage*>(target) + begin;
  alignas(64) Storage line_buffer[kStreamed ? kGrain : 1];
  Storage* stored = kStreamed ? line_buffer : values;
  for (int i = 0; i < kGrain; ++i) {
    stored[i] = Type::Store(kAdd ? Type::Load(values[i]) + block[i] : block[i]);
  }
  if constexpr (kStreamed) {
    for (uint32_t at = 0; at < sizeof(line_buffer); at += sizeof(FloatVector)) {
      const auto* bytes = reinterpret_cast<const char*>(stored) + at;
      Stream(reinterpret_cast<float*>(reinterpret_cast<char*>(values) + at),
             kernel::LoadVector(reinterpret_cast<const float*>(bytes)));
    }
  }
  if constexpr (__is_same(Type, Fp32)) {
    return kernel::SumSquares(stored);
  } else {
    alignas(64) float widened[kGrain];
    for (int i = 0; i < kGrain; ++i) widened[i] = Type::Load(stored[i]);
    return kernel::SumSquares(widened);
  }
}

// A vector of a source's elements, widened.
ZS_KERNEL_FN FloatVector LoadWide(Fp32, const void* source, uint64_t at) {
  return kernel::LoadVector(static_cast<const float*>(source) + at);
}
ZS_KERNEL_FN FloatVector LoadWide(Bf16, const void* source, uint64_t at) {
  const auto* values = static_cast<const uint16_t*>(source) + at;
#if defined(__AVX512F__)
  typedef short Halves __attribute__((vector_size(32)));
  typedef int Words __attribute__((vector_size(64)));
  Halves halves;
  __builtin_memcpy(&halves, values, sizeof(halves));
  const Words words = __builtin_ia32_pmovzxwd512_mask(halves, Words{}, 0xffff);
#elif defined(__AVX2__)
  typedef short Halves __attribute__((vector_size(16)));
  typedef int Words __attribute__((vector_size(32)));
  Halves halves;
  __builtin_memcpy(&halves, values, sizeof(halves));
  const auto words = (Words)__builtin_ia32_pmovzxwd256(halves);
#else
  typedef int Words __attribute__((vector_size(16)));
  const Words words = {values[0], values[1], values[2], values[3]};
#endif
  return (FloatVector)(words << 16);
}

template <class Type, int kInputs>
ZS_KERNEL_FN FloatVector SumWide(const void* const* sources, uint64_t at) {
  if constexpr (kInputs == 1) {
    return LoadWide(Type(), sources[0], at);
  } else {
    return SumWide<Type, kInputs / 2>(sources, at) +
           SumWide<Type, kInputs / 2>(sources + kInputs / 2, at);
  }
}

enum class Into { kStore, kAdd, kStream };

// Whole grains of an fp32 target in one go: nothing but the result leaves the registers.
template <class Type, int kInputs, Into kInto>
void Direct(const void* const* sources, void* target, uint64_t begin, uint32_t grains,
            double* squares) {
  const void* inputs[kInputs];
  for (int i = 0; i < kInputs; ++i) inputs[i] = sources[i];
  float* values = static_cast<float*>(target);
  const FloatVector nan = __builtin_nanf("") - FloatVector{};
  for (uint32_t grain = 0; grain < grains; ++grain, begin += kGrain) {
    kernel::SquareSums sums;
    for (int i = 0; i < kGrain; i += kernel::kSquaresLanes) {
      for (int part = 0; part < kernel::kSquaresLanes / kernel::kVectorFloats; ++part) {
        const uint64_t at = begin + i + part * kernel::kVectorFloats;
        FloatVector sum = SumWide<Type, kInputs>(inputs, at);
        if constexpr (kInto == Into::kAdd) sum = kernel::LoadVector(values + at) + sum;
        sum = sum == sum ? sum : nan;
        if constexpr (kInto == Into::kStream) {
          Stream(values + at, sum);
        } else {
          __builtin_memcpy(values + at, &sum, sizeof(sum));
        }
        sums.Add(part, sum);
      }
    }
    squares[grain] = sums.Total();
  }
}

void StreamFence() {
#if defined(__SSE2__)
  __builtin_ia32_sfence();
#endif
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

#define ZS_DIRECT_OF(type, inputs)                                        \
  {                                                                       \
    Direct<type, inputs, Into::kStore>, Direct<type, inputs, Into::kAdd>, \
        Direct<type, inputs, Into::kStream>                               \
  }
#define ZS_DIRECT(inputs) \
  { ZS_DIRECT_OF(Fp32, inputs), ZS_DIRECT_OF(Bf16, inputs) }

const ReduceTable ZS_CONCAT(kReduceTable, ZS_ISA) = {
    ZS_SOURCES(false),
    ZS_SOURCES(true),
    {Pair<Fp32>, Pair<Bf16>, Pair<Fp16>},
    {Quad<Fp32>, Quad<Bf16>, Quad<Fp16>},
    {{Target<Fp32, false>, Target<Fp32, true>},
     {Target<Bf16, false>, Target<Bf16, true>},
     {Target<Fp16, false>, Target<Fp16, true>}},
    {{Grain<Fp32, false, false>, Grain<Fp32, true, false>},
     {Grain<Bf16, false, false>, Grain<Bf16, true, false>},
     {Grain<Fp16, false, false>, Grain<Fp16, true, false>}},
    {Grain<Fp32, false, true>, Grain<Bf16, false, true>, Grain<Fp16, false, true>},
    {ZS_DIRECT(1), ZS_DIRECT(2), ZS_DIRECT(4)},
    StreamFence,
    AddBlock,
};

}  // namespace zeroshard::reduce_internal
