// The split form of an fp32 master: a bf16 parameter, which is the master rounded to nearest even,
// and 16 low bits beside it.
//
// Rounding alone would lose the ties: of a low half of exactly 0x8000 nobody can tell which way it
// went. So such a value is first moved by one unit in the last place (2^-23 of it) to the side to
// which it rounds, and a NaN becomes 0x7fc00000. That is the canonical form of an fp32 value; a
// canonical value is split and joined again without loss. Infinities, zeros of both signs and
// denormals are canonical as they are.
//
// The functions over arrays are for puts and checkpoints; the kernels use the ones of one element.
// Pure; the ranges do not overlap.
#ifndef ZEROSHARD_WORKER_OPTIM_SPLIT_MASTER_H_
#define ZEROSHARD_WORKER_OPTIM_SPLIT_MASTER_H_

#include <cstddef>
#include <cstdint>

#include "worker/kernel_math.h"

namespace zeroshard {
namespace kernel {

ZS_KERNEL_FN float CanonicalMaster(float value) {
  const uint32_t bits = BitsOf(value);
  const uint32_t nudged = bits - 1u + ((bits >> 15) & 2u);  // up if the high half is odd
  const uint32_t tied = (bits & 0xffffu) == 0x8000u ? nudged : bits;
  return FloatOf(value != value ? 0x7fc00000u : tied);
}

struct Halves {
  uint16_t high;
  uint16_t low;
};

// The halves of CanonicalMaster(value), in 16-bit operations, of which a vector holds twice as
// many.
ZS_KERNEL_FN Halves SplitOf(float value) {
  const uint32_t bits = BitsOf(value);
  const auto above = static_cast<uint16_t>(bits >> 16);
  const auto below = static_cast<uint16_t>(bits);
  const auto nudged = static_cast<uint16_t>(0x7fffu + ((above & 1u) << 1));
  const uint16_t low = below == 0x8000u ? nudged : below;
  const auto high = static_cast<uint16_t>(above + (low >> 15));
  const bool is_nan = value != value;
  return {is_nan ? uint16_t{0x7fc0} : high, is_nan ? uint16_t{0} : low};
}

// Of CanonicalMaster(value).
ZS_KERNEL_FN uint16_t HighHalf(float canonical) {
  return static_cast<uint16_t>((BitsOf(canonical) + 0x8000u) >> 16);
}

ZS_KERNEL_FN float JoinedMaster(uint16_t high, uint16_t low) {
  const auto below_or_above = static_cast<int32_t>(static_cast<int16_t>(low));
  return FloatOf((static_cast<uint32_t>(high) << 16) + static_cast<uint32_t>(below_or_above));
}

}  // namespace kernel

// values -> the two halves of their canonical form.
void SplitMaster(const float* values, size_t n, uint16_t* high, uint16_t* low);

// The exact values that the halves stand for.
void JoinMaster(const uint16_t* high, const uint16_t* low, size_t n, float* values);

// Brings values into canonical form.
void CanonicalMaster(float* values, size_t n);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_OPTIM_SPLIT_MASTER_H_
