// The dynamic code books of 8-bit optimizer states, as published by Dettmers et al. (8-bit
// Optimizers via Block-wise Quantization, dynamic tree quantization): 256 numbers, seven decades
// each with twice as many evenly spaced ones as the decade below.
//
//   decade i = 0..6 has the midpoints of n_i equal parts of [0.1, 1], times 10^(i - 6)
//   kSigned:    n_i = 2^i,      both signs, 0 and 1:  -0.9930 .. -5.5e-7, 0, 5.5e-7 .. 0.9930, 1
//   kUnsigned:  n_i = 2^(i+1),              0 and 1:  0, 3.25e-7 .. 0.9965, 1
//
// sorted; a code is an index. A value x of a block with the largest magnitude s has the code
// nearest to x / s (fp32, rounded once), of two equally near ones the one nearer to 0.
// docs/numerics.md has the special cases.
//
// Included by kernel files: no standard library.
#ifndef ZEROSHARD_WORKER_OPTIM_CODE_BOOK_H_
#define ZEROSHARD_WORKER_OPTIM_CODE_BOOK_H_

#include <cstdint>

#include "worker/kernel_math.h"

namespace zeroshard {

// A book and the way to its nearest codes: a table over the leading bits of x in [0, 1]. Each
// bucket, a range of 2^shift bit patterns, contains at most one border between two codes, so that
//   magnitude code(x) = (entry[bucket] + the other bits of x) >> shift
// where an entry is (code at the bucket's start) << shift, plus what carries from the border on.
// Magnitude codes count the non-negative numbers of the book upwards from 0.
template <int shift>
struct CodeBook {
  static constexpr int kShift = shift;
  // Up to 2^-23 everything is nearest to 0 in both books.
  static constexpr uint32_t kFirstBits = 0x34000000u;
  static constexpr int kBuckets = (0x3f800000 >> shift) - (0x34000000 >> shift) + 1;

  float value[256];
  uint32_t entry[kBuckets];

  // `x` from 0 to 1.
  ZS_KERNEL_FN uint32_t MagnitudeCode(float x) const {
    const uint32_t bits = kernel::BitsOf(x);
    const uint32_t clamped = bits > kFirstBits ? bits : kFirstBits;
    const auto bucket = static_cast<int32_t>((clamped - kFirstBits) >> shift);
    return (entry[bucket] + (clamped & ((1u << shift) - 1u))) >> shift;
  }
};

using SignedBook = CodeBook<17>;
using UnsignedBook = CodeBook<16>;
extern const SignedBook kSignedBook;
extern const UnsignedBook kUnsignedBook;
// The code of 0 in the signed book; the magnitude code k of a positive value is this plus k.
inline constexpr int32_t kSignedZero = 127;

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_OPTIM_CODE_BOOK_H_
