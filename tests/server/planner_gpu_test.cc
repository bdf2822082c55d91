// Jobs on GPUs: what is refused, where their states rest, and that every byte is accounted for.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "server/gpu_plan.h"
#include "server/ledger_lines.h"
#include "server/planner.h"
#include "storage/device_counters.h"
#include "tests/server/plan_fixture.h"

namespace zeroshard {
namespace {

using internal::v1::WorkerRegion;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

absl::StatusOr<PlanInput> Input(const std::string& zero, const std::string& more = "") {
  ZS_ASSIGN_OR_RETURN(
      const DsConfig config,
      ParseDsConfig(
          absl::StrCat(R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}}, )",
                       more, R"("zero_optimization": {"sub_group_size": 65536, )", zero, "}}"),
          {}, DeviceKind::kCuda));
  return TwoWorkers(config, {"cuda:0", "cuda:1"});
}

JobPlan Plan(const std::string& zero, const std::string& more = "") {
  const absl::StatusOr<PlanInput> input = Input(zero, more);
  EXPECT_TRUE(input.ok()) << input.status();
  return input.ok() ? Plan(*input) : JobPlan();
}

constexpr uint64_t kHalf = 512 * 512 / 2;  // elements of a worker

TEST(PlannerGpu, WithoutOffloadEverythingRestsOnTheGpu) {
  const JobPlan plan = Plan(R"("stage": 3)");
  EXPECT_TRUE(plan.config.data_plane());
  EXPECT_TRUE(plan.config.tiered());
  EXPECT_EQ(plan.config.optimizer_tier(), model::v1::TIER_GPU);
  EXPECT_EQ(plan.config.parameter_tier(), model::v1::TIER_GPU);
  EXPECT_EQ(plan.config.window(), model::v1::WINDOW_COPY);
  ASSERT_EQ(plan.workers.size(), 2u);
  EXPECT_EQ(plan.workers[1].device(), "cuda:1");
  EXPECT_EQ(plan.ranks[1].home_worker(), 1u);
  EXPECT_EQ(plan.islands, 1u);
  auto lines = Lines(plan);
  EXPECT_EQ(lines["worker 0 parameters gpu"], kHalf * 2);
  EXPECT_EQ(lines["worker 0 gradients gpu"], kHalf * 4);
  EXPECT_EQ(lines["worker 1 master gpu"], kHalf * 4);
  EXPECT_EQ(lines["worker 1 exp_avg gpu"], kHalf * 4);
  EXPECT_EQ(lines["worker 1 exp_avg_sq gpu"], kHalf * 4);
  EXPECT_EQ(lines.count("worker 1 exp_avg_sq host"), 0u);
  EXPECT_EQ(lines["rank 0 window gpu"], uint64_t{2} << 20) << "one page of the device";
  EXPECT_GT(lines["worker 0 slots gpu"], 0u);
  const JobPlan offloaded = Plan(R"("stage": 3, "offload_optimizer": {"device": "cpu"})");
  // States, and the ring for gradients and parameters, but for pages that others share.
  EXPECT_NEAR(static_cast<double>(offloaded.memory_bytes() - plan.memory_bytes()),
              2 * kHalf * 3 * 4 + 2 * offloaded.gpus[0].ring, 8 * 4096);
  EXPECT_EQ(plan.gpus[0].ring, 0u);
}

TEST(PlannerGpu, WhatTheServerMakesForEachWorker) {
  const JobPlan plan = Plan(R"("stage": 2)");
  std::map<WorkerRegion::Kind, int> kinds;
  for (const RegionPlan& region : plan.regions) ++kinds[region.kind];
  EXPECT_EQ(kinds[WorkerRegion::KIND_DEVICE_TABLE], 2);
  EXPECT_EQ(kinds[WorkerRegion::KIND_DEVICE_COUNTERS], 2);
  EXPECT_EQ(kinds[WorkerRegion::KIND_DEVICE_SHARED], 0) << "the worker makes it";
  EXPECT_EQ(kinds[WorkerRegion::KIND_LOCAL_ACCUMULATOR], 0);
  for (const RegionPlan& region : plan.regions) {
    if (region.kind != WorkerRegion::KIND_DEVICE_COUNTERS) continue;
    EXPECT_EQ(region.bytes, kDeviceCounterBytes);
  }
  EXPECT_EQ(plan.gpus.size(), 2u);
  EXPECT_GT(plan.gpus[0].shared, 0u);
  EXPECT_GT(plan.gpus[0].states, 0u);
}

