// Compiled once per instruction set, ZS_ISA being V2, V3 or V4 (see worker/kernels.bzl). All
// functions have internal linkage or are always inlined, so that the linker cannot give one
// instruction set's code to another.
#include "worker/kernel_math.h"
#include "worker/optim/code_book.h"
#include "worker/optim/kernel_table.h"
#include "worker/optim/random_key.h"
#include "worker/optim/split_master.h"
#include "worker/optim/state_code_math.h"

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

template <class Book>
ZS_KERNEL_FN void Decode(const Book& book, const uint8_t* __restrict codes, uint64_t n,
                         float absmax, float* __restrict out) {
  for (uint64_t i = 0; i < n; ++i) out[i] = kernel::DecodedState(book, codes[i], absmax);
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
    const int32_t finite = kernel::FiniteMagnitude(values[i]);
    largest = finite > largest ? finite : largest;
  }
  return FloatOf(static_cast<uint32_t>(largest));
}

template <class Book>
ZS_KERNEL_FN float Encode(const Book& book, const float* __restrict values, uint64_t n,
                          uint8_t* __restrict codes) {
  const float absmax = FiniteMax(values, n);
  const float divisor = kernel::StateDivisor(absmax);
  for (uint64_t i = 0; i < n; ++i) codes[i] = kernel::EncodedState(book, values[i], divisor);
  return absmax;
}

float EncodeSigned(const float* values, uint64_t n, uint8_t* codes) {
  return Encode(kSignedBook, values, n, codes);
}
float EncodeUnsigned(const float* values, uint64_t n, uint8_t* codes) {
  return Encode(kUnsignedBook, values, n, codes);
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
