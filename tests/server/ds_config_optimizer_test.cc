#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "server/ds_config.h"

namespace zeroshard {
namespace {

std::string Optimizer(std::string_view type, std::string_view params = "") {
  return absl::StrCat("{optimizer: {type: \"", std::string(type), "\", params: {",
                      std::string(params), "}}}");
}

std::string Scheduler(std::string_view type, std::string_view params = "") {
  return absl::StrCat("{scheduler: {type: \"", std::string(type), "\", params: {",
                      std::string(params), "}}}");
}

DsConfig Parsed(const std::string& text) {
  const absl::StatusOr<DsConfig> config = ParseDsConfig(text);
  EXPECT_TRUE(config.ok()) << config.status().message();
  return config.ok() ? *config : DsConfig();
}

std::string Refusal(const std::string& text) {
  const absl::StatusOr<DsConfig> config = ParseDsConfig(text);
  EXPECT_FALSE(config.ok()) << text;
  return std::string(config.status().message());
}

TEST(DsConfigOptimizer, AdamIsAdamWUnlessAdamWModeIsFalse) {
  for (const std::string_view type : {"Adam", "adam", "ADAM", "AdamW", "adamw"}) {
    const DsConfig config = Parsed(Optimizer(type));
    EXPECT_TRUE(config.optimizer.given);
    EXPECT_EQ(config.optimizer.kind, OptimizerKind::kAdamW) << type;
    EXPECT_EQ(config.optimizer.lr, 1e-3);
    EXPECT_EQ(config.optimizer.beta1, 0.9);
    EXPECT_EQ(config.optimizer.beta2, 0.999);
    EXPECT_EQ(config.optimizer.eps, 1e-8);
    EXPECT_EQ(config.optimizer.weight_decay, 0);
    EXPECT_TRUE(config.optimizer.bias_correction);
  }
  EXPECT_EQ(Parsed(Optimizer("Adam", "adam_w_mode: false")).optimizer.kind, OptimizerKind::kAdam);
  const DsConfig always = Parsed(Optimizer("AdamW", "adam_w_mode: false"));
  EXPECT_EQ(always.optimizer.kind, OptimizerKind::kAdamW);
  EXPECT_TRUE(absl::StrContains(absl::StrJoin(always.warnings, ""), "adam_w_mode has no effect"));
}

TEST(DsConfigOptimizer, SgdIsPyTorchsName) {
  const DsConfig config =
      Parsed(Optimizer("SGD", "lr: 0.1, momentum: 0.9, weight_decay: 1e-4, nesterov: true"));
  EXPECT_EQ(config.optimizer.kind, OptimizerKind::kSgd);
  EXPECT_EQ(config.optimizer.momentum, 0.9);
  EXPECT_TRUE(config.optimizer.nesterov);
  EXPECT_EQ(config.optimizer.weight_decay, 1e-4);
  EXPECT_EQ(Parsed(Optimizer("SGD", "dampening: 0.1")).optimizer.dampening, 0.1);
  EXPECT_TRUE(absl::StrContains(Refusal(Optimizer("sgd")), "write SGD"));
  EXPECT_TRUE(absl::StrContains(Refusal(Optimizer("SGD", "nesterov: true")), "momentum above 0"));
  EXPECT_TRUE(absl::StrContains(
      Refusal(Optimizer("SGD", "nesterov: true, momentum: 0.9, dampening: 0.1")), "no dampening"));
}

constexpr char kKnown[] = "known are Adam, AdamW, SGD, Adagrad, Lion, AdamW8bit and Adam8bit";

TEST(DsConfigOptimizer, OthersAreRefusedWithTheList) {
  for (const std::string_view type :
       {"Lamb", "OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Muon", "MuAdam", "MuAdamW", "MuSGD"}) {
    const std::string message = Refusal(Optimizer(type, "freeze_step: 10"));
    EXPECT_TRUE(absl::StrContains(message, absl::StrCat("is not in this build; ", kKnown)))
        << message;
  }
  EXPECT_TRUE(absl::StrContains(Refusal(Optimizer("RMSprop")), kKnown));
  EXPECT_TRUE(absl::StrContains(Refusal(Optimizer("")), kKnown));
  EXPECT_TRUE(absl::StrContains(Refusal("{optimizer: {type: 3}}"), "optimizer.type is 3"));
  EXPECT_TRUE(absl::StrContains(Refusal("{optimizer: {type: \"Adam\", params: 3}}"),
                                "optimizer.params must be a block"));
}

TEST(DsConfigOptimizer, WithoutATypeParametersHaveNoEffect) {
  const DsConfig config = Parsed("{optimizer: {params: {lr: 1}}}");
  EXPECT_FALSE(config.optimizer.given);
  EXPECT_TRUE(absl::StrContains(absl::StrJoin(config.warnings, ""), "optimizer.type is not given"));
  EXPECT_FALSE(Parsed("{optimizer: null}").optimizer.given);
}

TEST(DsConfigOptimizer, MaxGradNormPointsToGradientClipping) {
  EXPECT_TRUE(
      absl::StrContains(Refusal(Optimizer("Adam", "max_grad_norm: 1")), "gradient_clipping"));
}

TEST(DsConfigOptimizer, ParametersAreChecked) {
  for (const std::string_view params :
       {"lr: -1", "lr: NaN", "lr: \"1e-3\"", "betas: [0.9]", "betas: [0.9, 1]", "betas: 0.9",
        "betas: [-0.1, 0.9]", "betas: [0.9, 1.0e0]", "eps: -1e-8", "weight_decay: -1",
        "amsgrad: true", "momentum: 0.9", "lrr: 1", "lr: null"}) {
    EXPECT_TRUE(absl::StrContains(Refusal(Optimizer("AdamW", params)), "optimizer.params."))
        << params;
  }
}

TEST(DsConfigScheduler, IsCheckedAndHandedOn) {
  const DsConfig config =
      Parsed(Scheduler("WarmupDecayLR", "total_num_steps: 100, warmup_num_steps: 10"));
  EXPECT_EQ(config.scheduler.type, "WarmupDecayLR");
  EXPECT_EQ(config.scheduler.params_json,
            "{\"total_num_steps\": 100, \"warmup_min_lr\": 0.0, \"warmup_max_lr\": 0.001, "
            "\"warmup_num_steps\": 10, \"warmup_type\": \"log\", \"last_batch_iteration\": -1}");
  EXPECT_EQ(config.scheduler.params.size(), 6U);
  EXPECT_EQ(Parsed(Scheduler("WarmupLR", "warmup_max_lr: 0.01")).scheduler.params.size(), 5U);
  EXPECT_EQ(Parsed(Scheduler("WarmupCosineLR", "total_num_steps: 9")).scheduler.params.size(), 6U);
}

TEST(DsConfigScheduler, WarmupEndsAtTheOptimizersRateUnlessAMaximumIsGiven) {
  const DsConfig config =
      Parsed("{optimizer: {type: \"Adam\", params: {lr: 3e-4}}, scheduler: {type: \"WarmupLR\"}}");
  EXPECT_EQ(config.scheduler.params[1].first, "warmup_max_lr");
  EXPECT_EQ(config.scheduler.params[1].second, "3e-4");
  EXPECT_EQ(Parsed(Scheduler("WarmupLR")).scheduler.params.size(), 4U);
}

TEST(DsConfigScheduler, OneCycleHasNoStairs) {
  const std::string bounds = "cycle_min_lr: 1e-5, cycle_max_lr: 1e-3";
  const DsConfig config = Parsed(Scheduler("OneCycle", bounds + ", cycle_momentum: false"));
  EXPECT_EQ(config.scheduler.params.size(), 10U);
  EXPECT_TRUE(config.warnings.empty());
  EXPECT_TRUE(absl::StrContains(
      Refusal(Scheduler("OneCycle", bounds + ", cycle_first_stair_count: 3")), "stairs"));
}

TEST(DsConfigScheduler, ARateMayBeGivenForEachParameterGroup) {
  const DsConfig config = Parsed(Scheduler("WarmupLR", "warmup_max_lr: [1e-3, 2e-3]"));
  EXPECT_EQ(config.scheduler.params[1].second, "[1e-3, 2e-3]");
  for (const std::string_view bad : {"[]", "[\"x\"]", "[-1]", "{}"}) {
    EXPECT_TRUE(absl::StrContains(
        Refusal(Scheduler("WarmupLR", absl::StrCat("warmup_max_lr: ", std::string(bad)))),
        "scheduler.params.warmup_max_lr"));
  }
}

TEST(DsConfigScheduler, RefusesWhatItCannotRun) {
  EXPECT_TRUE(absl::StrContains(Refusal(Scheduler("WarmupDecayLR")),
                                "scheduler.params.total_num_steps must be given"));
  EXPECT_TRUE(absl::StrContains(Refusal(Scheduler("OneCycle", "cycle_min_lr: 0")),
                                "cycle_max_lr must be given"));
  EXPECT_TRUE(absl::StrContains(Refusal("{scheduler: {type: \"WarmupCosineLR\"}}"),
                                "total_num_steps must be given"));
  EXPECT_TRUE(absl::StrContains(Refusal(Scheduler("CosineAnnealingLR")), "known are WarmupLR"));
  EXPECT_TRUE(absl::StrContains(Refusal(Scheduler("warmuplr")), "known are WarmupLR"));
  EXPECT_TRUE(absl::StrContains(Refusal(Scheduler("WarmupLR", "warmup_steps: 3")),
                                "it takes warmup_min_lr, warmup_max_lr, warmup_num_steps,"));
  EXPECT_TRUE(absl::StrContains(Refusal(Scheduler("WarmupLR", "warmup_num_steps: 0")),
                                "warmup_num_steps is 0"));
  EXPECT_TRUE(absl::StrContains(Refusal(Scheduler("WarmupLR", "warmup_type: \"cosine\"")),
                                "expected log or linear"));
}

}  // namespace
}  // namespace zeroshard
