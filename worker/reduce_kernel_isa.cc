// Compiled once per instruction set, ZS_ISA being V2, V3 or V4 (worker/kernels.bzl). All functions
// have internal linkage or are always inlined, so that the linker cannot mix instruction sets.
#include "worker/kernel_math.h"
#include "worker/reduce_table.h"
#include "worker/squares_kernel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define ZS_CONCAT_INNER(a, b) a##b
#define ZS_CONCAT(a, b) ZS_CONCAT_INNER(a, b)

namespace zeroshard::reduce_internal {
namespace {

using kernel::Bf16;
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

// Whole lines, past the caches; both sides are aligned to 64 bytes.
ZS_KERNEL_FN void StreamLines(void* target, const void* source, uint32_t bytes) {
#if defined(__AVX512F__)
  for (uint32_t at = 0; at < bytes; at += sizeof(__m512i)) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(static_cast<char*>(target) + at),
                        *reinterpret_cast<const __m512i*>(static_cast<const char*>(source) + at));
  }
#elif defined(__x86_64__)
  for (uint32_t at = 0; at < bytes; at += sizeof(__m128i)) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(static_cast<char*>(target) + at),
                     *reinterpret_cast<const __m128i*>(static_cast<const char*>(source) + at));
  }
#else
  __builtin_memcpy(target, source, bytes);
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
  if constexpr (kStreamed) StreamLines(values, stored, sizeof(line_buffer));
  if constexpr (__is_same(Type, Fp32)) {
    return kernel::SumSquares(stored);
  } else {
    alignas(64) float widened[kGrain];
    for (int i = 0; i < kGrain; ++i) widened[i] = Type::Load(stored[i]);
    return kernel::SumSquares(widened);
  }
}

void StreamFence() {
#if defined(__x86_64__)
  _mm_sfence();
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
    StreamFence,
    AddBlock,
};

}  // namespace zeroshard::reduce_internal