TEST(PlannerGpu, AnOffloadedOptimizerRestsOnTheHost) {
  const JobPlan gpu = Plan(R"("stage": 2)");
  const JobPlan plan = Plan(R"("stage": 2, "offload_optimizer": {"device": "cpu"})");
  EXPECT_EQ(plan.config.optimizer_tier(), model::v1::TIER_HOST);
  EXPECT_EQ(plan.config.optimizer_ratio(), 1.0);
  auto lines = Lines(plan);
  EXPECT_EQ(lines["worker 0 master host"], kHalf * 4);
  EXPECT_EQ(lines["worker 0 exp_avg host"], kHalf * 4);
  EXPECT_EQ(lines.count("worker 0 exp_avg gpu"), 0u);
  EXPECT_EQ(lines["worker 0 gradients gpu"], kHalf * 4);
  EXPECT_EQ(lines["worker 0 parameters, shard gpu"], kHalf * 2);
  EXPECT_GE(lines["worker 0 offload staging host"], kHalf * (4 + 2))
      << "all chunks find room in the ring";
  EXPECT_EQ(plan.gpus[0].ring, kHalf * (4 + 2));
  EXPECT_LT(plan.gpus[0].states, gpu.gpus[0].states);
}

TEST(PlannerGpu, OffloadedParametersRestOnTheHost) {
  for (const char* optimizer : {"none", "cpu", "nvme"}) {
    const JobPlan plan = Plan(absl::StrCat(
        R"("stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": ")",
        optimizer, R"("})"));
    EXPECT_EQ(plan.config.parameter_tier(), model::v1::TIER_HOST);
    EXPECT_EQ(plan.config.window(), model::v1::WINDOW_IN_PLACE);
    auto lines = Lines(plan);
    EXPECT_EQ(lines["worker 0 parameters host"], kHalf * 2);
    EXPECT_EQ(lines.count("worker 0 parameters gpu"), 0u);
  }
  EXPECT_EQ(Plan(R"("stage": 2, "offload_param": {"device": "cpu"})").config.parameter_tier(),
            model::v1::TIER_GPU)
      << "of stage 3 only";
}

TEST(PlannerGpu, OffloadedParametersRestOnTheDrives) {
  for (const std::string optimizer : {"none", "cpu", "nvme"}) {
    const JobPlan plan =
        Plan(absl::StrCat(R"("stage": 3, "offload_param": {"device": "nvme", "max_in_cpu": 0}, )",
                          R"("offload_optimizer": {"device": ")", optimizer, R"("})"));
    EXPECT_EQ(plan.config.parameter_tier(), model::v1::TIER_NVME);
    EXPECT_EQ(plan.config.window(), model::v1::WINDOW_COPY);
    auto lines = Lines(plan);
    EXPECT_EQ(lines["worker 0 parameters nvme"], kHalf * 2);
    EXPECT_EQ(lines.count("worker 0 parameters gpu") + lines.count("worker 0 parameters host"), 0u);
    EXPECT_EQ(lines.count("worker 0 master nvme"), optimizer == "nvme" ? 1u : 0u);
    // Two images of what can be there at all, and spares.
    const uint64_t there = 2 * kHalf * (optimizer == "nvme" ? 14 : 2);
    EXPECT_GE(plan.nvme_total(), 2 * there);
    EXPECT_LT(plan.nvme_total(), 3 * there + (uint64_t{4} << 20));
    const uint64_t ring = ParameterRingBytes(plan.layout.front(), plan.config);
    EXPECT_GE(ring, kHalf * 2);
    EXPECT_GE(lines["rank 0 window host"], ring);
    // What is on a device has its parameters, too, made there for the drives.
    EXPECT_GT(plan.gpus[0].ring, 0u);
  }
}

