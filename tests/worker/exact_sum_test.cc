#include "worker/exact_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace zeroshard {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double SumOf(const std::vector<double>& values) {
  ExactSum sum;
  for (double value : values) sum.Add(value);
  return sum.ToDouble();
}

double RandomDouble(std::mt19937_64& random) {
  for (;;) {
    const double value = std::bit_cast<double>(static_cast<uint64_t>(random()));
    if (std::isfinite(value) && std::fabs(value) < 1e300) return value;
  }
}

TEST(ExactSumTest, OneNumberComesBackWithItsBits) {
  std::mt19937_64 random(1);
  std::vector<double> values = {0.0, 1.0, -1.0, 0x1p-1074, -0x1p-1074, 0x1p-1022, 0x1.fffffp1023};
  for (int i = 0; i < 20000; ++i) values.push_back(RandomDouble(random));
  for (double value : values) {
    ASSERT_EQ(std::bit_cast<uint64_t>(SumOf({value})), std::bit_cast<uint64_t>(value)) << value;
  }
}

TEST(ExactSumTest, RoundsOnceToNearestEven) {
  EXPECT_EQ(SumOf({0x1p53, 1.0}), 0x1p53);                    // tie, to even
  EXPECT_EQ(SumOf({0x1p53, 1.0, 0x1p-1074}), 0x1p53 + 2.0);   // just above the tie
  EXPECT_EQ(SumOf({0x1p53, 3.0}), 0x1p53 + 4.0);              // tie, to even
  EXPECT_EQ(SumOf({0x1p53, 3.0, -0x1p-1074}), 0x1p53 + 2.0);  // just below the tie
  EXPECT_EQ(SumOf({-0x1p53, -1.0, -0x1p-1074}), -0x1p53 - 2.0);
  EXPECT_EQ(SumOf({1e300, 1.0, -1e300}), 1.0);
  EXPECT_EQ(SumOf({0x1.fffffffffffffp1023, 0x1p970}), kInfinity);  // rounds past the largest
  EXPECT_EQ(SumOf({0x1.fffffffffffffp1023, 0x1p1023, -0x1p1023}), 0x1.fffffffffffffp1023);
}

TEST(ExactSumTest, TwoNumbersAddLikeTheProcessor) {
  std::mt19937_64 random(2);
  for (int i = 0; i < 20000; ++i) {
    const double a = RandomDouble(random);
    const double b = std::ldexp(RandomDouble(random) > 0 ? 1.0 : -1.0, std::ilogb(a)) *
                     (1.0 + 1e-3 * static_cast<double>(random() % 1000));
    ASSERT_EQ(SumOf({a, b}), a + b) << a << " " << b;
  }
}

TEST(ExactSumTest, EveryOrderAndPartitionHasTheSameBytes) {
  std::mt19937_64 random(3);
  std::vector<double> values;
  for (int i = 0; i < 1000; ++i) values.push_back(RandomDouble(random));
  ExactSum whole;
  for (double value : values) whole.Add(value);
  whole.Normalize();
  for (int round = 0; round < 50; ++round) {
    std::shuffle(values.begin(), values.end(), random);
    std::vector<ExactSum> parts(1 + random() % 7);
    for (double value : values) parts[random() % parts.size()].Add(value);
    ExactSum merged;
    for (const ExactSum& part : parts) merged.Merge(part);
    merged.Normalize();
    ASSERT_EQ(std::memcmp(&merged, &whole, sizeof(whole)), 0);
    ASSERT_EQ(merged.ToDouble(), whole.ToDouble());
  }
}

TEST(ExactSumTest, CancelsToExactZero) {
  std::mt19937_64 random(4);
  ExactSum sum;
  std::vector<double> values;
  for (int i = 0; i < 1000; ++i) values.push_back(RandomDouble(random));
  for (double value : values) sum.Add(value);
  std::shuffle(values.begin(), values.end(), random);
  for (double value : values) sum.Add(-value);
  sum.Normalize();
  const ExactSum zero;
  EXPECT_EQ(std::memcmp(&sum, &zero, sizeof(zero)), 0);
}

// fp64 squares of fp32 numbers in one binade sum exactly in 128 bits: an independent reference.
TEST(ExactSumTest, EqualsWideIntegers) {
  std::mt19937_64 random(5);
  __int128 reference = 0;
  ExactSum sum;
  for (int i = 0; i < 100000; ++i) {
    const auto integer = static_cast<int64_t>(random() >> 11) - (int64_t{1} << 52);
    reference += static_cast<__int128>(integer) << (i % 40);
    sum.Add(std::ldexp(static_cast<double>(integer), i % 40));
  }
  EXPECT_EQ(sum.ToDouble(), static_cast<double>(reference));
}

TEST(ExactSumTest, CarriesWhenTheLimbsFill) {
  ExactSum sum;
  sum.Add(0x1.fffffffffffffp52);
  ExactSum doubled;
  double expected = 0x1.fffffffffffffp52;
  for (int i = 0; i < 60; ++i) {  // 2^60 numbers
    doubled = sum;
    sum.Merge(doubled);
    expected *= 2;
  }
  EXPECT_EQ(sum.ToDouble(), expected);
}

TEST(ExactSumTest, InfinitiesAndNansAreFlags) {
  EXPECT_EQ(SumOf({1.0, kInfinity}), kInfinity);
  EXPECT_EQ(SumOf({-kInfinity, 1e300}), -kInfinity);
  EXPECT_TRUE(std::isnan(SumOf({kInfinity, -kInfinity})));
  EXPECT_TRUE(std::isnan(SumOf({std::nan(""), 1.0})));
  ExactSum finite, infinite;
  finite.Add(1.0);
  infinite.Add(kInfinity);
  EXPECT_TRUE(finite.finite());
  finite.Merge(infinite);
  EXPECT_FALSE(finite.finite());
  EXPECT_EQ(finite.ToDouble(), kInfinity);
}

}  // namespace
}  // namespace zeroshard
