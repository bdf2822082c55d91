// The offload blocks and aio: what is on nvme at which stage, what has no effect, what is refused.
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gtest/gtest.h"
#include "server/ds_config.h"
#include "tests/server/ds_config_parsed.h"

namespace zeroshard {
namespace {

std::string Offload(int stage, std::string_view optimizer, std::string_view param = "",
                    std::string_view top = "") {
  return absl::StrCat("{bf16: {enabled: true}, zero_optimization: {stage: ", stage,
                      ", offload_optimizer: {", std::string(optimizer), "}, offload_param: {",
                      std::string(param), "}}, ", std::string(top), "}");
}

constexpr std::string_view kNvme = "device: \"nvme\"";
constexpr std::string_view kPower = "zeroshard: {durability: \"power\"}";

TEST(DsConfigNvme, NothingIsThereByDefault) {
  const TierUse use = Parsed("{zero_optimization: {stage: 3}}").tiers;
  EXPECT_FALSE(use.tiered);
  EXPECT_FALSE(use.optimizer);
  EXPECT_FALSE(use.parameters);
  EXPECT_FALSE(use.pin_memory) << "nothing is offloaded";
}

TEST(DsConfigNvme, OptimizerStatesFromStageOneOn) {
  for (const int stage : {1, 2, 3}) {
    const DsConfig config = Parsed(Offload(stage, kNvme));
    EXPECT_TRUE(config.tiers.tiered) << stage;
    EXPECT_TRUE(config.tiers.optimizer) << stage;
    EXPECT_FALSE(config.tiers.parameters) << stage;
    EXPECT_EQ(config.zero.offload_optimizer.device, OffloadDevice::kNvme);
    EXPECT_EQ(config.tiers.buffer_count, 4);
    EXPECT_TRUE(config.warnings.empty()) << absl::StrJoin(config.warnings, "\n");
  }
  EXPECT_FALSE(Parsed(Offload(0, kNvme)).tiers.tiered);
  EXPECT_HAS(Warnings(Offload(0, kNvme)),
             "zero_optimization.offload_optimizer has no effect: optimizer states are sharded from "
             "stage 1 on.");
  EXPECT_HAS(Warnings(Offload(0, "nvme_path: \"/a\"")),
             "zero_optimization.offload_optimizer has no effect");
}

TEST(DsConfigNvme, ParametersAtStageThree) {
  const DsConfig config =
      Parsed(Offload(3, "", "device: \"nvme\", max_in_cpu: 5, buffer_count: 9"));
  EXPECT_TRUE(config.tiers.tiered);
  EXPECT_TRUE(config.tiers.parameters);
  EXPECT_FALSE(config.tiers.optimizer);
  EXPECT_EQ(config.zero.offload_param.max_in_cpu, 5);
  EXPECT_EQ(config.tiers.buffer_count, 9) << "the larger of both blocks";
  for (const int stage : {0, 1, 2}) {
    EXPECT_FALSE(Parsed(Offload(stage, "", kNvme)).tiers.tiered) << stage;
    EXPECT_HAS(Warnings(Offload(stage, "", kNvme)),
               "zero_optimization.offload_param has no effect: parameters are sharded at stage 3");
  }
}

TEST(DsConfigNvme, StatesWithAPathCanBeMovedThere) {
  const TierUse use = Parsed(Offload(2, "device: \"cpu\", nvme_path: \"//nvme/0/\"")).tiers;
  EXPECT_TRUE(use.tiered);
  EXPECT_FALSE(use.optimizer);
  EXPECT_EQ(use.nvme_path, "/nvme/0");
}

TEST(DsConfigNvme, OneSetOfPathsAJob) {
  const auto both = [](std::string_view a, std::string_view b) {
    return Offload(3, absl::StrCat("device: \"nvme\", nvme_path: ", std::string(a)),
                   absl::StrCat("device: \"nvme\", nvme_path: ", std::string(b)));
  };
  EXPECT_EQ(Parsed(both("\"/a\"", "\"/a/\"")).tiers.nvme_path, "/a");
  EXPECT_EQ(Parsed(both("null", "\"/b\"")).tiers.nvme_path, "/b");
  EXPECT_EQ(Parsed(both("\"/c\"", "null")).tiers.nvme_path, "/c");
  EXPECT_EQ(Parsed(both("null", "null")).tiers.nvme_path, "") << "all paths of the daemon";
  EXPECT_HAS(Refusal(both("\"/a\"", "\"/b\"")), "nvme_path differ, and a job has one set of paths");
  // A path that has no effect is not compared.
  EXPECT_EQ(Parsed(Offload(3, "device: \"nvme\", nvme_path: \"/a\"", "nvme_path: \"/b\""))
                .tiers.nvme_path,
            "/a");
}

TEST(DsConfigNvme, PathsAreAbsolute) {
  for (const std::string_view path : {"\"\"", "\"relative\"", "\"/a/../b\"", "\"/a\\u0001\""}) {
    for (const std::string_view block : {"offload_optimizer", "offload_param"}) {
      const std::string message =
          Refusal(absl::StrCat("{zero_optimization: {stage: 3, ", std::string(block),
                               ": {device: \"nvme\", nvme_path: ", std::string(path), "}}}"));
      EXPECT_HAS(message, absl::StrCat("zero_optimization.", std::string(block),
                                       ".nvme_path: expected an absolute path"));
      EXPECT_HAS(message, "leave it out for all paths of the daemon");
    }
  }
}

TEST(DsConfigNvme, PipelinesAreOnUnlessSwitchedOff) {
  const DsConfig on = Parsed(Offload(1, kNvme));
  EXPECT_TRUE(on.zero.offload_optimizer.pipeline_read);
  EXPECT_TRUE(on.zero.offload_optimizer.pipeline_write);
  const DsConfig off =
      Parsed(Offload(1, "device: \"nvme\", pipeline_read: false, pipeline_write: false"));
  EXPECT_FALSE(off.zero.offload_optimizer.pipeline_read);
  EXPECT_FALSE(off.zero.offload_optimizer.pipeline_write);
}

TEST(DsConfigNvme, EveryBlockThatIsOffloadedSaysWhetherMemoryIsPinned) {
  EXPECT_TRUE(Parsed(Offload(1, "device: \"cpu\"")).tiers.pin_memory);
  EXPECT_FALSE(Parsed(Offload(1, "device: \"cpu\", pin_memory: false")).tiers.pin_memory);
  EXPECT_TRUE(Parsed(Offload(3, "device: \"cpu\", pin_memory: false", "device: \"nvme\""))
                  .tiers.pin_memory);
  EXPECT_FALSE(Parsed(Offload(2, "", "device: \"cpu\"")).tiers.pin_memory) << "no effect below 3";
  EXPECT_FALSE(
      Parsed(Offload(1, kNvme, "", "zeroshard: {compat_version: \"0.19.4\"}")).tiers.pin_memory);
  EXPECT_HAS(Warnings(Offload(1, "pin_memory: true")),
             "offload_optimizer.pin_memory has no effect: nothing is offloaded there");
}

TEST(DsConfigNvme, KeysOfATierThatNothingIsOnAreNamed) {
  const std::string warnings = Warnings(
      "{aio: {block_size: 65536, queue_depth: 4}, zero_optimization: {stage: 3, "
      "offload_optimizer: {device: \"cpu\", buffer_count: 5, ratio: 0.5}, offload_param: "
      "{device: \"cpu\", max_in_cpu: 7, nvme_path: \"/x\"}}, "
      "zeroshard: {nvme_spares: 8, nvme_limit: 5, host_limit: 6}}");
  EXPECT_HAS(warnings,
             "offload_optimizer.buffer_count, aio.block_size, aio.queue_depth, "
             "zeroshard.nvme_spares and zeroshard.nvme_limit have no effect: nothing of this job "
             "can be on nvme.");
  EXPECT_HAS(warnings, "ratio has no effect: optimizer states are not on nvme.");
  EXPECT_HAS(warnings,
             "zero_optimization.offload_param.nvme_path and "
             "zero_optimization.offload_param.max_in_cpu have no effect: parameters are not on "
             "nvme.");
  EXPECT_FALSE(absl::StrContains(warnings, "host_limit"));
}

TEST(DsConfigNvme, AioIsHandedOn) {
  const AioConfig aio =
      Parsed(Offload(1, kNvme, "",
                     "aio: {block_size: 65536, queue_depth: 32, intra_op_parallelism: 4, "
                     "single_submit: true, overlap_events: false}"))
          .aio;
  EXPECT_EQ(aio.block_size, 65536);
  EXPECT_EQ(aio.queue_depth, 32);
  EXPECT_EQ(aio.intra_op_parallelism, 4);
  EXPECT_TRUE(aio.single_submit);
  EXPECT_FALSE(aio.overlap_events);
  for (const char* bad : {"block_size: 512", "block_size: 4097", "block_size: 0", "block_size: 2e9",
                          "queue_depth: 4097", "queue_depth: 0", "intra_op_parallelism: 1025",
                          "queue_depth: \"8\"", "single_submit: \"true\""}) {
    EXPECT_HAS(Refusal(Offload(1, kNvme, "", absl::StrCat("aio: {", bad, "}"))), "aio.");
  }
}

TEST(DsConfigNvme, WithoutAMasterParametersAreSaidToBeHeldOnceMore) {
  const std::string none = "zeroshard: {master: \"none\"}";
  const auto note = [](const std::string& text) {
    const DsConfig config = Parsed(text);
    EXPECT_EQ(config.master_form, MasterForm::kNone);
    return std::string(Resolved(config, "zeroshard.master").note);
  };
  for (const std::string& text :
       {Offload(1, kNvme, "", none), Offload(1, "nvme_path: \"/a\"", "", none),
        Offload(3, "", kNvme, none)}) {
    EXPECT_HAS(note(text), "held once more beside the states, because states can be on nvme");
  }
  EXPECT_HAS(note("{bf16: {enabled: true, bf16_master_weights_and_grads: true}, "
                  "zero_optimization: {stage: 3, offload_optimizer: {device: \"nvme\"}}}"),
             "written as bf16.bf16_master_weights_and_grads true; parameters are held once more");
  EXPECT_FALSE(
      absl::StrContains(note(Offload(2, "device: \"cpu\"", "device: \"nvme\"", none)), "once"));
}

TEST(DsConfigNvme, ASplitMasterIsSaidToBeHeldWhole) {
  const DsConfig config = Parsed(Offload(3, kNvme));
  EXPECT_EQ(config.master_form, MasterForm::kSplit);
  EXPECT_HAS(Resolved(config, "zeroshard.master").note, "held with all its 32 bits");
  EXPECT_FALSE(absl::StrContains(
      Resolved(Parsed(Offload(3, "device: \"cpu\"")), "zeroshard.master").note, "32 bits"));
}

TEST(DsConfigNvme, AWindowInPlaceContradictsParametersThere) {
  const std::string in_place = "zeroshard: {window: \"in_place\"}";
  EXPECT_HAS(Refusal(Offload(3, "", kNvme, in_place)), "leave the window to \"auto\"");
  EXPECT_EQ(Parsed(Offload(3, kNvme, "", in_place)).zeroshard.window, WindowChoice::kInPlace);
}

TEST(DsConfigNvme, PowerNeedsAllStatesThere) {
  EXPECT_EQ(Parsed(Offload(2, kNvme, "", kPower)).zeroshard.durability, DurabilityChoice::kPower);
  EXPECT_HAS(Refusal(Offload(2, "device: \"cpu\", nvme_path: \"/a\"", "", kPower)),
             "what is in memory is lost with the power");
  EXPECT_HAS(Refusal(Offload(0, kNvme, "", kPower)), "zeroshard.durability is \"power\"");
  EXPECT_HAS(Refusal(Offload(3, "", kNvme, kPower)), "zeroshard.durability is \"power\"");
  EXPECT_HAS(Refusal(Offload(3, "device: \"nvme\", ratio: 0.5", "", kPower)),
             "ratio 0.5 a part of the states is in memory");
  EXPECT_HAS(Refusal(Offload(3, kNvme, "", "zeroshard: {durability: \"disk\"}")),
             "process or power");
}

TEST(DsConfigNvme, LimitsAndSparesAreBounded) {
  const ZeroShardConfig own =
      Parsed(Offload(1, kNvme, "", "zeroshard: {nvme_spares: 16, nvme_limit: 1e12, host_limit: 2}"))
          .zeroshard;
  EXPECT_EQ(own.nvme_spares, 16);
  EXPECT_EQ(own.nvme_limit, 1000000000000);
  EXPECT_EQ(own.host_limit, 2);
  for (const char* bad :
       {"nvme_spares: 0", "nvme_spares: 1025", "nvme_limit: -1", "host_limit: \"64GiB\""}) {
    EXPECT_HAS(Refusal(Offload(1, kNvme, "", absl::StrCat("zeroshard: {", bad, "}"))),
               "expected a whole number");
  }
}

TEST(DsConfigNvme, RatioBelowOneNeedsStageThree) {
  EXPECT_EQ(Parsed(Offload(3, "device: \"nvme\", ratio: 0.25")).zero.offload_optimizer.ratio, 0.25);
  EXPECT_HAS(Refusal(Offload(2, "device: \"nvme\", ratio: 0.25")), "needs stage 3");
}

}  // namespace
}  // namespace zeroshard
