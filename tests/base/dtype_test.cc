#include "base/dtype.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace zeroshard {
namespace {

// The nearest of all 16-bit patterns, ties to the even one; found by search, not by arithmetic.
template <float (*kToFloat)(uint16_t)>
uint16_t NearestBySearch(float value, uint16_t infinity, double overflow) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude >= overflow) return sign | infinity;
  uint32_t low = 0;
  uint32_t high = infinity;  // the first pattern above
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (static_cast<double>(kToFloat(middle)) <= magnitude ? low : high) = middle;
  }
  const double below = kToFloat(low);
  const double above = high == infinity ? overflow * 2 - below : kToFloat(high);
  const double to_below = magnitude - below;
  const double to_above = above - magnitude;
  const bool take_above = to_above < to_below || (to_above == to_below && (high & 1) == 0);
  return static_cast<uint16_t>(sign | (take_above ? high : low));
}

std::vector<float> InterestingFloats() {
  std::vector<float> values = {0.0f,     -0.0f,    65504.0f,     65519.99f, 65520.0f, -65520.0f,
                               65536.0f, 1e30f,    -1e-30f,      1e-45f,    0x1p-24f, 0x1p-25f,
                               0x3p-26f, 0x1p-14f, 0x1.ffcp-15f, 3.4e38f,   0x1p-126f};
  uint32_t state = 12345;
  for (int i = 0; i < 200000; ++i) {
    state = state * 1664525u + 1013904223u;
    const float value = std::bit_cast<float>(state);
    if (std::isfinite(value)) values.push_back(value);
  }
  // Every pattern of both 16-bit types, and the ties just above and below it.
  for (uint32_t bits = 0; bits < 0x7C00; ++bits) {
    const float value = Fp16ToFloat(static_cast<uint16_t>(bits));
    const float next = Fp16ToFloat(static_cast<uint16_t>(bits + 1));
    values.push_back(value);
    if (std::isfinite(next)) values.push_back(value + (next - value) / 2);
  }
  return values;
}

TEST(DTypeTest, NamesAndSizes) {
  EXPECT_EQ(SizeOf(DType::kFloat32), 4u);
  EXPECT_EQ(SizeOf(DType::kBfloat16), 2u);
  EXPECT_EQ(ParseDType("torch.bfloat16").value(), DType::kBfloat16);
  EXPECT_EQ(ParseDType("half").value(), DType::kFloat16);
  for (uint8_t value = 0; value < 3; ++value) {
    const auto dtype = static_cast<DType>(value);
    EXPECT_TRUE(IsValidDType(value));
    EXPECT_EQ(ParseDType(DTypeName(dtype)).value(), dtype);
  }
  EXPECT_FALSE(IsValidDType(3));
  EXPECT_EQ(ParseDType("int8").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(DTypeTest, EveryPatternSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const auto pattern = static_cast<uint16_t>(bits);
    const float bf16 = Bf16ToFloat(pattern);
    EXPECT_EQ(FloatToBf16(bf16), std::isnan(bf16) ? 0x7FC0 : pattern);
    const float fp16 = Fp16ToFloat(pattern);
    if (std::isnan(fp16)) {
      EXPECT_EQ(FloatToFp16(fp16), 0x7E00 | (pattern & 0x8000));
    } else {
      EXPECT_EQ(FloatToFp16(fp16), pattern);
    }
  }
}

TEST(DTypeTest, Fp16ValuesFollowTheDefinition) {
  for (uint32_t bits = 0; bits < 0x7C00; ++bits) {
    const int exponent = static_cast<int>(bits >> 10);
    const double mantissa = bits & 0x3FF;
    const double expected =
        exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    EXPECT_EQ(Fp16ToFloat(static_cast<uint16_t>(bits)), expected);
  }
  EXPECT_EQ(Fp16ToFloat(0xFC00), -std::numeric_limits<float>::infinity());
}

TEST(DTypeTest, RoundsToNearestEven) {
  for (const float value : InterestingFloats()) {
    ASSERT_EQ(FloatToFp16(value), NearestBySearch<Fp16ToFloat>(value, 0x7C00, 65520.0)) << value;
    const double bf16_overflow = std::ldexp(511.0, 119);
    ASSERT_EQ(FloatToBf16(value), NearestBySearch<Bf16ToFloat>(value, 0x7F80, bf16_overflow))
        << value;
  }
}

TEST(DTypeTest, ConversionsAreConstantExpressions) {
  static_assert(FloatToBf16(1.0f) == 0x3F80);
  static_assert(FloatToFp16(1.0f) == 0x3C00);
  static_assert(Fp16ToFloat(0x0001) == 0x1p-24f);
  static_assert(Bf16ToFloat(0xC000) == -2.0f);
}

TEST(DTypeTest, ArraysConvertLikeElements) {
  const std::vector<float> values = InterestingFloats();
  for (const DType dtype : {DType::kFloat32, DType::kBfloat16, DType::kFloat16}) {
    std::vector<uint8_t> packed(values.size() * SizeOf(dtype));
    std::vector<float> back(values.size());
    ConvertFromFloat(dtype, values.data(), packed.data(), values.size());
    ConvertToFloat(dtype, packed.data(), back.data(), values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      float expected = values[i];
      if (dtype == DType::kBfloat16) expected = Bf16ToFloat(FloatToBf16(expected));
      if (dtype == DType::kFloat16) expected = Fp16ToFloat(FloatToFp16(expected));
      ASSERT_EQ(std::bit_cast<uint32_t>(back[i]), std::bit_cast<uint32_t>(expected));
    }
  }
  ConvertToFloat(DType::kFloat32, nullptr, nullptr, 0);
}

}  // namespace
}  // namespace zeroshard
