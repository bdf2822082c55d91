// The split of a master into a bf16 parameter and its low half, over all 2^32 values.
#include "worker/optim/split_master.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/dtype.h"

namespace zeroshard {
namespace {

constexpr uint32_t kBatch = 1u << 10;  // fits in the first-level cache
// Sanitizers make each value some ten times as dear, and look for faults that depend on no value.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr uint32_t kStride = 61;
#else
constexpr uint32_t kStride = 1;
#endif

// How many of a batch's values break a promise of the header; branch-free, for there
// are 2^32.
uint32_t CountBroken(const std::vector<float>& values, const std::vector<uint16_t>& high,
                     const std::vector<uint16_t>& low, const std::vector<float>& joined) {
  uint32_t broken = 0;
  for (uint32_t i = 0; i < kBatch; ++i) {
    const auto before = std::bit_cast<uint32_t>(values[i]);
    const auto after = std::bit_cast<uint32_t>(joined[i]);
    const uint32_t is_nan = (before & 0x7fffffffu) > 0x7f800000u;
    const uint32_t is_tie = (before & 0xffffu) == 0x8000u;
    const uint32_t nan_kept = (high[i] == 0x7fc0u) & (low[i] == 0u) & (after == 0x7fc00000u);
    const uint32_t rounded = high[i] == FloatToBf16(values[i]);
    const uint32_t next_to = (after == before + 1u) | (after == before - 1u);
    const uint32_t exact = is_tie ? next_to : (after == before);
    broken += 1u ^ (is_nan ? nan_kept : rounded & exact);
  }
  return broken;
}

TEST(SplitMasterTest, EveryValueIsJoinedExactlyUnlessItIsATieOrANan) {
  std::vector<float> values(kBatch), joined(kBatch);
  std::vector<uint16_t> high(kBatch), low(kBatch);
  for (uint32_t batch = 0; batch < (1u << 22); batch += kStride) {
    for (uint32_t i = 0; i < kBatch; ++i) values[i] = std::bit_cast<float>(batch * kBatch + i);
    SplitMaster(values.data(), kBatch, high.data(), low.data());
    JoinMaster(high.data(), low.data(), kBatch, joined.data());
    ASSERT_EQ(CountBroken(values, high, low, joined), 0u) << "values from " << batch * kBatch;
    // What is joined is the canonical form, which is its own canonical form.
    CanonicalMaster(values.data(), kBatch);
    ASSERT_EQ(std::memcmp(values.data(), joined.data(), kBatch * sizeof(float)), 0) << batch;
    CanonicalMaster(values.data(), kBatch);
    ASSERT_EQ(std::memcmp(values.data(), joined.data(), kBatch * sizeof(float)), 0) << batch;
  }
}

TEST(SplitMasterTest, ExamplesOfTheDocumentation) {
  struct Example {
    uint32_t value;
    uint16_t high, low;
    uint32_t canonical;
  };
  const Example examples[] = {
      {0x3f800001, 0x3f80, 0x0001, 0x3f800001},  // just above 1: rounds down
      {0x3f80c000, 0x3f81, 0xc000, 0x3f80c000},  // rounds up: the low half says so
      {0x3f808000, 0x3f80, 0x7fff, 0x3f807fff},  // a tie that goes down
      {0x3f818000, 0x3f82, 0x8001, 0x3f818001},  // a tie that goes up
      {0x7f7fffff, 0x7f80, 0xffff, 0x7f7fffff},  // the parameter overflows, the master does not
      {0xff800000, 0xff80, 0x0000, 0xff800000},  // -infinity
      {0xffc12345, 0x7fc0, 0x0000, 0x7fc00000},  // any NaN
      {0x80000000, 0x8000, 0x0000, 0x80000000},  // -0
      {0x00008000, 0x0000, 0x7fff, 0x00007fff},  // a denormal tie
  };
  for (const Example& example : examples) {
    const float value = std::bit_cast<float>(example.value);
    uint16_t high, low;
    SplitMaster(&value, 1, &high, &low);
    EXPECT_EQ(high, example.high) << std::hex << example.value;
    EXPECT_EQ(low, example.low) << std::hex << example.value;
    float joined;
    JoinMaster(&high, &low, 1, &joined);
    EXPECT_EQ(std::bit_cast<uint32_t>(joined), example.canonical);
  }
}

}  // namespace
}  // namespace zeroshard
