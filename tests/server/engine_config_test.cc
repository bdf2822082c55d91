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

PlanInput Offloaded(int stage, const std::string& optimizer, const std::string& param = "{}",
                    const std::string& top = "{}") {
  PlanInput input = Input(Type("AdamW"));
  const auto config = ParseDsConfig(absl::StrCat(
      R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
          "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": )",
      stage, R"(, "offload_optimizer": )", optimizer, R"(, "offload_param": )", param,
      R"(}, "aio": {"block_size": 65536, "queue_depth": 4, "intra_op_parallelism": 2,
          "single_submit": true, "overlap_events": false}, "zeroshard": )",
      top, "}"));
  EXPECT_TRUE(config.ok()) << config.status();
  if (config.ok()) input.config = *config;
  return input;
}

TEST(EngineConfig, StatesOnNvme) {
  const auto engine =
      Engine(Offloaded(1, R"({"device": "nvme", "buffer_count": 6, "pipeline_write": false})", "{}",
                       R"({"nvme_spares": 7, "durability": "power"})"));
  EXPECT_TRUE(engine.tiered());
  EXPECT_EQ(engine.optimizer_tier(), model::v1::TIER_NVME);
  EXPECT_EQ(engine.optimizer_ratio(), 1.0);
  EXPECT_EQ(engine.parameter_tier(), model::v1::TIER_HOST);
  EXPECT_EQ(engine.window(), model::v1::WINDOW_IN_PLACE);
  EXPECT_EQ(engine.master_form(), model::v1::MASTER_FORM_SPLIT);
  const model::v1::NvmeConfig& nvme = engine.nvme();
  EXPECT_EQ(nvme.block_bytes(), 65536u);
  EXPECT_EQ(nvme.queue_depth(), 4u);
  EXPECT_EQ(nvme.threads(), 2u);
  EXPECT_TRUE(nvme.single_submit());
  EXPECT_FALSE(nvme.overlap_events());
  EXPECT_EQ(nvme.buffer_count(), 6u);
  EXPECT_TRUE(nvme.pipeline_read());
  EXPECT_FALSE(nvme.pipeline_write());
  EXPECT_EQ(nvme.durability(), model::v1::DURABILITY_POWER);
  EXPECT_EQ(nvme.spares(), 7u);
  EXPECT_TRUE(nvme.pin_memory());
}

TEST(EngineConfig, APartOfTheStatesOnNvme) {
  const auto half = Engine(Offloaded(3, R"({"device": "nvme", "ratio": 0.5})"));
  EXPECT_EQ(half.optimizer_tier(), model::v1::TIER_NVME);
  EXPECT_EQ(half.optimizer_ratio(), 0.5);
  const auto none = Engine(Offloaded(3, R"({"device": "nvme", "ratio": 0})"));
  EXPECT_TRUE(none.tiered());
  EXPECT_EQ(none.optimizer_tier(), model::v1::TIER_HOST);
  const auto later = Engine(Offloaded(3, R"({"device": "cpu", "nvme_path": "/a"})"));
  EXPECT_TRUE(later.tiered());
  EXPECT_EQ(later.optimizer_tier(), model::v1::TIER_HOST);
}

TEST(EngineConfig, ParametersOnNvmeHaveACopiedWindow) {
  const auto engine = Engine(Offloaded(3, "{}", R"({"device": "nvme", "max_in_cpu": 500})"));
  EXPECT_TRUE(engine.tiered());
  EXPECT_EQ(engine.parameter_tier(), model::v1::TIER_NVME);
  EXPECT_EQ(engine.host_parameter_elements(), 500u);
  EXPECT_EQ(engine.optimizer_tier(), model::v1::TIER_HOST);
  EXPECT_EQ(engine.window(), model::v1::WINDOW_COPY);
  EXPECT_EQ(engine.nvme().buffer_count(), 5u);
  PlanInput forward = Offloaded(3, R"({"device": "nvme"})", R"({"device": "nvme"})");
  forward.forward_only = true;
  EXPECT_TRUE(Engine(forward).tiered());
  EXPECT_EQ(Engine(forward).optimizer_tier(), model::v1::TIER_HOST);
  EXPECT_EQ(Engine(forward).parameter_tier(), model::v1::TIER_NVME);
}

TEST(EngineConfig, JobsInMemoryAreNotTiered) {
  const auto host = Engine(Offloaded(3, R"({"device": "cpu"})", R"({"device": "cpu"})"));
  EXPECT_FALSE(host.tiered());
  EXPECT_TRUE(host.nvme().pin_memory());
  EXPECT_FALSE(Engine(Offloaded(3, "{}")).has_nvme());
  EXPECT_FALSE(Engine(Offloaded(0, R"({"device": "nvme"})")).tiered());
  PlanInput forward = Offloaded(3, R"({"device": "nvme"})");
  forward.forward_only = true;
  EXPECT_FALSE(Engine(forward).tiered()) << "it has no states";
  forward.config.zeroshard.durability = DurabilityChoice::kPower;
  const auto refused = MakeEngineConfig(forward);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("zeroshard.durability"));
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
