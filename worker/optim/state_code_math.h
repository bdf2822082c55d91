// One element of an 8-bit state: its value and its code, given the scale of its block.
// docs/numerics.md has the special cases. Included by kernel files: no standard library.
#ifndef ZEROSHARD_WORKER_OPTIM_STATE_CODE_MATH_H_
#define ZEROSHARD_WORKER_OPTIM_STATE_CODE_MATH_H_

#include <cstdint>

#include "worker/kernel_math.h"
#include "worker/optim/code_book.h"

namespace zeroshard::kernel {

// A scale of 0 makes every value +0, whatever the code.
template <class Book>
ZS_KERNEL_FN float DecodedState(const Book& book, uint8_t code, float absmax) {
  return book.value[static_cast<int32_t>(code)] * absmax + 0.0f;
}

// The bits of |value|, of what is not finite 0; ordered as the magnitudes are.
ZS_KERNEL_FN int32_t FiniteMagnitude(float value) {
  const auto magnitude = static_cast<int32_t>(BitsOf(value) & 0x7fffffffu);
  const int32_t not_finite = (0x7f7fffff - magnitude) >> 31;  // all ones or 0
  return magnitude & ~not_finite;
}

// What the values of a block with this scale are divided by.
ZS_KERNEL_FN float StateDivisor(float absmax) { return absmax > 0.0f ? absmax : 1.0f; }

// |value| as a share of the scale: infinity 1, NaN 0.
ZS_KERNEL_FN float ShareOfScale(uint32_t magnitude, float divisor) {
  const float quotient = FloatOf(magnitude > 0x7f800000u ? 0u : magnitude) / divisor;
  return quotient < 1.0f ? quotient : 1.0f;
}

ZS_KERNEL_FN uint8_t EncodedState(const SignedBook& book, float value, float divisor) {
  const uint32_t bits = BitsOf(value);
  const auto k =
      static_cast<int32_t>(book.MagnitudeCode(ShareOfScale(bits & 0x7fffffffu, divisor)));
  const int32_t negative = kSignedZero - (k < kSignedZero ? k : kSignedZero);
  return static_cast<uint8_t>((bits >> 31) != 0 ? negative : kSignedZero + k);
}

// What is not 0 never becomes 0: a second moment of 0 beside a first one that is not would make
// the update as large as 1 / eps.
ZS_KERNEL_FN uint8_t EncodedState(const UnsignedBook& book, float value, float divisor) {
  const float positive_or_0 = value > 0.0f ? value : 0.0f;
  const uint32_t k = book.MagnitudeCode(ShareOfScale(BitsOf(positive_or_0), divisor));
  const uint32_t positive = k > 1u ? k : 1u;
  return static_cast<uint8_t>(positive_or_0 > 0.0f ? positive : 0u);
}

}  // namespace zeroshard::kernel

#endif  // ZEROSHARD_WORKER_OPTIM_STATE_CODE_MATH_H_
