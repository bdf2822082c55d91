// The published ledgers, and what operators see of them.
#include "client/cli/state_forms.h"

#include <gtest/gtest.h>

#include <string>

#include "client/cli/views.h"

namespace zeroshard {
namespace {

model::v1::EngineConfig Config(model::v1::OptimizerKind optimizer, int slots,
                               model::v1::MasterForm master, model::v1::StateFormat states) {
  model::v1::EngineConfig config;
  config.set_stage(3);
  config.set_compute_dtype(model::v1::DTYPE_BFLOAT16);
  config.set_accumulator_dtype(model::v1::DTYPE_FLOAT32);
  config.set_optimizer(optimizer);
  for (int slot = 0; slot < slots; ++slot) config.add_state_slots("state");
  config.set_master_form(master);
  config.set_state_format(states);
  return config;
}

TEST(StateFormsTest, KIsWhatTheTableInTheDocumentationSays) {
  struct Case {
    uint32_t k;
    model::v1::OptimizerKind optimizer;
    int slots;
    model::v1::MasterForm master;
    model::v1::StateFormat states;
  };
  using namespace model::v1;
  const Case cases[] = {
      {12, OPTIMIZER_ADAMW, 2, MASTER_FORM_FLOAT32, STATE_FORMAT_FLOAT32},
      {10, OPTIMIZER_ADAM, 2, MASTER_FORM_SPLIT, STATE_FORMAT_FLOAT32},
      {8, OPTIMIZER_ADAMW, 2, MASTER_FORM_NONE, STATE_FORMAT_FLOAT32},
      {8, OPTIMIZER_SGD, 1, MASTER_FORM_FLOAT32, STATE_FORMAT_FLOAT32},
      {6, OPTIMIZER_LION, 1, MASTER_FORM_SPLIT, STATE_FORMAT_FLOAT32},
      {6, OPTIMIZER_ADAGRAD, 1, MASTER_FORM_SPLIT, STATE_FORMAT_FLOAT32},
      {6, OPTIMIZER_ADAMW, 2, MASTER_FORM_FLOAT32, STATE_FORMAT_INT8},
      {6, OPTIMIZER_ADAMW, 2, MASTER_FORM_SPLIT, STATE_FORMAT_BFLOAT16},
      {4, OPTIMIZER_SGD, 1, MASTER_FORM_SPLIT, STATE_FORMAT_BFLOAT16},
      {4, OPTIMIZER_ADAMW, 2, MASTER_FORM_SPLIT, STATE_FORMAT_INT8},
      {4, OPTIMIZER_SGD, 0, MASTER_FORM_FLOAT32, STATE_FORMAT_FLOAT32},
      {2, OPTIMIZER_ADAMW, 2, MASTER_FORM_NONE, STATE_FORMAT_INT8},
      {2, OPTIMIZER_SGD, 0, MASTER_FORM_SPLIT, STATE_FORMAT_FLOAT32},
  };
  for (const Case& one : cases) {
    const StateForms forms = StateFormsOf(Config(one.optimizer, one.slots, one.master, one.states));
    EXPECT_EQ(forms.optimizer_bytes, one.k) << forms.optimizer << " " << forms.master;
    EXPECT_EQ(*forms.with_fp32, *forms.with_split + 2);
    EXPECT_EQ(forms.parameter + forms.gradient, 6u);
  }
}

TEST(StateFormsTest, AJobThatCanBeOnNvmeHasAMasterOf32Bits) {
  model::v1::EngineConfig config = Config(
      model::v1::OPTIMIZER_ADAMW, 2, model::v1::MASTER_FORM_SPLIT, model::v1::STATE_FORMAT_FLOAT32);
  config.set_tiered(true);
  StateForms forms = StateFormsOf(config);
  EXPECT_EQ(forms.optimizer_bytes, 12u);
  EXPECT_EQ(forms.master, "fp32");
  EXPECT_EQ(forms.with_fp32, 12u);
  EXPECT_FALSE(forms.with_split.has_value()) << "it cannot have it";
  config.set_master_form(model::v1::MASTER_FORM_NONE);
  forms = StateFormsOf(config);
  EXPECT_EQ(forms.optimizer_bytes, 10u) << "the parameter once more";
  EXPECT_EQ(forms.master, "bf16");
  config.set_compute_dtype(model::v1::DTYPE_FLOAT32);
  forms = StateFormsOf(config);
  EXPECT_EQ(forms.optimizer_bytes, 12u) << "a master beside the parameter";
  EXPECT_EQ(forms.master, "fp32");
}

TEST(StateFormsTest, OtherPrecisionsAndStages) {
  model::v1::EngineConfig config =
      Config(model::v1::OPTIMIZER_ADAMW, 2, model::v1::MASTER_FORM_FLOAT32,
             model::v1::STATE_FORMAT_FLOAT32);
  config.set_compute_dtype(model::v1::DTYPE_FLOAT16);
  config.set_accumulator_dtype(model::v1::DTYPE_FLOAT16);
  StateForms forms = StateFormsOf(config);
  EXPECT_EQ(forms.gradient, 2u);
  EXPECT_EQ(forms.optimizer_bytes, 12u);
  EXPECT_FALSE(forms.with_split.has_value());

  config.set_compute_dtype(model::v1::DTYPE_FLOAT32);
  forms = StateFormsOf(config);
  EXPECT_EQ(forms.master, "the parameter");
  EXPECT_EQ(forms.optimizer_bytes, 8u);
  EXPECT_FALSE(forms.with_fp32.has_value());

  config.set_compute_dtype(model::v1::DTYPE_BFLOAT16);
  config.set_master_form(model::v1::MASTER_FORM_SPLIT);
  config.set_stage(0);
  EXPECT_EQ(StateFormsOf(config).optimizer_bytes, 12u);

  config.set_optimizer(model::v1::OPTIMIZER_NONE);
  forms = StateFormsOf(config);
  EXPECT_EQ(forms.optimizer, "none");
  EXPECT_EQ(forms.gradient + forms.optimizer_bytes, 0u);
}

TEST(StateFormsTest, TiersShowBothFormsSideBySide) {
  admin::v1::ListTiersReply reply;
  reply.add_tiers()->set_name("host");
  admin::v1::TierJob* job = reply.add_jobs();
  job->set_name("llm");
  job->set_bytes(3 << 20);
  *job->mutable_config() = Config(model::v1::OPTIMIZER_ADAMW, 2, model::v1::MASTER_FORM_SPLIT,
                                  model::v1::STATE_FORMAT_FLOAT32);
  const std::string text = TiersText(reply);
  EXPECT_NE(
      text.find("JOB    MEMORY  OPTIMIZER  MASTER  STATES  PARAMETER  G   K  K SPLIT  K FP32"),
      std::string::npos)
      << text;
  EXPECT_NE(
      text.find("llm  3.00 MiB  AdamW      split   fp32            2  4  10       10      12"),
      std::string::npos)
      << text;
}

TEST(StateFormsTest, AJobSaysItsForm) {
  admin::v1::GetJobReply reply;
  *reply.mutable_config() = Config(model::v1::OPTIMIZER_ADAMW, 2, model::v1::MASTER_FORM_SPLIT,
                                   model::v1::STATE_FORMAT_INT8);
  EXPECT_NE(JobText(reply).find("AdamW, split master, int8 states: 2 + G 4 + K 4 bytes a trainable "
                                "parameter (K 6 with an fp32 master)\n"),
            std::string::npos)
      << JobText(reply);
}

}  // namespace
}  // namespace zeroshard