TEST(PlannerGpu, ParametersOnDrivesOfSeveralDaemonsAreRefused) {
  absl::StatusOr<PlanInput> input = Input(R"("stage": 3, "offload_param": {"device": "nvme"})");
  ASSERT_TRUE(input.ok()) << input.status();
  input->nodes = 2;
  input->world_size = 4;
  EXPECT_THAT(std::string(PlanJob(*input).status().message()),
              AllOf(HasSubstr("spans 2 daemons"), HasSubstr("offload_param")));
}

TEST(PlannerGpu, MirrorsAreHostMemoryAndProtectWhatTheGpuHolds) {
  const JobPlan without = Plan(R"("stage": 3)");
  const JobPlan plan = Plan(R"("stage": 3)", R"("zeroshard": {"gpu_mirror_steps": 10}, )");
  EXPECT_EQ(plan.config.gpu_mirror_steps(), 10u);
  auto lines = Lines(plan);
  const uint64_t mirror = lines["worker 0 mirror host"];
  EXPECT_GE(mirror, 2 * kHalf * (3 * 4 + 2)) << "master, two states, parameters; twice";
  EXPECT_EQ(plan.memory_bytes() - without.memory_bytes(), 2 * mirror) << "of two workers";
  EXPECT_EQ(Lines(without).count("worker 0 mirror host"), 0u);
  ASSERT_FALSE(plan.warnings.empty());
  EXPECT_THAT(plan.warnings.back(),
              HasSubstr("goes back to its last mirror in host memory, taken every 10 steps"));
}

TEST(PlannerGpu, MirrorsOfStatesOnNvmeAreRefused) {
  const auto input = Input(R"("stage": 3, "offload_optimizer": {"device": "nvme"})",
                           R"("zeroshard": {"gpu_mirror_steps": 1}, )");
  EXPECT_THAT(std::string(input.status().message()),
              AllOf(HasSubstr("zeroshard.gpu_mirror_steps"), HasSubstr("on nvme")));
}

TEST(PlannerGpu, APartOfTheStatesIsOffloaded) {
  auto lines = Lines(Plan(R"("stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5})"));
  EXPECT_EQ(lines["worker 0 exp_avg host"], kHalf * 4 / 2);
  EXPECT_EQ(lines["worker 0 exp_avg gpu"], kHalf * 4 / 2);
}

TEST(PlannerGpu, StatesOnNvmeLeaveTheRestOnTheGpu) {
  const JobPlan plan = Plan(R"("stage": 3, "offload_optimizer": {"device": "nvme", "ratio": 0.5})");
  EXPECT_EQ(plan.config.optimizer_tier(), model::v1::TIER_NVME);
  EXPECT_EQ(plan.nvme_paths.size(), 1u);
  auto lines = Lines(plan);
  EXPECT_EQ(lines["worker 0 exp_avg nvme"], kHalf * 4 / 2);
  EXPECT_EQ(lines["worker 0 exp_avg gpu"], kHalf * 4 / 2);
  EXPECT_EQ(lines.count("worker 0 exp_avg host"), 0u);
}

TEST(PlannerGpu, StatesOnNvmeCanSurviveTheLossOfPower) {
  const JobPlan plan = Plan(R"("stage": 3, "offload_optimizer": {"device": "nvme"})",
                            R"("zeroshard": {"durability": "power"}, )");
  EXPECT_EQ(plan.config.nvme().durability(), model::v1::DURABILITY_POWER);
  ASSERT_FALSE(plan.warnings.empty());
  EXPECT_THAT(plan.warnings.back(), HasSubstr("goes on from the last committed step"));
}

TEST(PlannerGpu, Stage0IsCarriedOutAsStage2) {
  const JobPlan plan = Plan(R"("stage": 0, "offload_optimizer": {"device": "cpu"})");
  EXPECT_EQ(plan.config.stage(), 2u);
  EXPECT_EQ(plan.config.optimizer_tier(), model::v1::TIER_GPU) << "nothing is offloaded at stage 0";
  EXPECT_THAT(absl::StrJoin(plan.warnings, "\n"),
              AllOf(HasSubstr("zero_optimization.stage is 0"), HasSubstr("carried out as 2")));
}

