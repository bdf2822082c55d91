#include "worker/optim/registry.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

// K of every optimizer, form of master and format of states.
TEST(RegistryTest, Ledger) {
  struct Row {
    OptimizerKind kind;
    uint32_t bytes[3][3];  // master fp32, split, none; states fp32, bf16, 8 bits
  };
  const Row rows[] = {
      {OptimizerKind::kAdamW, {{12, 8, 6}, {10, 6, 4}, {8, 4, 2}}},
      {OptimizerKind::kAdam, {{12, 8, 6}, {10, 6, 4}, {8, 4, 2}}},
      {OptimizerKind::kSgd, {{4, 4, 4}, {2, 2, 2}, {0, 0, 0}}},
      {OptimizerKind::kSgdMomentum, {{8, 6, 5}, {6, 4, 3}, {4, 2, 1}}},
      {OptimizerKind::kAdagrad, {{8, 6, 5}, {6, 4, 3}, {4, 2, 1}}},
      {OptimizerKind::kLion, {{8, 6, 5}, {6, 4, 3}, {4, 2, 1}}},
  };
  for (const Row& row : rows) {
    for (int master = 0; master < 3; ++master) {
      for (int states = 0; states < 3; ++states) {
        EXPECT_EQ(OptimizerBytes(row.kind, static_cast<MasterForm>(master),
                                 static_cast<StateFormat>(states)),
                  row.bytes[master][states])
            << GetOptimizerInfo(row.kind).name << " " << master << " " << states;
      }
    }
  }
}

TEST(RegistryTest, Slots) {
  const OptimizerInfo& adamw = GetOptimizerInfo(OptimizerKind::kAdamW);
  EXPECT_EQ(adamw.state_slots, 2);
  EXPECT_EQ(adamw.slots[0].name, "exp_avg");
  EXPECT_EQ(adamw.slots[1].name, "exp_avg_sq");
  EXPECT_EQ(adamw.slots[0].map, StateMap::kSigned);
  EXPECT_EQ(adamw.slots[1].map, StateMap::kUnsigned);
  EXPECT_EQ(GetOptimizerInfo(OptimizerKind::kSgdMomentum).slots[0].name, "momentum_buffer");
  EXPECT_EQ(GetOptimizerInfo(OptimizerKind::kAdagrad).slots[0].name, "sum");
  EXPECT_EQ(GetOptimizerInfo(OptimizerKind::kLion).slots[0].name, "exp_avg");
}

TEST(RegistryTest, EightBitFormsArePublishedForMomentsOnly) {
  for (const OptimizerInfo& info : AllOptimizers()) {
    const bool expected = info.kind != OptimizerKind::kSgd && info.kind != OptimizerKind::kAdagrad;
    EXPECT_EQ(info.eight_bit, expected) << info.name;
  }
}

// Checkpoints store the numbers.
TEST(RegistryTest, KindsKeepTheirNumbers) {
  const char* const names[] = {"adamw", "adam", "sgd", "sgd_momentum", "adagrad", "lion"};
  ASSERT_EQ(AllOptimizers().size(), std::size(names));
  for (size_t i = 0; i < std::size(names); ++i) {
    EXPECT_EQ(AllOptimizers()[i].name, names[i]);
    EXPECT_EQ(static_cast<size_t>(AllOptimizers()[i].kind), i);
  }
}

TEST(RegistryTest, NamesComeBack) {
  for (const OptimizerInfo& info : AllOptimizers()) {
    EXPECT_EQ(*ParseOptimizerKind(info.name), info.kind);
  }
  const absl::Status unknown = ParseOptimizerKind("adamz").status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(unknown.message()),
              HasSubstr("adamw, adam, sgd, sgd_momentum, adagrad, lion"));
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
      {OptimizerKind::kAdagrad, {.eps = -1e-10}, "eps"},
      {OptimizerKind::kAdagrad, {.lr = std::nan("")}, "lr"},
      {OptimizerKind::kLion, {.beta1 = 1.0}, "betas[0]"},
      {OptimizerKind::kLion, {.beta2 = 2.0}, "betas[1]"},
      {OptimizerKind::kLion, {.weight_decay = INFINITY}, "weight_decay"},
      {OptimizerKind::kSgdMomentum, {.momentum = -0.9}, "momentum"},
      {OptimizerKind::kSgdMomentum, {.momentum = std::nan("")}, "momentum"},
      {OptimizerKind::kSgdMomentum, {.dampening = std::nan("")}, "dampening"},
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
