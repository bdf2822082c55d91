// Compiled once per instruction set, ZS_ISA being V2, V3 or V4 (see worker/kernels.bzl). All
// functions have internal linkage or are always inlined, so that the linker cannot give one
// instruction set's code to another.
#include "worker/kernel_math.h"
#include "worker/optim/code_book.h"
#include "worker/optim/kernel_table.h"
#include "worker/optim/random_key.h"
#include "worker/optim/split_master.h"

#define ZS_CONCAT_INNER(a, b) a##b
#define ZS_CONCAT(a, b) ZS_CONCAT_INNER(a, b)

namespace zeroshard::optim_internal {
namespace {

using kernel::Bf16;
using kernel::BitsOf;
using kernel::FloatOf;
using kernel::Fp16;
using kernel::Fp32;

template <class Format>
void Load(const uint16_t* __restrict in, uint64_t n, float* __restrict out) {
  for (uint64_t i = 0; i < n; ++i) out[i] = Format::Load(in[i]);
}

template <class Format>
void Store(const float* __restrict in, uint64_t n, typename Format::Storage* __restrict out) {
  for (uint64_t i = 0; i < n; ++i) out[i] = Format::Store(in[i]);
}

void Canonical(float* __restrict values, uint64_t n) {
  for (uint64_t i = 0; i < n; ++i) values[i] = kernel::CanonicalMaster(values[i]);
}

void CanonicalBf16(float* __restrict values, uint64_t n, uint16_t* __restrict out) {
  for (uint64_t i = 0; i < n; ++i) {
    const float canonical = kernel::CanonicalMaster(values[i]);
    values[i] = canonical;
    out[i] = kernel::HighHalf(canonical);
  }
}

void StoreStochastic(const float* __restrict in, uint64_t n, uint64_t grain_key, uint32_t lane,
                     uint16_t* __restrict out) {
  for (uint64_t i = 0; i < n; ++i) {
    const uint32_t random = RandomBits(grain_key, lane + static_cast<uint32_t>(i));
    const uint32_t rounded = (BitsOf(in[i]) + random) >> 16;
    out[i] = static_cast<uint16_t>(in[i] != in[i] ? 0x7fc0u : rounded);
  }
}

// A scale of 0 makes every value +0, whatever the code.
template <class Book>
ZS_KERNEL_FN void Decode(const Book& book, const uint8_t* __restrict codes, uint64_t n,
                         float absmax, float* __restrict out) {
  const float* __restrict value = book.value;
  for (uint64_t i = 0; i < n; ++i) {
    out[i] = value[static_cast<int32_t>(codes[i])] * absmax + 0.0f;
  }
}

void DecodeSigned(const uint8_t* codes, uint64_t n, float absmax, float* out) {
  Decode(kSignedBook, codes, n, absmax, out);
}
void DecodeUnsigned(const uint8_t* codes, uint64_t n, float absmax, float* out) {
  Decode(kUnsignedBook, codes, n, absmax, out);
}

// The largest finite magnitude.
ZS_KERNEL_FN float FiniteMax(const float* __restrict values, uint64_t n) {
  int32_t largest = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const auto magnitude = static_cast<int32_t>(BitsOf(values[i]) & 0x7fffffffu);
    const int32_t not_finite = (0x7f7fffff - magnitude) >> 31;  // all ones or 0
    const int32_t finite = magnitude & ~not_finite;
    largest = finite > largest ? finite : largest;
  }
  return FloatOf(static_cast<uint32_t>(largest));
}

// |value| as a share of the scale: infinity 1, NaN 0.
ZS_KERNEL_FN float Share(uint32_t magnitude, float divisor) {
  const float quotient = FloatOf(magnitude > 0x7f800000u ? 0u : magnitude) / divisor;
  return quotient < 1.0f ? quotient : 1.0f;
}

float EncodeSigned(const float* __restrict values, uint64_t n, uint8_t* __restrict codes) {
  const float absmax = FiniteMax(values, n);
  const float divisor = absmax > 0.0f ? absmax : 1.0f;
  for (uint64_t i = 0; i < n; ++i) {
    const uint32_t bits = BitsOf(values[i]);
    const auto k =
        static_cast<int32_t>(kSignedBook.MagnitudeCode(Share(bits & 0x7fffffffu, divisor)));
    const int32_t negative = kSignedZero - (k < kSignedZero ? k : kSignedZero);
    codes[i] = static_cast<uint8_t>((bits >> 31) != 0 ? negative : kSignedZero + k);
  }
  return absmax;
}

// What is not 0 never becomes 0: a second moment of 0 beside a first one that is not would make
// the update as large as 1 / eps.
float EncodeUnsigned(const float* __restrict values, uint64_t n, uint8_t* __restrict codes) {
  const float absmax = FiniteMax(values, n);
  const float divisor = absmax > 0.0f ? absmax : 1.0f;
  for (uint64_t i = 0; i < n; ++i) {
    const float value = values[i] > 0.0f ? values[i] : 0.0f;
    const uint32_t k = kUnsignedBook.MagnitudeCode(Share(BitsOf(value), divisor));
    const uint32_t positive = k > 1u ? k : 1u;
    codes[i] = static_cast<uint8_t>(value > 0.0f ? positive : 0u);
  }
  return absmax;
}

}  // namespace

const StageTable ZS_CONCAT(kStageTable, ZS_ISA) = {
    .load_bf16 = Load<Bf16>,
    .load_fp16 = Load<Fp16>,
    .store_bf16 = Store<Bf16>,
    .store_fp16 = Store<Fp16>,
    .store_fp32 = Store<Fp32>,
    .canonical = Canonical,
    .canonical_bf16 = CanonicalBf16,
    .store_stochastic = StoreStochastic,
    .decode_signed = DecodeSigned,
    .decode_unsigned = DecodeUnsigned,
    .encode_signed = EncodeSigned,
    .encode_unsigned = EncodeUnsigned,
};

}  // namespace zeroshard::optim_internal
