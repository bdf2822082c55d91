// The engine's configuration: optimizer, state arrays, and the forms of master and states.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/planner.h"

namespace zeroshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

PlanInput Input(const std::string& optimizer, const std::string& own = "{}") {
  PlanInput input;
  const auto config = ParseDsConfig(absl::StrCat(
      R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
          "zero_optimization": {"stage": 1}, "optimizer": )",
      optimizer, R"(, "zeroshard": )", own, "}"));
  EXPECT_TRUE(config.ok()) << config.status();
  if (config.ok()) input.config = *config;
  model::v1::Parameter* parameter = input.manifest.add_parameters();
  parameter->set_name("w");
  parameter->add_shape(1000);
  parameter->set_dtype(model::v1::DTYPE_BFLOAT16);
  parameter->set_trainable(true);
  input.manifest.add_groups();
  input.devices = {"cpu:0"};
  return input;
}

model::v1::EngineConfig Engine(const PlanInput& input) {
  const auto engine = MakeEngineConfig(input);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return engine.ok() ? *engine : model::v1::EngineConfig();
}

std::string Type(const std::string& type, const std::string& params = "{}") {
  return absl::StrCat(R"({"type": ")", type, R"(", "params": )", params, "}");
}

TEST(EngineConfig, EveryOptimizerHasItsKindAndStateArrays) {
  const auto adamw = Engine(Input(Type("AdamW")));
  EXPECT_EQ(adamw.optimizer(), model::v1::OPTIMIZER_ADAMW);
  EXPECT_THAT(adamw.state_slots(), ElementsAre("exp_avg", "exp_avg_sq"));
  const auto adam = Engine(Input(Type("Adam8bit", R"({"adam_w_mode": false})")));
  EXPECT_EQ(adam.optimizer(), model::v1::OPTIMIZER_ADAM);
  EXPECT_EQ(adam.state_format(), model::v1::STATE_FORMAT_INT8);
  const auto adagrad = Engine(Input(Type("Adagrad")));
  EXPECT_EQ(adagrad.optimizer(), model::v1::OPTIMIZER_ADAGRAD);
  EXPECT_THAT(adagrad.state_slots(), ElementsAre("sum"));
  const auto lion = Engine(Input(Type("Lion")));
  EXPECT_EQ(lion.optimizer(), model::v1::OPTIMIZER_LION);
  EXPECT_THAT(lion.state_slots(), ElementsAre("exp_avg"));
  const auto sgd = Engine(Input(Type("SGD", R"({"momentum": 0.9})")));
  EXPECT_EQ(sgd.optimizer(), model::v1::OPTIMIZER_SGD);
  EXPECT_THAT(sgd.state_slots(), ElementsAre("momentum_buffer"));
  EXPECT_THAT(Engine(Input(Type("SGD"))).state_slots(), IsEmpty());
}

TEST(EngineConfig, CarriesTheFormsOfMasterAndStates) {
  const auto plain = Engine(Input(Type("AdamW")));
  EXPECT_EQ(plain.state_format(), model::v1::STATE_FORMAT_FLOAT32);
  const auto split =
      Engine(Input(Type("AdamW"), R"({"master": "split", "optimizer_states": "bf16"})"));
  EXPECT_EQ(split.master_form(), model::v1::MASTER_FORM_SPLIT);
  EXPECT_EQ(split.state_format(), model::v1::STATE_FORMAT_BFLOAT16);
  EXPECT_EQ(split.rounding_seed(), 0U);
  const auto none = Engine(Input(Type("Lion"), R"({"master": "none", "rounding_seed": 9})"));
  EXPECT_EQ(none.master_form(), model::v1::MASTER_FORM_NONE);
  EXPECT_EQ(none.rounding_seed(), 9U);
}

TEST(EngineConfig, StatesOfSgdAreThoseOfItsMomentum) {
  const std::string int8 = R"({"optimizer_states": "int8"})";
  const auto refused = MakeEngineConfig(Input(Type("SGD"), int8));
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("zeroshard.optimizer_states is \"int8\", and SGD without momentum"));
  PlanInput by_group = Input(Type("SGD"), int8);
  by_group.manifest.mutable_groups(0)->set_momentum(0.9);
  EXPECT_EQ(Engine(by_group).state_format(), model::v1::STATE_FORMAT_INT8);
  const auto bf16 = Engine(Input(Type("SGD"), R"({"optimizer_states": "bf16"})"));
  EXPECT_EQ(bf16.state_format(), model::v1::STATE_FORMAT_FLOAT32);
}

TEST(EngineConfig, GroupsAreCheckedAsTheirOptimizerReadsThem) {
  using model::v1::GroupOptions;
  struct Case {
    const char* type;
    const char* field;
    void (GroupOptions::*set)(double);
    double value;
    bool refused;
  };
  const double nan = std::nan("");
  const Case cases[] = {{"AdamW", "lr", &GroupOptions::set_lr, nan, true},
                        {"SGD", "lr", &GroupOptions::set_lr, -1, true},
                        {"Lion", "weight_decay", &GroupOptions::set_weight_decay, -1, true},
                        {"Adam", "betas[0]", &GroupOptions::set_beta1, 1, true},
                        {"Lion", "betas[1]", &GroupOptions::set_beta2, -0.5, true},
                        {"Adagrad", "betas[1]", &GroupOptions::set_beta2, 2, false},
                        {"Adagrad", "eps", &GroupOptions::set_eps, -1e-8, true},
                        {"Lion", "eps", &GroupOptions::set_eps, -1e-8, false},
                        {"SGD", "momentum", &GroupOptions::set_momentum, -0.9, true},
                        {"AdamW", "momentum", &GroupOptions::set_momentum, -0.9, false}};
  for (const Case& one : cases) {
    PlanInput input = Input(Type(one.type));
    (input.manifest.add_groups()->*one.set)(one.value);
    const auto engine = MakeEngineConfig(input);
    EXPECT_EQ(engine.ok(), !one.refused) << one.type << " " << one.field;
    if (engine.ok()) continue;
    EXPECT_THAT(std::string(engine.status().message()),
                HasSubstr(absl::StrCat("parameter group 1: ", one.field, " is ")));
  }
}

TEST(EngineConfig, JobsWithoutUpdatesKeepTheDefaults) {
  PlanInput input = Input(Type("AdamW8bit"), R"({"master": "none"})");
  input.forward_only = true;
  const auto engine = Engine(input);
  EXPECT_EQ(engine.optimizer(), model::v1::OPTIMIZER_NONE);
  EXPECT_EQ(engine.master_form(), model::v1::MASTER_FORM_FLOAT32);
  EXPECT_EQ(engine.state_format(), model::v1::STATE_FORMAT_FLOAT32);
}

}  // namespace
}  // namespace zeroshard
