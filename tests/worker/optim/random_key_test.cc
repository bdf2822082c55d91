// Stochastic rounding: repeatable, unbiased, and the same wherever the range is cut.
#include "worker/optim/random_key.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <set>
#include <vector>

#include "base/dtype.h"
#include "worker/optim/kernels.h"

namespace zeroshard {
namespace {

// Jobs resume with the same numbers after an upgrade.
TEST(RandomKeyTest, NeverChanges) {
  EXPECT_EQ(RandomKey(0, 0, 0), 3746585686858627171u);
  EXPECT_EQ(RandomBits(GrainKey(RandomKey(1, 2, 3), 4), 5), 8189u);
}

TEST(RandomKeyTest, SeedStepUnitAndGrainAllMatter) {
  std::set<uint64_t> keys;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    for (uint64_t step = 0; step < 8; ++step) {
      for (uint32_t unit = 0; unit < 8; ++unit) {
        for (uint64_t grain = 0; grain < 8; ++grain) {
          keys.insert(GrainKey(RandomKey(seed, step, unit), grain));
        }
      }
    }
  }
  EXPECT_EQ(keys.size(), 4096u);
}

// Chi-squared over the high byte and the low byte of the bits, over lanes, grains and steps.
TEST(RandomKeyTest, BitsAreUniform) {
  for (int shift : {0, 8}) {
    std::vector<int> counts(256);
    for (uint64_t step = 0; step < 16; ++step) {
      const uint64_t key = RandomKey(0, step, 0);
      for (uint64_t grain = 0; grain < 256; ++grain) {
        for (uint32_t lane = 0; lane < 256; ++lane) {
          ++counts[(RandomBits(GrainKey(key, grain), lane) >> shift) & 255];
        }
      }
    }
    const double expected = 16 * 256.0;
    double chi = 0;
    for (int count : counts) chi += (count - expected) * (count - expected) / expected;
    EXPECT_LT(chi, 255 + 5 * std::sqrt(2 * 255.0));
    EXPECT_GT(chi, 255 - 5 * std::sqrt(2 * 255.0));
  }
}

// Neighbouring lanes, grains and steps are not correlated.
TEST(RandomKeyTest, NeighboursAreIndependent) {
  const auto value = [](uint64_t step, uint64_t grain, uint32_t lane) {
    return RandomBits(GrainKey(RandomKey(0, step, 0), grain), lane) / 65536.0 - 0.5;
  };
  double lanes = 0, grains = 0, steps = 0;
  constexpr int kGrains = 400, kLanes = 255;
  for (uint64_t grain = 0; grain < kGrains; ++grain) {
    for (uint32_t lane = 0; lane < kLanes; ++lane) {
      const double x = value(3, grain, lane);
      lanes += x * value(3, grain, lane + 1);
      grains += x * value(3, grain + 1, lane);
      steps += x * value(4, grain, lane);
    }
  }
  const double limit = 5 / 12.0 * std::sqrt(double{kGrains} * kLanes);
  for (double sum : {lanes, grains, steps}) EXPECT_LT(std::fabs(sum), limit);
}

// `steps` updates p -= lr * 1 of a bf16 parameter without master.
std::vector<float> Descend(std::vector<uint16_t> p, double lr, uint64_t steps, uint64_t piece) {
  const std::vector<float> grad(p.size(), 1.0f);
  const UpdateSegment all = {.begin = 0, .end = p.size()};
  const UpdateArgs args = MakeUpdateArgs({.lr = lr}, 1);
  for (uint64_t step = 0; step < steps; ++step) {
    UpdatePass pass;
    pass.kind = OptimizerKind::kSgd;
    pass.arrays.grad = grad.data();
    pass.arrays.master = MasterKind::kStochastic;
    pass.arrays.high = p.data();
    pass.segments = absl::MakeConstSpan(&all, 1);
    pass.args = absl::MakeConstSpan(&args, 1);
    pass.random_key = RandomKey(11, step, 0);
    for (uint64_t at = 0; at < p.size(); at += piece) {
      ApplyUpdate(pass, at, std::min<uint64_t>(p.size(), at + piece));
    }
  }
  std::vector<float> values;
  for (uint16_t bits : p) values.push_back(Bf16ToFloat(bits));
  return values;
}

// Each update is a 40th of a bf16 unit: rounding to nearest would lose all of them.
TEST(StochasticRoundingTest, SmallUpdatesAddUpOnAverage) {
  constexpr size_t kElements = 20000;
  constexpr double kLr = 0x1p-8 / 40;  // half a unit below 1, 2^-9, is never reached
  constexpr int kSteps = 100;
  const auto values =
      Descend(std::vector<uint16_t>(kElements, FloatToBf16(1.0f)), kLr, kSteps, 999);
  double mean = 0;
  for (float value : values) mean += value / double{kElements};
  // The number of units gone down has a variance below steps * u * (1 - u) in units of 2^-8.
  const double deviation = 0x1p-8 * std::sqrt(kSteps / 40.0 / kElements);
  EXPECT_NEAR(mean, 1 - kSteps * kLr, 5 * deviation);
}

TEST(StochasticRoundingTest, TheSameHoweverTheRangeIsCut) {
  const std::vector<uint16_t> start(3000, FloatToBf16(0.7f));
  const auto whole = Descend(start, 1e-4, 5, 3000);
  EXPECT_EQ(whole, Descend(start, 1e-4, 5, 1));
  EXPECT_EQ(whole, Descend(start, 1e-4, 5, 77));
}

TEST(StochasticRoundingTest, ValuesThatNeedNoRoundingStay) {
  std::vector<uint16_t> p;
  for (uint32_t bits = 0; bits < 65536; ++bits) p.push_back(static_cast<uint16_t>(bits));
  const auto values = Descend(p, 0.0, 1, 4096);
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float before = Bf16ToFloat(static_cast<uint16_t>(bits));
    if (before != before) {
      EXPECT_EQ(std::bit_cast<uint32_t>(values[bits]), 0x7fc00000u);
    } else {
      EXPECT_EQ(values[bits], before) << bits;
    }
  }
}

}  // namespace
}  // namespace zeroshard
