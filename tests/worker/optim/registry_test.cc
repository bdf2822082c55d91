#include "worker/optim/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

TEST(RegistryTest, LedgerAndSlots) {
  const OptimizerInfo& adamw = GetOptimizerInfo(OptimizerKind::kAdamW);
  EXPECT_EQ(adamw.bytes_per_parameter, 12u);
  EXPECT_EQ(adamw.state_slots, 2);
  EXPECT_EQ(adamw.slots[0].name, "exp_avg");
  EXPECT_EQ(adamw.slots[1].name, "exp_avg_sq");
  EXPECT_EQ(GetOptimizerInfo(OptimizerKind::kAdam).bytes_per_parameter, 12u);
  EXPECT_EQ(GetOptimizerInfo(OptimizerKind::kSgd).bytes_per_parameter, 4u);
  EXPECT_EQ(GetOptimizerInfo(OptimizerKind::kSgdMomentum).bytes_per_parameter, 8u);
  EXPECT_EQ(GetOptimizerInfo(OptimizerKind::kSgdMomentum).slots[0].name, "momentum_buffer");
}

TEST(RegistryTest, NamesComeBack) {
  for (const OptimizerInfo& info : AllOptimizers()) {
    EXPECT_EQ(*ParseOptimizerKind(info.name), info.kind);
  }
  const absl::Status unknown = ParseOptimizerKind("adamz").status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("adamw, adam, sgd, sgd_momentum"));
}

struct BadCase {
  OptimizerKind kind;
  Hyperparameters h;
  const char* field;
};

TEST(RegistryTest, BadHyperparametersNameTheField) {
  const BadCase cases[] = {
      {OptimizerKind::kAdamW, {.lr = -1}, "lr"},
      {OptimizerKind::kAdamW, {.lr = std::nan("")}, "lr"},
      {OptimizerKind::kSgd, {.lr = INFINITY}, "lr"},
      {OptimizerKind::kAdamW, {.beta1 = 1.0}, "betas[0]"},
      {OptimizerKind::kAdam, {.beta2 = -0.1}, "betas[1]"},
      {OptimizerKind::kAdam, {.beta2 = std::nan("")}, "betas[1]"},
      {OptimizerKind::kAdam, {.eps = -1e-8}, "eps"},
      {OptimizerKind::kAdam, {.weight_decay = -0.1}, "weight_decay"},
      {OptimizerKind::kSgdMomentum, {.momentum = -0.9}, "momentum"},
      {OptimizerKind::kSgd, {.momentum = 0.9}, "momentum"},
      {OptimizerKind::kSgdMomentum, {.nesterov = true}, "nesterov"},
      {OptimizerKind::kSgdMomentum,
       {.momentum = 0.9, .dampening = 0.1, .nesterov = true},
       "nesterov"},
  };
  for (const BadCase& bad : cases) {
    const absl::Status status = ValidateHyperparameters(bad.kind, bad.h);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad.field;
    EXPECT_THAT(std::string(status.message()), HasSubstr(bad.field));
  }
  for (const OptimizerInfo& info : AllOptimizers()) {
    EXPECT_TRUE(ValidateHyperparameters(info.kind, {}).ok());
  }
  EXPECT_TRUE(
      ValidateHyperparameters(OptimizerKind::kSgdMomentum, {.momentum = 0.9, .nesterov = true})
          .ok());
}

}  // namespace
}  // namespace zeroshard
