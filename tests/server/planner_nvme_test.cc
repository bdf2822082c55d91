// The plan and the ledger of jobs with an NVMe tier, against numbers worked out by hand.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/planner.h"
#include "tests/server/plan_fixture.h"

namespace zeroshard {
namespace {

using internal::v1::WorkerRegion;
using ::testing::HasSubstr;

PlanInput Input(int stage, const std::string& zero, const std::string& more = "") {
  const auto config =
      ParseDsConfig(absl::StrCat(R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "aio": {"queue_depth": 4}, )",
                                 more, R"("zero_optimization": {"stage": )", stage,
                                 R"(, "stage3_param_persistence_threshold": 0, )", zero, "}}"));
  EXPECT_TRUE(config.ok()) << config.status();
  return TwoWorkers(config.ok() ? *config : DsConfig(), {"cpu:0", "cpu:1"});
}

constexpr const char* kStatesOnNvme =
    R"("offload_optimizer": {"device": "nvme", "buffer_count": 3, "pin_memory": false})";

const RegionPlan& Region(const JobPlan& plan, WorkerRegion::Kind kind, uint32_t index) {
  for (const RegionPlan& region : plan.regions) {
    if (region.kind == kind && region.index == index) return region;
  }
  ADD_FAILURE() << "no region " << kind << " " << index;
  return plan.regions.front();
}

// Header and three arrays of 65,536 fp32.
constexpr uint64_t kImage = 4096 + uint64_t{3} * 262144;

TEST(PlannerNvme, StatesLieOnTheTierInSlotsAndTakeNoMemory) {
  const JobPlan plan = Plan(Input(2, kStatesOnNvme));
  auto lines = Lines(plan);
  for (const char* state : {"master", "exp_avg", "exp_avg_sq"}) {
    EXPECT_EQ(lines[absl::StrCat("worker 1 ", state, " nvme")], 131072u * 4) << state;
    EXPECT_EQ(lines[absl::StrCat("worker 1 ", state, " host")], 0u) << state;
  }
  // Two home slots for each of two chunks, and the four spares that a path has.
  constexpr uint64_t kFile = 4096 + 8 * kImage;
  EXPECT_EQ(plan.nvme_bytes, std::vector<uint64_t>({2 * kFile}));
  EXPECT_EQ(lines["worker 0 slots nvme"], kFile - 3 * 131072u * 4);
  const RegionPlan& partition = Region(plan, WorkerRegion::KIND_PARTITION, 0);
  EXPECT_EQ(partition.bytes - partition.memory, 3 * 131072u * 4);
  EXPECT_EQ(lines["worker 0 gradients host"], 131072u * 4);
  EXPECT_EQ(lines["worker 0 slot table host"],
            Region(plan, WorkerRegion::KIND_SLOT_TABLE, 0).memory);
}

TEST(PlannerNvme, StagingIsBufferCountTimesQueueDepthImagesUnlessThereAreFewer) {
  PlanInput input = Input(2, kStatesOnNvme);
  EXPECT_EQ(Lines(Plan(input))["worker 0 staging host"], 2 * kImage);
  input.manifest.mutable_parameters(0)->set_shape(0, 16384);  // 64 chunks a worker
  const JobPlan plan = Plan(input);
  EXPECT_EQ(Lines(plan)["worker 0 staging host"], 3 * 4 * kImage);
  EXPECT_EQ(plan.staging_bytes, 2 * 3 * 4 * kImage);
  input.lanes = 16;
  EXPECT_EQ(Lines(Plan(input))["worker 0 staging host"], (2 * 16 + 2) * kImage);
}

TEST(PlannerNvme, APartOfTheStatesIsWholeChunks) {
  const JobPlan plan = Plan(
      Input(3, R"("offload_optimizer": {"device": "nvme", "ratio": 0.5, "pin_memory": false})"));
  auto lines = Lines(plan);
  EXPECT_EQ(lines["worker 0 master nvme"], 65536u * 4);
  EXPECT_EQ(lines["worker 0 master host"], 65536u * 4);
  for (const auto& line : plan.ledger) {
    if (line.state() != "exp_avg") continue;
    EXPECT_EQ(line.formula_bytes(), line.bytes()) << line.tier();
    EXPECT_EQ(line.formula(), "4P/N");
  }
}

TEST(PlannerNvme, StatesThatMayBeMovedHaveRoomOnBothTiers) {
  const JobPlan plan = Plan(Input(
      1, R"("offload_optimizer": {"device": "cpu", "nvme_path": "/a", "pin_memory": false})"));
  auto lines = Lines(plan);
  EXPECT_EQ(lines["worker 0 master nvme"], 0u);
  EXPECT_EQ(lines["worker 0 master host"], 131072u * 4);
  EXPECT_EQ(lines["worker 0 slots nvme"], 4096 + 8 * kImage);
  const RegionPlan& partition = Region(plan, WorkerRegion::KIND_PARTITION, 0);
  EXPECT_EQ(partition.bytes, partition.memory);
}

TEST(PlannerNvme, ParametersLieThereInImagesOfTheirOwn) {
  const JobPlan plan =
      Plan(Input(3, R"("offload_param": {"device": "nvme", "max_in_cpu": 0, "pin_memory": false},
      "offload_optimizer": {"device": "nvme", "pin_memory": false})"));
  auto lines = Lines(plan);
  EXPECT_EQ(lines["worker 0 parameters nvme"], 131072u * 2);
  EXPECT_EQ(lines["worker 0 parameters host"], 0u);
  const RegionPlan& partition = Region(plan, WorkerRegion::KIND_PARTITION, 0);
  EXPECT_EQ(partition.bytes - partition.memory, 131072u * (3 * 4 + 2));
}

TEST(PlannerNvme, PagesThatStatesShareStayAndArePadding) {
  PlanInput input = Input(2, kStatesOnNvme);
  input.manifest.mutable_parameters(0)->set_shape(0, 1);
  input.manifest.mutable_parameters(0)->set_shape(1, 1000);  // arrays of half a page
  const JobPlan plan = Plan(input);
  auto lines = Lines(plan);
  const RegionPlan& partition = Region(plan, WorkerRegion::KIND_PARTITION, 1);
  EXPECT_EQ(partition.bytes, partition.memory);
  EXPECT_EQ(lines["worker 1 master nvme"], 488u * 4);
  EXPECT_EQ(lines["worker 1 padding host"], 3u * 512 * 4 + 24 * 4);
}

TEST(PlannerNvme, AWorkerWithoutAnythingHasAPlanToo) {
  PlanInput input = Input(3, kStatesOnNvme);
  input.manifest.mutable_parameters(0)->set_shape(0, 1);
  input.manifest.mutable_parameters(0)->set_shape(1, 3);
  const JobPlan plan = Plan(input);
  auto lines = Lines(plan);
  EXPECT_EQ(std::min(lines["worker 0 slots nvme"], lines["worker 1 slots nvme"]), 4096u);
  EXPECT_EQ(lines["worker 0 master nvme"] + lines["worker 1 master nvme"], 12u);
}

TEST(PlannerNvme, PathsShareTheBytesByWeight) {
  PlanInput input = Input(2, kStatesOnNvme, R"("zeroshard": {"nvme_spares": 1}, )");
  input.nvme_paths = {{.path = "/a", .weight = 3}, {.path = "/b", .weight = 1}};
  input.manifest.mutable_parameters(0)->set_shape(0, 1024);  // four chunks a worker
  const JobPlan plan = Plan(input);
  Lines(plan);
  EXPECT_EQ(plan.nvme_bytes, std::vector<uint64_t>({2 * (4096 + 7 * kImage),  //
                                                    2 * (4096 + 3 * kImage)}));
}

TEST(PlannerNvme, WithoutATierThereIsNothingOfIt) {
  const JobPlan plan = Plan(Input(2, R"("offload_optimizer": {"device": "cpu"})"));
  EXPECT_TRUE(plan.nvme_paths.empty());
  EXPECT_EQ(plan.nvme_total(), 0u);
  EXPECT_EQ(plan.staging_bytes, 0u);
  for (const auto& line : plan.ledger) EXPECT_EQ(line.tier(), "host");
}

TEST(PlannerNvme, AMoveChangesMemoryAndLedgerAndNothingElse) {
  PlanInput input = Input(2, kStatesOnNvme);
  *input.manifest.add_parameters() = input.manifest.parameters(0);
  input.manifest.mutable_parameters(1)->set_name("v");
  input.manifest.mutable_parameters(1)->set_module("v");
  const JobPlan plan = Plan(input);
  ASSERT_EQ(plan.layout.front().units().size(), 2u);
  const absl::StatusOr<JobPlan> moved = MovedPlan(plan, model::v1::TIER_HOST, {1});
  ASSERT_TRUE(moved.ok()) << moved.status();
  auto lines = Lines(*moved);
  EXPECT_EQ(lines["worker 0 master nvme"], 131072u * 4);
  EXPECT_EQ(lines["worker 0 master host"], 131072u * 4);
  EXPECT_EQ(moved->memory_bytes() - plan.memory_bytes(), 2 * 3 * 131072u * 4);
  EXPECT_EQ(moved->nvme_bytes, plan.nvme_bytes);
  EXPECT_EQ(moved->nvme_home, std::vector<uint64_t>(2, 3 * 131072u * 4));
  const absl::StatusOr<JobPlan> back = MovedPlan(*moved, model::v1::TIER_NVME, {0, 1});
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(Lines(*back), Lines(plan));
}

TEST(PlannerNvme, NeedsAPath) {
  PlanInput input = Input(2, kStatesOnNvme);
  input.nvme_paths.clear();
  const absl::StatusOr<JobPlan> plan = PlanJob(input);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("nvme_path"));
}

}  // namespace
}  // namespace zeroshard
