#include "worker/step_decision.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace zeroshard {
namespace {

StepInput Input(uint32_t micro_steps, double weight = 0.0, double lr = 0.1) {
  StepInput input = {};
  input.micro_steps = micro_steps;
  input.groups = 1;
  input.weight_total = weight;
  input.group[0].lr = lr;
  return input;
}

model::v1::EngineConfig Config() {
  model::v1::EngineConfig config;
  config.set_skip_on_overflow(true);
  config.mutable_loss_scale()->set_initial(1.0);
  return config;
}

JobNumbers Numbers(double loss_scale) {
  JobNumbers numbers = {};
  numbers.loss_scale = loss_scale;
  numbers.scaler_last_overflow = -1;
  return numbers;
}

ExactSum SumOf(double value) {
  ExactSum sum;
  sum.Add(value);
  return sum;
}

TEST(StepDecisionTest, DividesByScaleRanksAndMicroSteps) {
  const StepInput a = Input(4);
  const StepInput* inputs[] = {&a, &a};
  const auto verdict = DecideStep(Config(), inputs, SumOf(64.0 * 64.0), Numbers(8.0));
  ASSERT_TRUE(verdict.ok());
  EXPECT_EQ(verdict->grad_scale, 1.0f / 64.0f);
  EXPECT_EQ(verdict->next.grad_norm, 1.0);
  EXPECT_EQ(verdict->next.step, 1u);
  EXPECT_EQ(verdict->next.updates, 1u);
  EXPECT_FALSE(verdict->skip);
}

TEST(StepDecisionTest, SumOverRanksDividesByMicroStepsAlone) {
  const StepInput a = Input(4);
  const StepInput* inputs[] = {&a, &a, &a};
  model::v1::EngineConfig config = Config();
  config.set_sum_over_ranks(true);
  EXPECT_EQ(DecideStep(config, inputs, SumOf(1.0), Numbers(1.0))->grad_scale, 0.25f);
}

TEST(StepDecisionTest, ClipsByTheGlobalNorm) {
  const StepInput a = Input(1);
  const StepInput* inputs[] = {&a};
  model::v1::EngineConfig config = Config();
  config.set_gradient_clipping(0.5);
  const auto verdict = DecideStep(config, inputs, SumOf(25.0), Numbers(1.0));
  EXPECT_FLOAT_EQ(verdict->grad_scale, static_cast<float>(0.5 / (5.0 + 1e-6)));
  EXPECT_EQ(verdict->next.grad_norm, 5.0) << "reported before clipping";
  config.set_gradient_clipping(10.0);
  EXPECT_EQ(DecideStep(config, inputs, SumOf(25.0), Numbers(1.0))->grad_scale, 1.0f);
}

TEST(StepDecisionTest, WeightsAreSummedOverRanks) {
  const StepInput a = Input(2, 30.0);
  const StepInput b = Input(2, 70.0);
  const StepInput* inputs[] = {&a, &b};
  EXPECT_EQ(DecideStep(Config(), inputs, SumOf(1.0), Numbers(1.0))->grad_scale, 0.01f);
  const StepInput zero = Input(2, -30.0);
  const StepInput* cancelling[] = {&a, &zero};
  EXPECT_TRUE(absl::IsFailedPrecondition(
      DecideStep(Config(), cancelling, SumOf(1.0), Numbers(1.0)).status()));
}

TEST(StepDecisionTest, ANonFiniteSumNeverSetsAFactor) {
  const StepInput a = Input(1);
  const StepInput* inputs[] = {&a};
  model::v1::EngineConfig config = Config();
  config.set_gradient_clipping(1.0);
  for (double bad : {std::numeric_limits<double>::infinity(), std::nan("")}) {
    const auto skipped = DecideStep(config, inputs, SumOf(bad), Numbers(1.0));
    EXPECT_TRUE(skipped->skip);
    EXPECT_EQ(skipped->next.skipped, 1u);
    EXPECT_EQ(skipped->next.updates, 0u);
    EXPECT_EQ(skipped->next.norm_valid, 0u);
    config.set_skip_on_overflow(false);
    const auto applied = DecideStep(config, inputs, SumOf(bad), Numbers(1.0));
    EXPECT_FALSE(applied->skip);
    EXPECT_EQ(applied->grad_scale, 1.0f) << "unclipped, for there is no norm to clip by";
    config.set_skip_on_overflow(true);
  }
}

TEST(StepDecisionTest, RanksThatDisagreeAreNamed) {
  const StepInput a = Input(2);
  const StepInput b = Input(3);
  const StepInput c = Input(2, 0.0, 0.2);
  const StepInput* micro[] = {&a, &a, &b};
  EXPECT_EQ(CheckSameInputs(micro).message(), "rank 0 steps after 2 micro-steps, rank 2 after 3");
  const StepInput* lr[] = {&a, &c};
  EXPECT_NE(std::string(CheckSameInputs(lr).message()).find("ranks 0 and 1"), std::string::npos);
}

TEST(StepDecisionTest, BiasCorrectionCanBeTurnedOff) {
  GroupHyper group = {};
  group.lr = 0.1;
  group.beta1 = 0.9;
  group.beta2 = 0.999;
  group.bias_correction = 1;
  group.eps = 1e-8;
  // Both sides of the quotient are multiplied by sqrt(1 - beta2).
  EXPECT_NEAR(ArgsFor(group, 1).step_size, 1.0 * std::sqrt(0.001), 1e-7);
  EXPECT_NEAR(ArgsFor(group, 1).scaled_eps, 1e-8 * std::sqrt(0.001), 1e-15);
  group.bias_correction = 0;
  EXPECT_EQ(ArgsFor(group, 1).step_size, 0.1f);
  EXPECT_EQ(ArgsFor(group, 1).scaled_eps, static_cast<float>(group.eps));
  EXPECT_EQ(ArgsFor(group, 1).first_step, 1u);
  EXPECT_EQ(ArgsFor(group, 2).first_step, 0u);
}

}  // namespace
}  // namespace zeroshard
