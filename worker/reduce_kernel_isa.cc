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

static_assert(kGrain == kernel::kSquaresGrain && kRow == kernel::kSquaresLanes);

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

// Elements that the loops below take at a time: a cache line of bf16.
constexpr int kLine = 32;

// The vector that begins at element `at` of a source, which is element `in_line` of a line,
// widened.
ZS_KERNEL_FN FloatVector LoadWide(Fp32, const void* source, uint64_t at, int) {
  return kernel::LoadVector(static_cast<const float*>(source) + at);
}
ZS_KERNEL_FN FloatVector LoadWide(Bf16, const void* source, uint64_t at, int in_line) {
  const auto* values = static_cast<const uint16_t*>(source) + at;
#if defined(__AVX512BW__)
  // Half of the line's numbers to the upper halves of the words, in one instruction.
  typedef short Halves __attribute__((vector_size(64)));
  const Halves low = {0, 0, 0, 1, 0, 2,  0, 3,  0, 4,  0, 5,  0, 6,  0, 7,
                      0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
  Halves line;
  __builtin_memcpy(&line, values - in_line, sizeof(line));
  const Halves order = in_line == 0 ? low : low + 16;
  return (FloatVector)__builtin_ia32_permvarhi512_mask(line, order, Halves{}, 0xaaaaaaaau);
#elif defined(__AVX2__)
  typedef short Halves __attribute__((vector_size(16)));
  typedef int Words __attribute__((vector_size(32)));
  Halves halves;
  __builtin_memcpy(&halves, values, sizeof(halves));
  static_cast<void>(in_line);
  return (FloatVector)((Words)__builtin_ia32_pmovzxwd256(halves) << 16);
#else
  typedef int Words __attribute__((vector_size(16)));
  const Words words = {values[0], values[1], values[2], values[3]};
  static_cast<void>(in_line);
  return (FloatVector)(words << 16);
#endif
}

template <class Type, int kInputs>
ZS_KERNEL_FN FloatVector SumWide(const void* const* sources, uint64_t at, int in_line) {
  if constexpr (kInputs == 1) {
    return LoadWide(Type(), sources[0], at, in_line);
  } else {
    return SumWide<Type, kInputs / 2>(sources, at, in_line) +
           SumWide<Type, kInputs / 2>(sources + kInputs / 2, at, in_line);
  }
}

// The elements before `used` of a row whose vector number `part` this is; the others are zeros.
ZS_KERNEL_FN FloatVector FirstOf(FloatVector vector, int part, int used) {
  typedef int Lanes __attribute__((vector_size(sizeof(FloatVector))));
#if defined(__AVX512F__)
  // Keeps the load of the vector apart: of masked loads the processor's prefetcher learns nothing.
  asm("" : "+v"(vector));
  const Lanes lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(__AVX2__)
  const Lanes lane = {0, 1, 2, 3, 4, 5, 6, 7};
#else
  const Lanes lane = {0, 1, 2, 3};
#endif
  return (FloatVector)((Lanes)vector & (lane < used - part * kernel::kVectorFloats));
}

enum class Into { kStore, kAdd, kStream };

// NaNs become the one that is stored.
void CanonicalizeGrain(float* values) {
  const FloatVector nan = __builtin_nanf("") - FloatVector{};
  for (int i = 0; i < kGrain; i += kernel::kVectorFloats) {
    const FloatVector value = kernel::LoadVector(values + i);
    const FloatVector canonical = value == value ? value : nan;
    __builtin_memcpy(values + i, &canonical, sizeof(canonical));
  }
}

// Whole grains of an fp32 target in one go: nothing but the result leaves the registers. A grain
// with a NaN shows in its squares and is gone over again.
template <class Type, int kInputs, Into kInto, bool kUsed>
void Direct(const void* const* sources, void* target, uint64_t begin, uint32_t grains,
            const uint8_t* used, double* squares) {
  const void* inputs[kInputs];
  for (int i = 0; i < kInputs; ++i) inputs[i] = sources[i];
  float* values = static_cast<float*>(target);
  for (uint32_t grain = 0; grain < grains; ++grain, begin += kGrain) {
    kernel::SquareSums sums;
    for (int line = 0; line < kGrain; line += kLine) {
#pragma GCC unroll 8
      for (int i = 0; i < kLine; i += kernel::kVectorFloats) {
        const uint64_t at = begin + line + i;
        FloatVector sum = SumWide<Type, kInputs>(inputs, at, i);
        if constexpr (kInto == Into::kAdd) sum = kernel::LoadVector(values + at) + sum;
        const int part = i % kRow / kernel::kVectorFloats;
        if constexpr (kUsed) sum = FirstOf(sum, part, used[at / kRow]);
        if constexpr (kInto == Into::kStream) {
          Stream(values + at, sum);
        } else {
          __builtin_memcpy(values + at, &sum, sizeof(sum));
        }
        sums.Add(part, sum);
      }
    }
    squares[grain] = sums.Total();
    if (squares[grain] != squares[grain]) CanonicalizeGrain(values + begin);
  }
}

void StreamFence() {
#if defined(__SSE2__)
  __builtin_ia32_sfence();
#endif
}

void ClearUnused(float* __restrict block, const uint8_t* used) {
  for (int row = 0; row < kGrain / kRow; ++row) {
    for (int i = 0; i < kRow; ++i) {
      float& value = block[row * kRow + i];
      value = i < used[row] ? value : 0.0f;
    }
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

#define ZS_DIRECT_INTO(type, inputs, into) \
  { Direct<type, inputs, into, false>, Direct<type, inputs, into, true> }
#define ZS_DIRECT_OF(type, inputs)                                                        \
  {                                                                                       \
    ZS_DIRECT_INTO(type, inputs, Into::kStore), ZS_DIRECT_INTO(type, inputs, Into::kAdd), \
        ZS_DIRECT_INTO(type, inputs, Into::kStream)                                       \
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
    ClearUnused,
};

}  // namespace zeroshard::reduce_internal
