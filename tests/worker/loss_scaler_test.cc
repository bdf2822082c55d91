// The loss scale against published sequences and an independent model of the rules.
#include "worker/loss_scaler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

namespace zeroshard {
namespace {

model::v1::LossScale Dynamic(double initial, uint32_t window, uint32_t hysteresis) {
  model::v1::LossScale config;
  config.set_dynamic(true);
  config.set_initial(initial);
  config.set_window(window);
  config.set_hysteresis(hysteresis);
  config.set_minimum(1.0);
  return config;
}

JobNumbers Start(const model::v1::LossScale& config) {
  JobNumbers numbers = {};
  numbers.loss_scale = config.initial();
  numbers.scaler_last_overflow = -1;
  numbers.scaler_hysteresis = config.hysteresis();
  return numbers;
}

// O: overflow, N: good step. The scale after each.
std::vector<double> Scales(const model::v1::LossScale& config, const std::string& steps) {
  JobNumbers numbers = Start(config);
  std::vector<double> scales;
  for (char step : steps) {
    EXPECT_TRUE(AdvanceLossScale(config, step == 'O', numbers).ok());
    scales.push_back(numbers.loss_scale);
  }
  return scales;
}

TEST(LossScalerTest, FollowsThePublishedSequences) {
  EXPECT_EQ(Scales(Dynamic(16, 2, 2), "OOONNNNN"), (std::vector<double>{16, 8, 4, 4, 4, 8, 8, 16}));
  EXPECT_EQ(Scales(Dynamic(65536, 1000, 2), "OOO"), (std::vector<double>{65536, 32768, 16384}));
}

TEST(LossScalerTest, AStaticScaleNeverMoves) {
  model::v1::LossScale config = Dynamic(128, 1, 1);
  config.set_dynamic(false);
  EXPECT_EQ(Scales(config, "ONONNN"), std::vector<double>(6, 128.0));
}

TEST(LossScalerTest, AnOverflowAtTheMinimumIsAnErrorAndChangesNothing) {
  const model::v1::LossScale config = Dynamic(2, 1000, 1);
  JobNumbers numbers = Start(config);
  ASSERT_TRUE(AdvanceLossScale(config, true, numbers).ok());
  EXPECT_EQ(numbers.loss_scale, 1.0);
  const JobNumbers before = numbers;
  const absl::Status status = AdvanceLossScale(config, true, numbers);
  EXPECT_TRUE(absl::IsFailedPrecondition(status));
  EXPECT_NE(std::string(status.message()).find("min_loss_scale"), std::string::npos);
  EXPECT_EQ(numbers.scaler_iteration, before.scaler_iteration);
  EXPECT_EQ(numbers.loss_scale, before.loss_scale);
}

// The rules in other words: a run of good steps since the last overflow, and tokens of patience.
class Model {
 public:
  explicit Model(const model::v1::LossScale& config)
      : config_(config), scale_(config.initial()), patience_(config.hysteresis()) {}
  double Step(bool overflow) {
    if (overflow) {
      good_ = 0;
      if (patience_ <= 1) {
        scale_ = std::max(scale_ / 2, config_.minimum());
      } else {
        --patience_;
      }
      return scale_;
    }
    ++good_;
    if (config_.consecutive_hysteresis()) patience_ = config_.hysteresis();
    // The good step itself counts from the one after it.
    const uint32_t stable = good_ - 1;
    if (stable > 0 && stable % config_.window() == 0) {
      patience_ = config_.hysteresis();
      scale_ *= 2;
    }
    return scale_;
  }

 private:
  const model::v1::LossScale config_;
  double scale_;
  uint32_t patience_;
  uint32_t good_ = 0;
};

TEST(LossScalerTest, AgreesWithAnIndependentModelOverLongRuns) {
  std::mt19937 random(5);
  for (uint32_t window : {1u, 2u, 5u}) {
    for (uint32_t hysteresis : {1u, 2u, 3u}) {
      for (bool consecutive : {false, true}) {
        model::v1::LossScale config = Dynamic(1 << 20, window, hysteresis);
        config.set_consecutive_hysteresis(consecutive);
        JobNumbers numbers = Start(config);
        Model model(config);
        for (int step = 0; step < 2000; ++step) {
          const bool overflow = random() % 4 == 0 && numbers.loss_scale > 1.0;
          ASSERT_TRUE(AdvanceLossScale(config, overflow, numbers).ok());
          ASSERT_EQ(numbers.loss_scale, model.Step(overflow))
              << "window " << window << " hysteresis " << hysteresis << " step " << step;
          if (numbers.loss_scale > 1e30) break;
        }
      }
    }
  }
}

}  // namespace
}  // namespace zeroshard