TEST(PlannerGpu, ARatioOf0OffloadsNothing) {
  const JobPlan plan = Plan(R"("stage": 3, "offload_optimizer": {"device": "nvme", "ratio": 0.0})");
  EXPECT_EQ(plan.config.optimizer_tier(), model::v1::TIER_GPU);
  EXPECT_TRUE(plan.nvme_paths.empty());
  Lines(plan);
}

TEST(PlannerGpu, EightBitStatesCountTheirScalesWhereTheyRest) {
  auto lines = Lines(Plan(R"("stage": 3)", R"("zeroshard": {"optimizer_states": "int8"}, )"));
  EXPECT_EQ(lines["worker 0 exp_avg gpu"], kHalf);
  EXPECT_EQ(lines["worker 0 scales gpu"], kHalf / 256 * 2 * 4);
}

TEST(PlannerGpu, WithoutAMasterParametersAreThereOnceMore) {
  auto lines = Lines(Plan(R"("stage": 3)", R"("zeroshard": {"master": "none"}, )"));
  EXPECT_EQ(lines["worker 0 master gpu"], kHalf * 2);
  EXPECT_EQ(lines["worker 0 parameters gpu"], kHalf * 2);
}

TEST(PlannerGpu, StagesOneAndTwoKeepAllParametersInEveryTrainer) {
  const JobPlan plan = Plan(R"("stage": 1)", R"("gradient_accumulation_steps": 2, )");
  const TrainerGpuBytes own = TrainerGpuBytesOf(plan.layout.front(), plan.config);
  EXPECT_GE(own.parameters, 512u * 512 * 2);
  EXPECT_GE(own.gradients, 512u * 512 * 4) << "with the sum over micro-steps";
  Lines(plan);
}

TEST(PlannerGpu, AMovedUnitIsCountedWhereItGoes) {
  const JobPlan plan = Plan(R"("stage": 3)");
  const absl::StatusOr<JobPlan> moved = MovedPlan(plan, model::v1::TIER_HOST, {0});
  ASSERT_TRUE(moved.ok()) << moved.status();
  auto lines = Lines(*moved);
  EXPECT_EQ(lines["worker 0 exp_avg host"], kHalf * 4);
  EXPECT_GT(moved->memory_bytes(), plan.memory_bytes());
  EXPECT_EQ(plan.gpus[0].home, kHalf * 3 * 4);
  EXPECT_EQ(moved->gpus[0].home, 0u);
  const absl::StatusOr<JobPlan> back = MovedPlan(*moved, model::v1::TIER_GPU, {0});
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->memory_bytes(), plan.memory_bytes());
}

TEST(PlannerGpu, AForwardOnlyJobHasParametersAlone) {
  absl::StatusOr<PlanInput> input = Input(R"("stage": 3)");
  ASSERT_TRUE(input.ok());
  input->forward_only = true;
  const absl::StatusOr<JobPlan> plan = PlanJob(*input);
  ASSERT_TRUE(plan.ok()) << plan.status();
  auto lines = Lines(*plan);
  EXPECT_EQ(lines["worker 0 parameters gpu"], kHalf * 2);
  EXPECT_EQ(lines.count("worker 0 gradients gpu"), 0u);
}

TEST(PlannerGpu, WhatProtectsTheStatesIsSaid) {
  const auto warnings = [](const JobPlan& plan) { return absl::StrJoin(plan.warnings, "\n"); };
  EXPECT_THAT(
      warnings(Plan(R"("stage": 3)")),
      AllOf(HasSubstr("survive the death of trainers and workers"), HasSubstr("lost with a GPU")));
  EXPECT_THAT(warnings(Plan(R"("stage": 3, "offload_optimizer": {"device": "cpu"})")),
              HasSubstr("parameters and gradients in GPU memory survive"));
}

TEST(PlannerGpu, MoreRanksThanGpusAreRefused) {
  absl::StatusOr<PlanInput> input = Input(R"("stage": 3)");
  ASSERT_TRUE(input.ok());
  input->world_size = input->local_ranks = 3;
  EXPECT_THAT(std::string(PlanJob(*input).status().message()),
              HasSubstr("has 3 ranks and the daemon 2 GPUs"));
}

