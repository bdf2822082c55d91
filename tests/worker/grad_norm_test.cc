#include "worker/grad_norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tests/worker/random_values.h"

namespace zeroshard {
namespace {

// The definition in grad_norm.h, element by element.
ExactSum Definition(const std::vector<float>& values, const std::vector<ElementRange>& included) {
  std::vector<char> counts(values.size(), 0);
  for (const ElementRange& range : included) {
    for (uint64_t i = range.begin; i < range.end; ++i) counts[i] = 1;
  }
  ExactSum sum;
  for (size_t begin = 0; begin < values.size(); begin += 256) {
    double lanes[16] = {};
    for (size_t i = 0; i < 256 && begin + i < values.size(); ++i) {
      const double x = counts[begin + i] != 0 ? values[begin + i] : 0.0;
      lanes[i % 16] += x * x;
    }
    for (int distance = 8; distance > 0; distance /= 2) {
      for (int k = 0; k < distance; ++k) lanes[k] += lanes[k + distance];
    }
    sum.Add(lanes[0]);
  }
  return sum;
}

void ExpectSameBytes(ExactSum a, ExactSum b) {
  a.Normalize();
  b.Normalize();
  EXPECT_EQ(std::memcmp(&a, &b, sizeof(a)), 0) << a.ToDouble() << " and " << b.ToDouble();
}

class GradNormTest : public ::testing::TestWithParam<Isa> {};

TEST_P(GradNormTest, EqualsTheDefinition) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 60; ++round) {
    const DType dtype = kAllDTypes[random() % 3];
    const size_t elements = 1 + random() % 3000;
    const auto bytes = Encode(dtype, RandomFloats(random, elements, Values::kOrdinary, 1e3f));
    std::vector<ElementRange> included;
    for (uint64_t at = 0; at < elements;) {
      const uint64_t begin = std::min<uint64_t>(elements, at + (random() % 2) * (random() % 400));
      const uint64_t end = std::min<uint64_t>(elements, begin + random() % 900);
      included.push_back({begin, end});
      at = end + (begin == end ? 1 : 0);
    }
    const NormInput input = {.data = bytes.data(), .dtype = dtype, .elements = elements};
    const uint64_t grains = (elements + 255) / 256;
    ExactSum whole;
    AddSquaresOn(GetParam(), input, included, 0, grains, whole);
    ExpectSameBytes(whole, Definition(Decode(dtype, bytes), included));
    // Any partition into grains, in any order.
    ExactSum first, second;
    const uint64_t cut = random() % (grains + 1);
    AddSquaresOn(GetParam(), input, included, cut, grains, second);
    AddSquaresOn(GetParam(), input, included, 0, cut, first);
    second.Merge(first);
    ExpectSameBytes(whole, second);
  }
}

TEST_P(GradNormTest, ExcludedNansAndPaddingDoNotCount) {
  std::vector<float> values(512, std::numeric_limits<float>::quiet_NaN());
  values[5] = 3.0f;
  values[300] = -4.0f;
  ExactSum sum;
  AddSquaresOn(GetParam(), {.data = values.data(), .elements = 512}, {{5, 6}, {300, 301}}, 0, 2,
               sum);
  EXPECT_TRUE(sum.finite());
  EXPECT_EQ(sum.ToDouble(), 25.0);
}

TEST_P(GradNormTest, FiniteExactlyWhenEveryIncludedElementIs) {
  constexpr float kBad[] = {std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity(),
                            std::numeric_limits<float>::quiet_NaN()};
  for (float bad : kBad) {
    for (size_t at : {0u, 17u, 255u, 256u, 300u}) {
      std::vector<float> values(301, std::numeric_limits<float>::max());
      const NormInput input = {.data = values.data(), .elements = values.size()};
      ExactSum huge;
      AddSquaresOn(GetParam(), input, {{0, 301}}, 0, 2, huge);
      EXPECT_TRUE(huge.finite());
      values[at] = bad;
      ExactSum poisoned;
      AddSquaresOn(GetParam(), input, {{0, 301}}, 0, 2, poisoned);
      EXPECT_FALSE(poisoned.finite());
    }
  }
}

TEST_P(GradNormTest, CloseToLongDouble) {
  std::mt19937_64 random(2);
  const std::vector<float> values = RandomFloats(random, 1 << 18, Values::kOrdinary);
  long double reference = 0;
  for (float x : values) reference += static_cast<long double>(x) * x;
  ExactSum sum;
  AddSquaresOn(GetParam(), {.data = values.data(), .elements = values.size()}, {{0, values.size()}},
               0, values.size() / 256, sum);
  EXPECT_NEAR(sum.ToDouble(), static_cast<double>(reference),
              1e-14 * static_cast<double>(reference));
}

INSTANTIATE_TEST_SUITE_P(Isas, GradNormTest, ::testing::ValuesIn(SupportedIsas()));

}  // namespace
}  // namespace zeroshard
