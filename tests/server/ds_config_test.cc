#include "server/ds_config.h"

#include <limits>
#include <string>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "tests/server/ds_config_parsed.h"

namespace zeroshard {
namespace {

TEST(DsConfig, AnEmptyFileHasDeepSpeedsDefaults) {
  const DsConfig config = Parsed("{}");
  EXPECT_EQ(config.zero.stage, 0);
  EXPECT_EQ(config.zero.reduce_bucket_size, 500000000);
  EXPECT_EQ(config.zero.allgather_bucket_size, 500000000);
  EXPECT_EQ(config.zero.sub_group_size, 1000000000);
  EXPECT_EQ(config.zero.prefetch_bucket_size, 50000000);
  EXPECT_EQ(config.zero.param_persistence_threshold, 100000);
  EXPECT_EQ(config.zero.model_persistence_threshold, std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(config.zero.max_live_parameters, 1000000000);
  EXPECT_EQ(config.zero.offload_param.buffer_count, 5);
  EXPECT_EQ(config.zero.offload_optimizer.buffer_count, 4);
  EXPECT_TRUE(config.zero.offload_param.pin_memory);
  EXPECT_EQ(config.compute_dtype, DType::kFloat32);
  EXPECT_EQ(config.grad_accum_dtype, DType::kFloat32);
  EXPECT_TRUE(config.check_grad_overflow);
  EXPECT_FALSE(config.optimizer.given);
  EXPECT_EQ(config.scheduler.type, "");
  EXPECT_EQ(config.gradient_clipping, 1.0);
  EXPECT_FALSE(config.loss_scale.enabled);
  EXPECT_FALSE(config.batch.train.has_value());
  EXPECT_EQ(config.aio.block_size, 1048576);
  EXPECT_EQ(config.zeroshard.compat_version, "0.19.6");
  EXPECT_EQ(config.zeroshard.user_state_bytes, 1048576);
  EXPECT_TRUE(config.warnings.empty());
}

TEST(DsConfig, TakesTheFormsOfNumbersThatDeepSpeedTakes) {
  struct Case {
    std::string_view written;
    std::int64_t value;
  };
  const Case cases[] = {{"5e8", 500000000},
                        {"500000000.0", 500000000},
                        {"\"500000000\"", 500000000},
                        {"\" 500_000_000 \"", 500000000},
                        {"\"500000000.0\"", 500000000},
                        {"+5e+8", 500000000},
                        {"1e18", 1000000000000000000},
                        {"9223372036854775807", std::numeric_limits<std::int64_t>::max()}};
  for (const Case& c : cases) {
    const DsConfig config =
        Parsed(Zero(absl::StrCat("\"reduce_bucket_size\": ", std::string(c.written))));
    EXPECT_EQ(config.zero.reduce_bucket_size, c.value) << c.written;
    EXPECT_TRUE(absl::StrContains(absl::StrJoin(config.warnings, ""), "taken as") == false);
  }
}

TEST(DsConfig, RefusesOtherFormsOfNumbersWithAdvice) {
  struct Case {
    std::string_view written;
    std::string_view says;
  };
  const Case cases[] = {
      {"\"5e8\"", "is \"5e8\"; expected a whole number of at least 1, without quotes"},
      {"15099494.4", "without a fraction: write 15099494"},
      {"\"5.5\"", "without quotes"},
      {"\"many\"", "expected a whole number"},
      {"0", "is 0; expected a whole number of at least 1"},
      {"-5", "is -5; expected"},
      {"false", "is false; expected a whole number of at least 1"},
      {"1e19", "expected a whole number below 2^63"},
      {"99999999999999999999", "expected a whole number below 2^63"},
      {"1e400", "expected"},
      {"NaN", "is NaN; expected"},
      {"Infinity", "is Infinity; expected"},
      {"[1]", "is [1]; expected"},
      {"{}", "is {}; expected"},
      {"null", "is null"},
      {"\"__5\"", "expected a whole number"},
      {"\"5_\"", "expected a whole number"},
      {"\"\"", "expected a whole number"},
  };
  for (const Case& c : cases) {
    const std::string message =
        Refusal(Zero(absl::StrCat("\"reduce_bucket_size\": ", std::string(c.written))));
    EXPECT_HAS(message, std::string(c.says));
    EXPECT_HAS(message, "1:46: zero_optimization.reduce_bucket_size");
  }
  EXPECT_HAS(Warnings(Zero("\"reduce_bucket_size\": true")), "true is taken as 1");
}

TEST(DsConfig, TopLevelNumbersAreNumbers) {
  EXPECT_EQ(Parsed("{train_batch_size: 32.0}").batch.train, 32);
  EXPECT_EQ(Parsed("{train_batch_size: null}").batch.train, std::nullopt);
  for (const std::string_view value : {"\"32\"", "true", "0", "-1", "1.5", "1e12", "NaN"}) {
    EXPECT_HAS(Refusal(absl::StrCat("{train_batch_size: ", std::string(value), "}")),
               "train_batch_size");
  }
  for (const std::string_view value : {"\"1.0\"", "true", "-1", "NaN", "Infinity", "null"}) {
    EXPECT_HAS(Refusal(absl::StrCat("{gradient_clipping: ", std::string(value), "}")),
               "gradient_clipping");
  }
}

TEST(DsConfig, BooleansInBlocksAreReadAsPydanticReadsThem) {
  for (const std::string_view value : {"true", "1", "1.0", "\"yes\"", "\"ON\"", "\"t\""}) {
    EXPECT_EQ(Parsed(absl::StrCat("{bf16: {enabled: ", std::string(value), "}}")).compute_dtype,
              DType::kBfloat16);
  }
  for (const std::string_view value : {"false", "0", "\"off\"", "\"F\""}) {
    EXPECT_EQ(Parsed(absl::StrCat("{bf16: {enabled: ", std::string(value), "}}")).compute_dtype,
              DType::kFloat32);
  }
  for (const std::string_view value : {"2", "\"\"", "\"maybe\"", "null", "[]"}) {
    EXPECT_HAS(Refusal(absl::StrCat("{bf16: {enabled: ", std::string(value), "}}")),
               "bf16.enabled");
  }
}

TEST(DsConfig, AutoIsFilledByTheClient) {
  const std::string text =
      "{train_batch_size: \"auto\", fp16: {enabled: \"auto\"}, zero_optimization: {stage: 3, "
      "prefetch_bucket_size: \"auto\"}, optimizer: {type: \"AdamW\", params: {lr: \"auto\", "
      "betas: \"auto\"}}}";
  const DsConfig config =
      Parsed(text, {{"train_batch_size", "32"},
                    {"train_micro_batch_size_per_gpu", "4"},
                    {"fp16.enabled", "true"},
                    {"zero_optimization.stage3_prefetch_bucket_size", "1000"},
                    {"optimizer.params", "{\"lr\": 3e-4, \"betas\": [0.8, 0.95]}"}});
  EXPECT_EQ(config.batch.train, 32);
  EXPECT_EQ(config.batch.micro, 4);
  EXPECT_EQ(config.compute_dtype, DType::kFloat16);
  EXPECT_EQ(config.zero.prefetch_bucket_size, 1000);
  EXPECT_EQ(config.optimizer.lr, 3e-4);
  EXPECT_EQ(config.optimizer.beta1, 0.8);
  EXPECT_EQ(Resolved(config, "optimizer.params.lr").origin, ValueOrigin::kClient);
}

TEST(DsConfig, UnresolvedAutosAreNamedTogether) {
  const std::string message = Refusal(
      "{train_batch_size: \"auto\", gradient_clipping: \"auto\",\n fp16: {enabled: \"auto\"}, "
      "optimizer: {type: \"Adam\", params: {betas: [0.9, \"auto\"]}}, zero_optimization: "
      "{stage3_max_live_parameters: \"auto\"}, scheduler: {type: \"WarmupLR\", params: "
      "{warmup_num_steps: \"auto\"}}}");
  for (const std::string_view path :
       {"train_batch_size (1:20)", "gradient_clipping",
        "fp16.enabled (2:", "optimizer.params.betas",
        "zero_optimization.stage3_max_live_parameters", "scheduler.params.warmup_num_steps"}) {
    EXPECT_HAS(message, std::string(path));
  }
  EXPECT_FALSE(absl::StrContains(message, "\n")) << "one refusal for all: " << message;
  EXPECT_HAS(Refusal("{zero_optimization: \"auto\"}"), "zero_optimization");
  EXPECT_HAS(Refusal("{zero_optimization: {cpu_offload: \"auto\"}}"), "cpu_offload");
}

TEST(DsConfig, AClientThatContradictsTheFileIsRefused) {
  EXPECT_HAS(Refusal("{train_batch_size: 32}", {{"train_batch_size", "64"}}),
             "train_batch_size is 32 in the file and 64 from the client");
  EXPECT_EQ(Parsed("{train_batch_size: 32}", {{"train_batch_size", "32.0"}}).batch.train, 32);
  EXPECT_HAS(Refusal("{}", {{"zero_optimization.stge", "3"}}), "did you mean stage?");
  EXPECT_HAS(Refusal("{}", {{"zero_optimization.stage", "{"}}), "is no JSON");
  EXPECT_HAS(Refusal("{}", {{"zero_optimization.stage", "9"}}), "stage is 9");
  EXPECT_HAS(Refusal("{}", {{"", "9"}}), "no known key");
  EXPECT_HAS(Refusal("{}", {{"optimizer.params.", "9"}}), "no known key");
}

TEST(DsConfig, ABatchMayComeFromTheClientAlone) {
  const DsConfig config = Parsed("{}", {{"train_micro_batch_size_per_gpu", "4"}});
  const absl::StatusOr<Batch> batch = ResolveBatch(config.batch, 2);
  ASSERT_TRUE(batch.ok());
  EXPECT_EQ(batch->train, 8);
}

TEST(DsConfig, UnknownKeysAreErrorsWhereDeepSpeedForbidsThem) {
  EXPECT_HAS(Refusal(Zero("\"stge\": 3")),
             "unknown key zero_optimization.stge; did you mean stage?");
  EXPECT_HAS(Refusal(Zero("\"aio\": {}")), "zero_optimization.aio; it belongs to the top level");
  EXPECT_HAS(Refusal("{bf16: {check_overflow: true}}"), "check_grad_overflow");
  EXPECT_HAS(Refusal("{fp16: {opt_level: \"O2\"}}"), "fp16.opt_level");
  EXPECT_HAS(Refusal("{fp16: {losscale: 1}}"), "did you mean loss_scale?");
  EXPECT_HAS(Refusal("{comms_logger: {enable: true}}"), "did you mean enabled?");
  EXPECT_HAS(Refusal("{zeroshard: {transprt: \"shm\"}}"), "did you mean transport?");
  EXPECT_HAS(Refusal(Zero("\"offload_param\": {\"pipeline\": true}")), "offload_param.pipeline");
}

TEST(DsConfig, UnknownKeysAreWarningsWhereDeepSpeedIgnoresThem) {
  EXPECT_HAS(Warnings("{gradient_cliping: 3}"), "did you mean gradient_clipping?");
  EXPECT_HAS(Warnings("{stage: 3}"), "it belongs to the block zero_optimization");
  EXPECT_HAS(Warnings("{my_settings: {a: 1}}"), "my_settings has no effect");
  EXPECT_HAS(Warnings("{activation_checkpointing: {partitioned_activations: true}}"),
             "did you mean partition_activations?");
  EXPECT_HAS(Warnings("{optimizer: {type: \"Adam\", lr: 1}}"), "optimizer.lr");
  EXPECT_HAS(Warnings("{\"zero_optimization.stage\": 3}"), "zero_optimization.stage");
  EXPECT_EQ(Parsed("{\"zero_optimization.stage\": 3}").zero.stage, 0);
}

TEST(DsConfig, RenamedAndMisplacedKeysMeanWhatTheyMeant) {
  EXPECT_EQ(Parsed("{aio: {thread_count: 4}}").aio.intra_op_parallelism, 4);
  EXPECT_HAS(Warnings("{aio: {thread_count: 4}}"), "intra_op_parallelism");
  EXPECT_HAS(Refusal("{aio: {thread_count: 4, intra_op_parallelism: 2}}"), "their values differ");
  EXPECT_EQ(Parsed(Zero("\"max_live_parameters\": 5e7")).zero.max_live_parameters, 50000000);
  EXPECT_EQ(Parsed("{bfloat16: {enabled: true}}").compute_dtype, DType::kBfloat16);
  EXPECT_EQ(Parsed("{bfloat16: {enabled: true}, bf16: {enabled: false}}").compute_dtype,
            DType::kFloat32);
  EXPECT_HAS(Warnings(Zero("\"grad_hooks\": true")), "grad_hooks has no effect");
}

TEST(DsConfig, DeprecatedFormsOfZero) {
  EXPECT_EQ(Parsed("{zero_optimization: true}").zero.stage, 1);
  EXPECT_EQ(Parsed("{zero_optimization: false}").zero.stage, 0);
  EXPECT_EQ(Parsed("{zero_optimization: true, allgather_size: 2e8}").zero.allgather_bucket_size,
            200000000);
  EXPECT_HAS(Warnings("{zero_optimization: true}"), "deprecated");
  const DsConfig config = Parsed(Zero("\"stage\": 3, \"cpu_offload\": true"));
  EXPECT_EQ(config.zero.offload_optimizer.device, OffloadDevice::kCpu);
  EXPECT_EQ(Resolved(config, "zero_optimization.offload_optimizer.device").origin,
            ValueOrigin::kAlias);
  EXPECT_EQ(Parsed(Zero("\"stage\": 3, \"cpu_offload_param\": true")).zero.offload_param.device,
            OffloadDevice::kCpu);
  EXPECT_EQ(Parsed(Zero("\"cpu_offload\": false")).zero.offload_optimizer.device,
            OffloadDevice::kNone);
  EXPECT_HAS(Refusal(Zero("\"cpu_offload\": true, \"offload_optimizer\": {\"device\": \"cpu\"}")),
             "is there too");
  EXPECT_HAS(Refusal("{zero_optimization: 3}"), "must be a block");
}

TEST(DsConfig, RulesBetweenKeys) {
  EXPECT_HAS(Refusal("{fp16: {enabled: true}, bf16: {enabled: true}}"), "exclude each other");
  EXPECT_HAS(Refusal(Zero("\"stage\": 2, \"offload_optimizer\": {\"ratio\": 0.5}")),
             "needs stage 3");
  EXPECT_HAS(Refusal(Zero("\"stage\": 1, \"allgather_bucket_size\": 5")), "multiple of 2");
  EXPECT_EQ(Parsed(Zero("\"stage\": 3, \"allgather_bucket_size\": 5")).zero.stage, 3);
  EXPECT_HAS(Refusal("{aio: {block_size: 5000}}"),
             "block_size is 5000; expected a multiple of 4096");
  EXPECT_HAS(Refusal("{gradient_allreduce_op: \"sum\"}"), "multiply the loss");
}

TEST(DsConfig, ASettingWithoutEffectIsSaidToHaveNone) {
  EXPECT_HAS(Warnings(Zero("\"stage\": 2, \"offload_param\": {\"device\": \"cpu\"}")),
             "zero_optimization.offload_param has no effect: parameters are sharded at stage 3");
  EXPECT_HAS(Warnings(Zero("\"stage\": 2, \"stage3_max_live_parameters\": 5")),
             "stage3_max_live_parameters has no effect");
  EXPECT_HAS(Warnings("{fp16: {loss_scale: 128, enabled: false}}"), "fp16 is not enabled");
  EXPECT_HAS(Warnings("{fp16: {loss_scale: 128, enabled: true, hysteresis: 1}}"),
             "fp16.hysteresis has no effect");
  EXPECT_HAS(Warnings("{steps_per_print: Infinity}"), "steps_per_print has no effect");
  EXPECT_TRUE(
      Parsed(Zero("\"stage\": 3, \"offload_param\": {\"device\": \"cpu\"}")).warnings.empty());
}

TEST(DsConfig, LossScaleThatWouldDivideByZeroIsRefused) {
  EXPECT_HAS(Refusal("{fp16: {enabled: true, loss_scale_window: 0}}"), "loss_scale_window is 0");
  EXPECT_HAS(Refusal("{fp16: {enabled: true, min_loss_scale: 0}}"), "min_loss_scale is 0");
  EXPECT_HAS(Refusal("{fp16: {enabled: true, hysteresis: 0}}"), "hysteresis is 0");
  for (const std::string_view value :
       {"-1", "Infinity", "-Infinity", "NaN", "true", "\"8\"", "1e39"}) {
    EXPECT_HAS(
        Refusal(absl::StrCat("{fp16: {enabled: true, loss_scale: ", std::string(value), "}}")),
        "fp16.loss_scale");
  }
  // These two matter only while the scale is dynamic.
  EXPECT_EQ(Parsed("{fp16: {enabled: true, loss_scale: 8, loss_scale_window: 0}}")
                .loss_scale.static_scale,
            8);
  EXPECT_FALSE(Parsed("{fp16: {enabled: false, loss_scale_window: 0}}").loss_scale.enabled);
}

TEST(DsConfig, LossScaleIsHandedOnWhole) {
  const LossScaleConfig scale =
      Parsed(
          "{fp16: {enabled: true, initial_scale_power: 4, loss_scale_window: 2, hysteresis: 3, "
          "consecutive_hysteresis: true, min_loss_scale: 2}}")
          .loss_scale;
  EXPECT_TRUE(scale.enabled);
  EXPECT_TRUE(scale.dynamic);
  EXPECT_EQ(scale.initial_scale_power, 4);
  EXPECT_EQ(scale.window, 2);
  EXPECT_EQ(scale.hysteresis, 3);
  EXPECT_TRUE(scale.consecutive_hysteresis);
  EXPECT_EQ(scale.min_scale, 2);
}

}  // namespace
}  // namespace zeroshard
