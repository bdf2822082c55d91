// What a rank may bring to a step, and that what is refused changes nothing.
#include "worker/step_input.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "tests/fakes/local_job.h"

namespace zeroshard {
namespace {

using model::v1::GroupOptions;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

model::v1::EngineConfig ConfigOf(model::v1::OptimizerKind kind, int slots) {
  model::v1::EngineConfig config;
  config.set_optimizer(kind);
  for (int slot = 0; slot < slots; ++slot) config.add_state_slots("state");
  return config;
}

GroupOptions Good() {
  GroupOptions group;
  group.set_lr(1e-3);
  group.set_beta1(0.9);
  group.set_beta2(0.999);
  group.set_eps(1e-8);
  return group;
}

std::string Refusal(const model::v1::EngineConfig& config, const GroupOptions& group) {
  trainer::v1::Step step;
  *step.add_groups() = Good();
  *step.add_groups() = group;
  const absl::Status status = CheckStepGroups(config, step);
  EXPECT_TRUE(status.ok() || absl::IsInvalidArgument(status)) << status;
  return std::string(status.message());
}

struct Case {
  const char* field;  // as the message names it
  void (GroupOptions::*set)(double);
  double bad;
};

const Case kEverywhere[] = {
    {"lr", &GroupOptions::set_lr, kNan},
    {"lr", &GroupOptions::set_lr, -1e-9},
    {"lr", &GroupOptions::set_lr, kInf},
    {"lr", &GroupOptions::set_lr, 1e300},
    {"weight_decay", &GroupOptions::set_weight_decay, kNan},
    {"weight_decay", &GroupOptions::set_weight_decay, -0.1},
    {"weight_decay", &GroupOptions::set_weight_decay, 1e39},
};
const Case kBetas[] = {
    {"betas[0]", &GroupOptions::set_beta1, 1.0},  {"betas[0]", &GroupOptions::set_beta1, -0.1},
    {"betas[0]", &GroupOptions::set_beta1, kNan}, {"betas[1]", &GroupOptions::set_beta2, 1.0},
    {"betas[1]", &GroupOptions::set_beta2, 1.5},  {"betas[1]", &GroupOptions::set_beta2, kNan},
};
const Case kEps[] = {
    {"eps", &GroupOptions::set_eps, -1e-8},
    {"eps", &GroupOptions::set_eps, kNan},
    {"eps", &GroupOptions::set_eps, kInf},
};
const Case kMomentum[] = {
    {"momentum", &GroupOptions::set_momentum, -0.9},
    {"momentum", &GroupOptions::set_momentum, kNan},
    {"dampening", &GroupOptions::set_dampening, kInf},
};

template <size_t kCount>
void ExpectRefused(const model::v1::EngineConfig& config, const Case (&cases)[kCount]) {
  for (const Case& one : cases) {
    GroupOptions group = Good();
    (group.*one.set)(one.bad);
    const std::string message = Refusal(config, group);
    EXPECT_TRUE(absl::StrContains(message, one.field) &&
                absl::StrContains(message, "parameter group 1"))
        << one.field << " " << one.bad << " with optimizer " << config.optimizer() << ": "
        << message;
  }
}

template <size_t kCount>
void ExpectIgnored(const model::v1::EngineConfig& config, const Case (&cases)[kCount]) {
  for (const Case& one : cases) {
    GroupOptions group = Good();
    (group.*one.set)(one.bad);
    EXPECT_EQ(Refusal(config, group), "") << one.field << " with " << config.optimizer();
  }
}

TEST(StepInputTest, EveryOptimizerChecksWhatItReads) {
  const auto adamw = ConfigOf(model::v1::OPTIMIZER_ADAMW, 2);
  const auto adam = ConfigOf(model::v1::OPTIMIZER_ADAM, 2);
  const auto sgd = ConfigOf(model::v1::OPTIMIZER_SGD, 1);
  const auto adagrad = ConfigOf(model::v1::OPTIMIZER_ADAGRAD, 1);
  const auto lion = ConfigOf(model::v1::OPTIMIZER_LION, 1);
  for (const auto& config : {adamw, adam, sgd, adagrad, lion}) {
    EXPECT_EQ(Refusal(config, Good()), "");
    ExpectRefused(config, kEverywhere);
  }
  for (const auto& config : {adamw, adam, lion}) ExpectRefused(config, kBetas);
  for (const auto& config : {sgd, adagrad}) ExpectIgnored(config, kBetas);
  for (const auto& config : {adamw, adam, adagrad}) ExpectRefused(config, kEps);
  for (const auto& config : {sgd, lion}) ExpectIgnored(config, kEps);
  ExpectRefused(sgd, kMomentum);
  for (const auto& config : {adamw, adam, adagrad, lion}) ExpectIgnored(config, kMomentum);
}

TEST(StepInputTest, SgdWithoutAMomentumArrayTakesNoMomentum) {
  GroupOptions group = Good();
  group.set_momentum(0.9);
  EXPECT_TRUE(absl::StrContains(Refusal(ConfigOf(model::v1::OPTIMIZER_SGD, 0), group), "momentum"));
  EXPECT_EQ(Refusal(ConfigOf(model::v1::OPTIMIZER_SGD, 1), group), "");
}

TEST(StepInputTest, JobsWithoutAnOptimizerHaveNothingToCheck) {
  GroupOptions group = Good();
  group.set_lr(kNan);
  EXPECT_EQ(Refusal(ConfigOf(model::v1::OPTIMIZER_NONE, 0), group), "");
}

// Ranks step with a bad learning rate, are refused, and then step with a good one: as if nothing
// had been.
TEST(StepInputTest, ARefusedStepLeavesTheStateAsItWas) {
  const std::vector<float> ones(1000, 1.0f);
  auto options = [] {
    LocalJobOptions made;
    made.manifest = MakeManifest({1000}, model::v1::DTYPE_BFLOAT16);
    made.config = MakeConfig(2, 2, model::v1::DTYPE_BFLOAT16);
    made.workers = 2;
    return made;
  };
  LocalJob undisturbed(options());
  LocalJob job(options());
  for (LocalJob* one : {&undisturbed, &job}) {
    one->PutParameters({ones});
    for (uint32_t rank = 0; rank < 2; ++rank) one->ScatterAll(rank, 0, {ones});
    one->Run();
  }
  const std::string before = job.StateBytes();
  for (const double bad : {kNan, -1e-3, kInf}) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      const uint64_t id = job.Step(rank, 1, bad);
      job.Run();
      EXPECT_FALSE(job.Done(rank, id));
      ASSERT_FALSE(job.failures(rank).empty());
      EXPECT_TRUE(absl::StrContains(job.failures(rank).back().message(), "parameter group 0"))
          << job.failures(rank).back().message();
    }
  }
  EXPECT_TRUE(job.StateBytes() == before);
  EXPECT_EQ(job.memory(0).board().numbers().step, 0u);
  for (LocalJob* one : {&undisturbed, &job}) {
    for (uint32_t rank = 0; rank < 2; ++rank) one->Step(rank, 1, 1e-3);
    one->Run();
    EXPECT_EQ(one->result(0).updates, 1u);
  }
  EXPECT_TRUE(job.StateBytes() == undisturbed.StateBytes());
  EXPECT_EQ(job.Parameter(0), undisturbed.Parameter(0));
}

}  // namespace
}  // namespace zeroshard