TEST(PlannerGpu, FewerRanksThanGpusHaveAsManyWorkers) {
  absl::StatusOr<PlanInput> input = Input(R"("stage": 3)");
  ASSERT_TRUE(input.ok());
  input->world_size = input->local_ranks = 1;
  const absl::StatusOr<JobPlan> plan = PlanJob(*input);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->workers.size(), 1u);
  EXPECT_EQ(plan->placement.workers, 1u);
}

TEST(PlannerGpu, EachOfSeveralDaemonsHasAWorkerForEachOfItsRanks) {
  absl::StatusOr<PlanInput> input = Input(R"("stage": 3)");
  ASSERT_TRUE(input.ok());
  input->node = 1;
  input->nodes = 2;
  input->world_size = 4;
  const absl::StatusOr<JobPlan> plan = PlanJob(*input);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->workers.size(), 4u);
  EXPECT_EQ(plan->gpus.size(), 2u);
  EXPECT_EQ(plan->islands, 4u);
  for (uint32_t r = 0; r < 4; ++r) EXPECT_EQ(plan->ranks[r].home_worker(), r);
  input->world_size = 6;
  input->local_ranks = 3;
  EXPECT_THAT(std::string(PlanJob(*input).status().message()),
              HasSubstr("has 3 ranks here and the daemon 2 GPUs"));
}

TEST(PlannerGpu, EachOfSeveralDaemonsHasTheMirrorsOfItsWorkers) {
  absl::StatusOr<PlanInput> input =
      Input(R"("stage": 3)", R"("zeroshard": {"gpu_mirror_steps": 2}, )");
  ASSERT_TRUE(input.ok());
  input->nodes = 2;
  input->node = 1;
  input->world_size = 4;
  input->local_ranks = 2;
  const absl::StatusOr<JobPlan> plan = PlanJob(*input);
  ASSERT_TRUE(plan.ok()) << plan.status();
  std::vector<uint32_t> workers;
  for (const RegionPlan& region : plan->regions) {
    if (region.kind == internal::v1::WorkerRegion::KIND_DEVICE_MIRROR) {
      workers.push_back(region.index);
    }
  }
  EXPECT_THAT(workers, ElementsAre(2, 3));
}

struct Refusal {
  const char* zero;
  const char* more;
  const char* key;
  const char* reason;
};

class PlannerGpuRefuses : public ::testing::TestWithParam<Refusal> {};

TEST_P(PlannerGpuRefuses, WithKeyAndReason) {
  const absl::StatusOr<PlanInput> input = Input(GetParam().zero, GetParam().more);
  ASSERT_FALSE(input.ok());
  EXPECT_THAT(std::string(input.status().message()),
              AllOf(HasSubstr(GetParam().key), HasSubstr(GetParam().reason)));
}

INSTANTIATE_TEST_SUITE_P(
    All, PlannerGpuRefuses,
    ::testing::Values(Refusal{R"("stage": 3, "offload_param": {"device": "nvme"})",
                              R"("zeroshard": {"gpu_mirror_steps": 2}, )",
                              "zeroshard.gpu_mirror_steps", "parameters are on nvme"},
                      Refusal{R"("stage": 3)", R"("zeroshard": {"window": "in_place"}, )",
                              "zeroshard.window", "memory of their own"},
                      Refusal{R"("stage": 3)", R"("zeroshard": {"transport": "gloo"}, )",
                              "zeroshard.transport", "NCCL"},
                      Refusal{R"("stage": 3)", R"("zeroshard": {"durability": "power"}, )",
                              "zeroshard.durability", "lost with the power"},
                      Refusal{
                          R"("stage": 3, "offload_optimizer": {"device": "nvme", "ratio": 0.5})",
                          R"("zeroshard": {"durability": "power"}, )", "zeroshard.durability",
                          "a part of the states is in memory"}));

TEST(PlannerGpu, WhatHasNoEffectOnGpusIsNamed) {
  const absl::StatusOr<PlanInput> input =
      Input(R"("stage": 3, "offload_optimizer": {"device": "cpu", "nvme_path": "/a"})");
  ASSERT_TRUE(input.ok()) << input.status();
  EXPECT_THAT(absl::StrJoin(input->config.warnings, "\n"),
              AllOf(HasSubstr("offload_optimizer.nvme_path"), HasSubstr("from its start")));
}

}  // namespace
}  // namespace zeroshard
