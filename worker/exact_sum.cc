#include "worker/exact_sum.h"

#include <bit>
#include <cmath>
#include <limits>

namespace zeroshard {
namespace {

constexpr uint64_t kDigitMask = 0xffffffffu;
constexpr uint32_t kMaxPending = uint32_t{1} << 30;
constexpr int kUnitExponent = -1074;

// Bit `index` of a normalised, non-negative number.
bool BitAt(const int64_t* digits, int index) {
  return ((static_cast<uint64_t>(digits[index / 32]) >> (index % 32)) & 1u) != 0;
}

bool AnyBitBelow(const int64_t* digits, int index) {
  for (int i = 0; i < index / 32; ++i) {
    if (digits[i] != 0) return true;
  }
  const uint64_t mask = (uint64_t{1} << (index % 32)) - 1;
  return (static_cast<uint64_t>(digits[index / 32]) & mask) != 0;
}

}  // namespace

void ExactSum::Add(double value) {
  const auto bits = std::bit_cast<uint64_t>(value);
  const auto exponent = static_cast<uint32_t>((bits >> 52) & 0x7ff);
  const bool negative = (bits >> 63) != 0;
  uint64_t mantissa = bits & ((uint64_t{1} << 52) - 1);
  if (exponent == 0x7ff) {
    flags |= mantissa != 0 ? kHasNan : negative ? kHasNegativeInfinity : kHasPositiveInfinity;
    return;
  }
  // value = mantissa * 2^(shift - 1074); subnormals have shift 0 and no hidden bit.
  if (exponent != 0) mantissa |= uint64_t{1} << 52;
  const uint32_t shift = exponent == 0 ? 0 : exponent - 1;
  const uint32_t digit = shift / 32;
  const auto wide = static_cast<unsigned __int128>(mantissa) << (shift % 32);
  const int64_t low = static_cast<int64_t>(static_cast<uint64_t>(wide) & kDigitMask);
  const int64_t middle = static_cast<int64_t>(static_cast<uint64_t>(wide >> 32) & kDigitMask);
  const int64_t high = static_cast<int64_t>(static_cast<uint64_t>(wide >> 64) & kDigitMask);
  digits[digit] += negative ? -low : low;
  digits[digit + 1] += negative ? -middle : middle;
  digits[digit + 2] += negative ? -high : high;
  if (++pending >= kMaxPending) Normalize();
}

void ExactSum::Merge(const ExactSum& other) {
  // Normalised, it adds as much to a digit as one number does.
  if (other.pending > 0) {
    ExactSum addend = other;
    addend.Normalize();
    Merge(addend);
    return;
  }
  for (int i = 0; i < kDigits; ++i) digits[i] += other.digits[i];
  flags |= other.flags;
  if (++pending >= kMaxPending) Normalize();
}

void ExactSum::Normalize() {
  int64_t carry = 0;
  for (int i = 0; i + 1 < kDigits; ++i) {
    const int64_t total = digits[i] + carry;
    digits[i] = static_cast<int64_t>(static_cast<uint64_t>(total) & kDigitMask);
    carry = total >> 32;  // rounds down, so digits stay in [0, 2^32) for negative totals too
  }
  digits[kDigits - 1] += carry;
  pending = 0;
}

double ExactSum::ToDouble() const {
  constexpr uint32_t kBothInfinities = kHasPositiveInfinity | kHasNegativeInfinity;
  if ((flags & kHasNan) != 0 || (flags & kBothInfinities) == kBothInfinities) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  if (flags != 0) {
    const double infinity = std::numeric_limits<double>::infinity();
    return (flags & kHasPositiveInfinity) != 0 ? infinity : -infinity;
  }
  ExactSum sum = *this;
  sum.Normalize();
  const bool negative = sum.digits[kDigits - 1] < 0;
  if (negative) {
    for (int64_t& digit : sum.digits) digit = -digit;
    sum.Normalize();
  }
  int top = kDigits - 1;
  while (top > 0 && sum.digits[top] == 0) --top;
  if (sum.digits[top] == 0) return 0.0;
  const int highest = top * 32 + 63 - std::countl_zero(static_cast<uint64_t>(sum.digits[top]));
  // The 53 highest bits, then rounding to nearest even; fewer bits are a subnormal and exact.
  const int lowest = highest > 52 ? highest - 52 : 0;
  uint64_t mantissa = 0;
  for (int i = highest; i >= lowest; --i) mantissa = 2 * mantissa + (BitAt(sum.digits, i) ? 1 : 0);
  if (lowest > 0 && BitAt(sum.digits, lowest - 1) &&
      (AnyBitBelow(sum.digits, lowest - 1) || mantissa % 2 != 0)) {
    ++mantissa;
  }
  const double magnitude = std::ldexp(static_cast<double>(mantissa), lowest + kUnitExponent);
  return negative ? -magnitude : magnitude;
}

}  // namespace zeroshard
