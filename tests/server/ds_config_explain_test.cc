#include "server/ds_config.h"

#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "tests/server/ds_config_parsed.h"

namespace zeroshard {
namespace {

TEST(DsConfig, CompatVersionChoosesTheDefaultsThatMoved) {
  struct Case {
    std::string_view version;
    double clipping;
    bool pin_memory;
    bool check_overflow;
  };
  const Case cases[] = {{"0.19.6", 1.0, true, true},        {"0.19.5", 1.0, true, true},
                        {"0.19.4", 1.0, false, true},       {"0.19.3", 1.0, false, true},
                        {"0.19.2", 0.0, false, false},      {"0.16", 0.0, false, false},
                        {"0.18.9+cu121", 0.0, false, false}};
  for (const Case& c : cases) {
    const DsConfig config =
        Parsed(absl::StrCat("{zeroshard: {compat_version: \"", std::string(c.version), "\"}}"));
    EXPECT_EQ(config.gradient_clipping, c.clipping) << c.version;
    EXPECT_EQ(config.zero.offload_param.pin_memory, c.pin_memory) << c.version;
    EXPECT_EQ(config.zero.offload_optimizer.pin_memory, c.pin_memory) << c.version;
    EXPECT_EQ(config.check_grad_overflow, c.check_overflow) << c.version;
  }
  EXPECT_HAS(Warnings("{zeroshard: {compat_version: \"0.20.0\"}}"), "newer than 0.19.6");
  for (const std::string_view bad : {"latest", "", "1", "1.2.3.4", "1..2", "99999999999999.1"}) {
    EXPECT_HAS(Refusal(absl::StrCat("{zeroshard: {compat_version: \"", std::string(bad), "\"}}")),
               "expected a version such as 0.19.6");
  }
  const DsConfig written =
      Parsed("{gradient_clipping: 2, zeroshard: {compat_version: \"0.19.2\"}}");
  EXPECT_EQ(written.gradient_clipping, 2);
}

TEST(DsConfig, EveryValueHasItsOrigin) {
  const DsConfig config = Parsed(
      "{gradient_clipping: 0.5, bfloat16: {enabled: true}, zeroshard: {compat_version: "
      "\"0.19.4\"}, zero_optimization: {cpu_offload: true}}",
      {{"train_batch_size", "8"}});
  EXPECT_EQ(Resolved(config, "gradient_clipping").origin, ValueOrigin::kFile);
  EXPECT_EQ(Resolved(config, "gradient_clipping").value_text, "0.5");
  EXPECT_EQ(Resolved(config, "train_batch_size").origin, ValueOrigin::kClient);
  EXPECT_EQ(Resolved(config, "zero_optimization.stage").origin, ValueOrigin::kDefault);
  EXPECT_EQ(Resolved(config, "bf16.enabled").origin, ValueOrigin::kAlias);
  EXPECT_EQ(Resolved(config, "zero_optimization.offload_optimizer.pin_memory").origin,
            ValueOrigin::kCompat);
  const std::string lines = absl::StrJoin(ExplainLines(config), "\n");
  EXPECT_HAS(lines, "gradient_clipping = 0.5  (file)");
  EXPECT_HAS(lines, "train_batch_size = 8  (client)");
  EXPECT_HAS(lines, "warning: ");
  EXPECT_HAS(
      ExplainJson(config),
      "{\"path\": \"gradient_clipping\", \"value\": 0.5, \"origin\": \"file\", \"note\": \"\"}");
}

TEST(DsConfig, ExplanationIsStrictJsonAndReadsBackAsTheSameConfig) {
  const DsConfig config = Parsed("{steps_per_print: Infinity}");
  EXPECT_HAS(ExplainJson(config), "\"value\": \"Infinity\"");
}

TEST(DsConfig, ErrorsAreReportedTogetherWithTheirPlaces) {
  const std::string message =
      Refusal("{\n  zero_optimization: {stage: 7},\n  gradient_clipping: -1,\n  fp16: 3\n}");
  EXPECT_HAS(message, "3 errors");
  EXPECT_HAS(message, "2:30: zero_optimization.stage is 7; expected a whole number from 0 to 3");
  EXPECT_HAS(message, "3:22: gradient_clipping is -1");
  EXPECT_HAS(message, "4:9: fp16 must be a block");
}

TEST(DsConfig, TextThatIsNoConfiguration) {
  EXPECT_HAS(Refusal(""), "1:1");
  EXPECT_HAS(Refusal("[]"), "expected a block in braces");
  EXPECT_HAS(Refusal("3"), "expected a block in braces");
  EXPECT_HAS(Refusal("{\"a\": 1, \"a\": 2}"), "duplicate keys");
  EXPECT_HAS(Refusal("/etc/ds_config.json"), "1:1");
  EXPECT_HAS(Refusal(std::string("\0\0", 2)), "1:1");
}

TEST(DsConfig, TakesTheBase64FormToo) {
  const std::string text = absl::WebSafeBase64Escape("{\"zero_optimization\": {\"stage\": 2}}");
  EXPECT_EQ(Parsed(text).zero.stage, 2);
}

TEST(DsConfig, LongNamesDoNotMakeLongMessages) {
  const std::string name(50000, 'k');
  EXPECT_LT(Refusal(Zero(absl::StrCat("\"", name, "\": 1"))).size(), 1000U);
  std::string many;
  for (int i = 0; i < 500; ++i) absl::StrAppend(&many, "unknown", i, ": 1\n");
  EXPECT_LT(Refusal(Zero(many)).size(), 12000U);
}

}  // namespace
}  // namespace zeroshard
