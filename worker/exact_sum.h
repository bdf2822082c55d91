// An exact, order-free sum of fp64 numbers.
//
// A fixed-point number wide enough for every double (2^-1074 to 2^1023) and 2^78 of them, in 68
// digits of 32 bits, each kept in a signed 64-bit limb so that additions need no carries; carries
// are propagated every 2^30 additions. The sum of any numbers in any order and any partition has
// the same value, and after Normalize the same bytes, so it can be reduced over ranks and workers
// in any way. Infinities and NaNs are counted as flags.
//
// POD (560 bytes): stored in shared memory and sent as it is, little-endian. Not synchronised.
#ifndef ZEROSHARD_WORKER_EXACT_SUM_H_
#define ZEROSHARD_WORKER_EXACT_SUM_H_

#include <cstdint>
#include <type_traits>

namespace zeroshard {

struct ExactSum {
  static constexpr int kDigits = 68;

  int64_t digits[kDigits] = {};  // digit i counts units of 2^(32 i - 1074)
  uint32_t pending = 0;          // additions since the last Normalize
  uint32_t flags = 0;            // kHasNan | kHasPositiveInfinity | kHasNegativeInfinity
  uint64_t reserved = 0;

  static constexpr uint32_t kHasNan = 1, kHasPositiveInfinity = 2, kHasNegativeInfinity = 4;

  void Add(double value);

  // Adds another sum; exact. Costs least when the other is normalised.
  void Merge(const ExactSum& other);

  // Propagates carries: all digits but the last in [0, 2^32), pending 0. Equal sums then have equal
  // bytes.
  void Normalize();

  // No NaN and no infinity was added.
  bool finite() const { return flags == 0; }

  // The exact sum rounded once to nearest even; infinity or NaN as the flags say.
  double ToDouble() const;
};
static_assert(sizeof(ExactSum) == 560 && std::is_trivially_copyable_v<ExactSum>);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_EXACT_SUM_H_
