// In which form master parameters and optimizer states are held: the keys that say so, together.
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "server/ds_config.h"
#include "tests/server/ds_config_parsed.h"

namespace zeroshard {
namespace {

std::string Job(std::string_view precision, int stage, std::string_view rest) {
  return absl::StrCat("{", std::string(precision),
                      ": {enabled: true}, zero_optimization: {stage: ", stage, "}, ",
                      std::string(rest), "}");
}

std::string Own(std::string_view members) {
  return absl::StrCat("zeroshard: {", std::string(members), "}");
}

std::string Optimizer(std::string_view type, std::string_view params = "") {
  return absl::StrCat("optimizer: {type: \"", std::string(type), "\", params: {",
                      std::string(params), "}}");
}

TEST(DsConfigStates, DefaultsAreFp32) {
  for (const char* precision : {"bf16", "fp16", "comms_logger"}) {
    const DsConfig config = Parsed(Job(precision, 3, Optimizer("AdamW")));
    EXPECT_EQ(config.state_format, StateFormat::kFloat32);
    EXPECT_TRUE(config.master_form == MasterForm::kFloat32 || std::string(precision) == "bf16");
    EXPECT_EQ(Resolved(config, "zeroshard.master").origin, ValueOrigin::kDefault);
    EXPECT_TRUE(absl::StrContains(Resolved(config, "zeroshard.master").note, "auto"));
  }
}

TEST(DsConfigStates, OurOwnKeysSayTheForm) {
  const std::pair<const char*, MasterForm> masters[] = {
      {"fp32", MasterForm::kFloat32}, {"split", MasterForm::kSplit}, {"NONE", MasterForm::kNone}};
  for (const auto& [name, form] : masters) {
    const DsConfig config =
        Parsed(Job("bf16", 2, Own(absl::StrCat("master: \"", name, "\", rounding_seed: 7"))));
    EXPECT_EQ(config.master_form, form) << name;
    EXPECT_EQ(Resolved(config, "zeroshard.master").origin, ValueOrigin::kFile);
    EXPECT_EQ(config.zeroshard.rounding_seed, 7);
    EXPECT_EQ(absl::StrContains(absl::StrJoin(config.warnings, ""), "rounding_seed has no effect"),
              form != MasterForm::kNone);
    EXPECT_EQ(config.grad_accum_dtype, DType::kFloat32);
  }
  const std::pair<const char*, StateFormat> formats[] = {{"fp32", StateFormat::kFloat32},
                                                         {"bf16", StateFormat::kBfloat16},
                                                         {"int8", StateFormat::kInt8}};
  for (const auto& [name, format] : formats) {
    for (const char* precision : {"bf16", "fp16", "comms_logger"}) {
      EXPECT_EQ(Parsed(Job(precision, 0, Own(absl::StrCat("optimizer_states: \"", name, "\""))))
                    .state_format,
                format);
    }
  }
  EXPECT_EQ(Parsed(Job("bf16", 0, Own("master: \"split\""))).master_form, MasterForm::kSplit);
}

TEST(DsConfigStates, DeepSpeedsKeysSayTheForm) {
  const DsConfig lean = Parsed(
      "{bf16: {enabled: true, bf16_master_weights_and_grads: true, bf16_optimizer_states: true}, "
      "zero_optimization: {stage: 3}}");
  EXPECT_EQ(lean.master_form, MasterForm::kNone);
  EXPECT_EQ(lean.state_format, StateFormat::kBfloat16);
  EXPECT_EQ(lean.grad_accum_dtype, DType::kBfloat16);
  EXPECT_EQ(Resolved(lean, "zeroshard.master").origin, ValueOrigin::kAlias);
  EXPECT_EQ(Resolved(lean, "zeroshard.master").note,
            "written as bf16.bf16_master_weights_and_grads true");
  EXPECT_EQ(Resolved(lean, "data_types.grad_accum_dtype").origin, ValueOrigin::kAlias);
  const DsConfig exact = Parsed(
      "{bf16: {enabled: true, bf16_master_weights_and_grads: true}, zero_optimization: {stage: 1}, "
      "data_types: {grad_accum_dtype: \"fp32\"}}");
  EXPECT_EQ(exact.grad_accum_dtype, DType::kFloat32);
  EXPECT_EQ(exact.state_format, StateFormat::kFloat32);
  for (const char* type : {"Adam", "AdamW", "Lion", "Adagrad"}) {
    const DsConfig config = Parsed(Job("bf16", 1, Optimizer(type, "fp32_optimizer_states: false")));
    EXPECT_EQ(config.state_format, StateFormat::kBfloat16) << type;
  }
}

TEST(DsConfigStates, EightBitOptimizersAreTheirPlainOnesWithInt8States) {
  for (const char* type : {"AdamW8bit", "adamw8bit", "Adam8bit"}) {
    const DsConfig config = Parsed(Job("bf16", 3, Optimizer(type, "lr: 2e-4, weight_decay: 0.1")));
    EXPECT_EQ(config.optimizer.kind, OptimizerKind::kAdamW) << type;
    EXPECT_EQ(config.optimizer.lr, 2e-4);
    EXPECT_EQ(config.state_format, StateFormat::kInt8);
    EXPECT_EQ(Resolved(config, "zeroshard.optimizer_states").origin, ValueOrigin::kAlias);
  }
  EXPECT_EQ(Parsed(Job("bf16", 3, Optimizer("Adam8bit", "adam_w_mode: false"))).optimizer.kind,
            OptimizerKind::kAdam);
  EXPECT_HAS(Refusal(Job("bf16", 3, Optimizer("AdamW8bit", "fp32_optimizer_states: true"))),
             "AdamW8bit has no parameter optimizer.params.fp32_optimizer_states");
}

TEST(DsConfigStates, AdagradAndLionHaveTheirOwnDefaults) {
  const DsConfig adagrad = Parsed(Job("bf16", 3, Optimizer("adagrad")));
  EXPECT_EQ(adagrad.optimizer.kind, OptimizerKind::kAdagrad);
  EXPECT_EQ(adagrad.optimizer.lr, 1e-2);
  EXPECT_EQ(adagrad.optimizer.eps, 1e-10);
  const DsConfig lion = Parsed(Job("fp16", 3, Optimizer("LION", "betas: [0.95, 0.98]")));
  EXPECT_EQ(lion.optimizer.kind, OptimizerKind::kLion);
  EXPECT_EQ(lion.optimizer.lr, 1e-3);
  EXPECT_EQ(lion.optimizer.beta1, 0.95);
  EXPECT_EQ(lion.optimizer.beta2, 0.98);
  EXPECT_HAS(Refusal(Job("bf16", 3, Optimizer("Lion", "eps: 1e-8"))), "Lion has no parameter");
  EXPECT_HAS(Refusal(Job("bf16", 3, Optimizer("Adagrad", "betas: [0.9, 0.9]"))),
             "Adagrad has no parameter");
}

TEST(DsConfigStates, KeysThatContradictEachOtherAreBothNamed) {
  const std::string twice =
      Refusal(Job("bf16", 3, Optimizer("AdamW8bit") + ", " + Own("optimizer_states: \"bf16\"")));
  EXPECT_HAS(twice, "optimizer.type AdamW8bit asks for zeroshard.optimizer_states \"int8\"");
  EXPECT_HAS(twice, "zeroshard.optimizer_states \"bf16\" for \"bf16\"; remove one");
  EXPECT_HAS(Refusal(Job("bf16", 3,
                         Optimizer("AdamW", "fp32_optimizer_states: true") + ", " +
                             Own("optimizer_states: \"int8\""))),
             "fp32_optimizer_states true asks for");
  EXPECT_HAS(Refusal("{bf16: {enabled: true, bf16_master_weights_and_grads: true}, "
                     "zero_optimization: {stage: 3}, zeroshard: {master: \"split\"}}"),
             "bf16.bf16_master_weights_and_grads true asks for zeroshard.master \"none\"");
  // Said twice is no contradiction.
  EXPECT_EQ(
      Parsed(Job("bf16", 3, Optimizer("AdamW8bit") + ", " + Own("optimizer_states: \"int8\"")))
          .state_format,
      StateFormat::kInt8);
}

TEST(DsConfigStates, WhatCannotBeHeldIsRefused) {
  for (const char* master : {"split", "none"}) {
    const std::string own = Own(absl::StrCat("master: \"", master, "\""));
    EXPECT_HAS(Refusal(Job("fp16", 3, own)), "which only bf16 jobs can have: fp16 parameters");
    EXPECT_HAS(Refusal(Job("comms_logger", 3, own)), "parameters are fp32 and their own master");
  }
  EXPECT_HAS(Refusal(Job("bf16", 0, Own("master: \"none\""))),
             "zeroshard.master is \"none\", which needs stage 1, 2 or 3, and the stage is 0");
  EXPECT_HAS(Refusal("{bf16: {enabled: true, bf16_master_weights_and_grads: true}}"),
             "(written as bf16.bf16_master_weights_and_grads true), which needs stage 1, 2 or 3");
  EXPECT_HAS(
      Refusal(Job("bf16", 3, Optimizer("Adagrad") + ", " + Own("optimizer_states: \"int8\""))),
      "there are no 8-bit states for Adagrad");
  EXPECT_HAS(Refusal("{bf16: {enabled: true, bf16_optimizer_states: true}}"),
             "bf16.bf16_optimizer_states needs bf16.bf16_master_weights_and_grads");
  EXPECT_HAS(Refusal(Job("fp16", 3, Optimizer("Adam", "fp32_optimizer_states: false"))),
             "there are no fp16 states");
  EXPECT_HAS(Refusal(Job("fp16", 3, Own("master: \"fp64\""))), "auto, fp32, split or none");
  EXPECT_HAS(Refusal(Job("bf16", 3, Own("optimizer_states: \"int4\""))), "fp32, bf16 or int8");
  EXPECT_HAS(Refusal(Job("bf16", 3, Own("rounding_seed: -1"))), "zeroshard.rounding_seed");
  EXPECT_HAS(Refusal("{fp16: {enabled: true, fp16_master_weights_and_grads: true}}"),
             "fp32 master only");
}

TEST(DsConfigStates, IdleKeysAreNamed) {
  EXPECT_HAS(Warnings(Job("comms_logger", 3, Optimizer("AdamW", "fp32_optimizer_states: false"))),
             "fp32_optimizer_states has no effect: states have the parameters' type");
  EXPECT_HAS(Warnings("{bf16: {bf16_master_weights_and_grads: true, bf16_optimizer_states: true}}"),
             "bf16.bf16_master_weights_and_grads and bf16.bf16_optimizer_states have no effect");
}

}  // namespace
}  // namespace zeroshard
