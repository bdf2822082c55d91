// The ledger, against numbers worked out by hand.
#include "server/planner.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/partition.h"
#include "tests/server/plan_fixture.h"

namespace zeroshard {
namespace {

using internal::v1::WorkerRegion;
using ::testing::HasSubstr;

// One bf16 parameter of 1,000 elements: 4 grains, of which the last has 232 elements and 24 of
// padding. Its master is fp32.
PlanInput Input(int stage, uint32_t workers, uint32_t ranks) {
  PlanInput input;
  const auto config =
      ParseDsConfig(absl::StrCat(R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},
        "zero_optimization": {"stage": )",
                                 stage, R"(, "stage3_param_persistence_threshold": 0}})"));
  EXPECT_TRUE(config.ok()) << config.status();
  input.config = *config;
  EXPECT_EQ(input.config.master_form, MasterForm::kSplit) << "what a bf16 job gets";
  input.config.master_form = MasterForm::kFloat32;
  AddParameter(input.manifest, "w", {10, 100}, model::v1::DTYPE_BFLOAT16);
  input.manifest.add_groups();
  input.world_size = ranks;
  input.local_ranks = ranks;
  for (uint32_t w = 0; w < workers; ++w) input.devices.push_back(absl::StrCat("cpu:", w));
  return input;
}

// Bytes by "holder state", and the formula's share of each.
struct Sums {
  explicit Sums(const JobPlan& plan) {
    for (const auto& line : plan.ledger) {
      const std::string key = line.holder() + " " + line.state();
      bytes[key] += line.bytes();
      formula[key] = line.formula();
      formula_bytes[key] += line.formula_bytes();
      all += line.bytes();
    }
  }
  std::map<std::string, uint64_t> bytes, formula_bytes;
  std::map<std::string, std::string> formula;
  uint64_t all = 0;
};

TEST(Planner, Stage3SplitsEveryKindOfStateOverTheWorkers) {
  const JobPlan plan = Plan(Input(3, 2, 2));
  Sums sums(plan);
  // Grains 0 and 1 belong to worker 0: 512 elements; 2 and 3 to worker 1: 488 elements and 24 of
  // padding.
  EXPECT_EQ(sums.bytes["worker 0 parameters"], 512u * 2);
  EXPECT_EQ(sums.bytes["worker 1 parameters"], 488u * 2);
  EXPECT_EQ(sums.bytes["worker 0 gradients"], 512u * 4);
  EXPECT_EQ(sums.bytes["worker 1 master"], 488u * 4);
  EXPECT_EQ(sums.bytes["worker 1 exp_avg"], 488u * 4);
  EXPECT_EQ(sums.bytes["worker 1 exp_avg_sq"], 488u * 4);
  EXPECT_EQ(sums.bytes["worker 0 padding"], 0u);
  EXPECT_EQ(sums.bytes["worker 1 padding"], 24u * (2 + 4 + 4 + 4 + 4));
  EXPECT_EQ(sums.formula["worker 0 parameters"], "2P/N");
  EXPECT_EQ(sums.formula["worker 0 gradients"], "4P/N");
  EXPECT_EQ(sums.formula_bytes["worker 0 parameters"], 1000u);
  EXPECT_EQ(sums.formula_bytes["worker 0 gradients"], 2000u);
}

TEST(Planner, Stage3IsSixteenBytesAParameterWithSixteenBitGradients) {
  PlanInput input = Input(3, 2, 2);
  input.config.grad_accum_dtype = DType::kBfloat16;
  const JobPlan plan = Plan(input);
  uint64_t state = 0;
  for (const auto& line : plan.ledger) {
    if (!line.formula().empty()) state += line.bytes();
  }
  EXPECT_EQ(state, 16u * 1000);
}

TEST(Planner, EveryWorkerHoldsItsNthOfSixteenBytesAParameter) {
  // K = 12, G = 2, whole grains: 16P/N, and beside it only what has another name.
  for (const uint32_t workers : {1u, 2u, 4u, 8u}) {
    PlanInput input = Input(3, workers, 2);
    input.manifest.clear_parameters();
    AddParameter(input.manifest, "w", {64, 256}, model::v1::DTYPE_BFLOAT16);
    input.config.grad_accum_dtype = DType::kBfloat16;
    const JobPlan plan = Plan(input);
    std::map<std::string, uint64_t> states;
    for (const auto& line : plan.ledger) {
      if (line.formula().empty()) {
        EXPECT_THAT(line.state(), ::testing::AnyOf("records", "window", "padding"));
        continue;
      }
      EXPECT_EQ(line.bytes(), line.formula_bytes()) << line.holder() << " " << line.state();
      states[line.holder()] += line.bytes();
    }
    EXPECT_EQ(states.size(), workers);
    for (const auto& [holder, bytes] : states) {
      EXPECT_EQ(bytes, 16u * 64 * 256 / workers) << holder << " of " << workers;
    }
  }
}

TEST(Planner, WithASplitMasterExactGradientsAreSixteenBytesAParameter) {
  for (const auto& [accumulators, expected] :
       {std::pair{DType::kFloat32, 16u}, {DType::kBfloat16, 14u}}) {
    PlanInput input = Input(3, 2, 2);
    input.config.master_form = MasterForm::kSplit;
    input.config.grad_accum_dtype = accumulators;
    Sums sums(Plan(input));
    EXPECT_EQ(sums.bytes["worker 0 master, low halves"], 512u * 2);
    EXPECT_EQ(sums.formula["worker 1 master, low halves"], "2P/N");
    uint64_t state = 0;
    for (const auto& line : Plan(input).ledger) {
      if (!line.formula().empty()) state += line.bytes();
    }
    EXPECT_EQ(state, expected * 1000u);
  }
}

TEST(Planner, ScalesOfEightBitStatesHaveALineOfTheirOwn) {
  PlanInput input = Input(2, 2, 2);
  input.config.master_form = MasterForm::kSplit;
  input.config.state_format = StateFormat::kInt8;
  const JobPlan plan = Plan(input);
  Sums sums(plan);
  EXPECT_EQ(sums.bytes["worker 0 exp_avg"], 512u);
  EXPECT_EQ(sums.formula["worker 0 exp_avg_sq"], "1P/N");
  EXPECT_EQ(sums.bytes["worker 0 scales"], 2u * 2 * 4);  // two grains of two states
  EXPECT_EQ(sums.all, plan.memory_bytes());
}

TEST(Planner, ACopiedWindowIsBoundedByItsResidentAndLiveUnits) {
  PlanInput input = Input(3, 2, 2);
  input.manifest.clear_parameters();
  for (const char* name : {"a", "b", "c", "d"}) {
    AddParameter(input.manifest, name, {100, 200}, model::v1::DTYPE_BFLOAT16);
  }
  AddParameter(input.manifest, "bias", {100}, model::v1::DTYPE_BFLOAT16);
  input.config.zeroshard.window = WindowChoice::kCopy;
  input.config.zero.param_persistence_threshold = 100;
  input.config.zero.max_live_parameters = 30000;
  Sums sums(Plan(input));
  // 20,000 elements are 79 grains, 40,448 bytes: four units of 10 pages each and one page for the
  // bias. Live at a time: 30,000 elements of two bytes, and the bias.
  EXPECT_EQ(sums.bytes["node parameters, resident"], 200u);
  EXPECT_EQ(sums.bytes["node window"], (60000u + 4096 + 4095) / 4096 * 4096 - 200);
  input.config.zero.max_live_parameters = 1;  // the largest unit must still fit
  EXPECT_EQ(Sums(Plan(input)).bytes["node window"], (40448u + 4096 + 4095) / 4096 * 4096 - 200);
}

TEST(Planner, LinesAddUpToTheMemoryOfAllRegions) {
  for (const int stage : {0, 1, 2, 3}) {
    for (const uint32_t workers : {1u, 2u, 3u}) {
      for (const auto window : {WindowChoice::kAuto, WindowChoice::kCopy}) {
        PlanInput input = Input(stage, workers, 2);
        input.config.batch = {8, 1, 4};
        input.config.zeroshard.window = window;
        AddParameter(input.manifest, "odd", {7}, model::v1::DTYPE_BFLOAT16);
        AddParameter(input.manifest, "empty", {0, 4}, model::v1::DTYPE_FLOAT32);
        AddParameter(input.manifest, "frozen", {333}, model::v1::DTYPE_FLOAT32)
            ->set_trainable(false);
        const JobPlan plan = Plan(input);
        EXPECT_EQ(Sums(plan).all, plan.memory_bytes())
            << "stage " << stage << ", " << workers << " workers";
      }
    }
  }
}

TEST(Planner, StagesOneAndTwoHoldOneCopyOfTheParametersANode) {
  for (const int stage : {1, 2}) {
    Sums sums(Plan(Input(stage, 2, 2)));
    EXPECT_EQ(sums.bytes["node parameters"], 2000u);
    EXPECT_EQ(sums.formula["node parameters"], "2P");
    EXPECT_EQ(sums.bytes["worker 0 master"], 512u * 4);
  }
}

TEST(Planner, Stage0HoldsAllStatesOnEveryWorker) {
  Sums sums(Plan(Input(0, 2, 2)));
  for (const char* worker : {"worker 0", "worker 1"}) {
    EXPECT_EQ(sums.bytes[absl::StrCat(worker, " master")], 4000u);
    EXPECT_EQ(sums.bytes[absl::StrCat(worker, " gradients")], 4000u);
    EXPECT_EQ(sums.formula[absl::StrCat(worker, " master")], "4P");
  }
}

TEST(Planner, Stage1AccumulatesInEveryRankOnlyWhenThereIsMoreThanOneMicroStep) {
  EXPECT_EQ(Sums(Plan(Input(1, 2, 2))).bytes.count("rank 0 gradients"), 0u);
  PlanInput input = Input(1, 2, 2);
  input.config.batch = {8, 1, 4};
  Sums sums(Plan(input));
  EXPECT_EQ(sums.bytes["rank 0 gradients"], 4000u);
  EXPECT_EQ(sums.formula["rank 1 gradients"], "4P");
  input.config.zeroshard.reduction_order = ReductionOrder::kRanksFirst;
  EXPECT_EQ(Sums(Plan(input)).bytes.count("rank 0 gradients"), 0u);
}

TEST(Planner, AnFp32ParameterIsItsOwnMaster) {
  PlanInput input = Input(3, 1, 1);
  input.config.compute_dtype = DType::kFloat32;
  input.manifest.mutable_parameters(0)->set_dtype(model::v1::DTYPE_FLOAT32);
  Sums sums(Plan(input));
  EXPECT_EQ(sums.bytes.count("worker 0 master"), 0u);
  EXPECT_EQ(sums.bytes["worker 0 parameters"], 4000u);
}

TEST(Planner, FrozenParametersHaveNoOptimizerState) {
  PlanInput input = Input(3, 1, 1);
  input.manifest.mutable_parameters(0)->set_trainable(false);
  const JobPlan plan = Plan(input);
  Sums sums(plan);
  EXPECT_EQ(plan.config.optimizer(), model::v1::OPTIMIZER_NONE);
  EXPECT_EQ(sums.bytes.count("worker 0 master"), 0u);
  EXPECT_EQ(sums.bytes.count("worker 0 gradients"), 0u);
  EXPECT_EQ(sums.bytes["worker 0 parameters"], 2000u);
}

TEST(Planner, AForwardOnlyJobNeedsNoOptimizerAndNoBatch) {
  PlanInput input = Input(3, 2, 2);
  input.config.optimizer = OptimizerConfig();
  input.config.batch = BatchConfig();
  input.forward_only = true;
  Sums sums(Plan(input));
  EXPECT_EQ(sums.bytes.count("worker 0 master"), 0u);
  input.forward_only = false;
  input.config.batch.micro = 1;
  EXPECT_THAT(std::string(PlanJob(input).status().message()), HasSubstr("optimizer"));
}

TEST(Planner, WhereStatesCanBeOnNvmeASplitMasterIsHeldWhole) {
  PlanInput input = Input(3, 1, 1);
  input.config.master_form = MasterForm::kSplit;
  input.config.tiers.tiered = true;
  input.nvme_paths = {{.path = "/mnt/nvme0"}};
  const Sums sums(Plan(input));
  EXPECT_EQ(sums.bytes.at("worker 0 master"), 4000u);
  EXPECT_EQ(sums.formula.at("worker 0 master"), "4P/N");
  EXPECT_FALSE(sums.bytes.contains("worker 0 master, low halves"));
}

TEST(Planner, OffloadedStatesOfAJobWithoutAnyAreNamed) {
  PlanInput input = Input(3, 1, 1);
  input.config.tiers.tiered = true;
  input.config.tiers.optimizer = true;
  input.nvme_paths = {{.path = "/mnt/nvme0"}};
  EXPECT_TRUE(Plan(input).warnings.empty());
  input.forward_only = true;
  const JobPlan plan = Plan(input);
  ASSERT_EQ(plan.warnings.size(), 1u);
  EXPECT_THAT(plan.warnings.front(), HasSubstr("offload_optimizer has no effect"));
  EXPECT_FALSE(plan.config.tiered());
}

TEST(Planner, RanksAreServedByTheWorkersInTurn) {
  const JobPlan plan = Plan(Input(3, 2, 3));
  EXPECT_EQ(plan.ranks[0].home_worker(), 0u);
  EXPECT_EQ(plan.ranks[1].home_worker(), 1u);
  EXPECT_EQ(plan.ranks[2].home_worker(), 0u);
  EXPECT_EQ(plan.islands, 1u);
  int windows = 0;
  for (const RegionPlan& region : plan.regions) {
    windows += region.kind == WorkerRegion::KIND_PARAMETER_WINDOW ? 1 : 0;
  }
  EXPECT_EQ(windows, 1);
}

TEST(Planner, OverGlooEveryWorkerIsAnIslandAndCopies) {
  PlanInput input = Input(3, 2, 2);
  input.config.zeroshard.transport = TransportChoice::kGloo;
  const JobPlan plan = Plan(input);
  EXPECT_EQ(plan.islands, 2u);
  EXPECT_EQ(plan.config.window(), model::v1::WINDOW_COPY);
  EXPECT_EQ(Sums(plan).all, plan.memory_bytes());
  input.config.zeroshard.window = WindowChoice::kInPlace;
  EXPECT_THAT(std::string(PlanJob(input).status().message()), HasSubstr("zeroshard.window"));
}

// Both nodes plan the same job; each makes its own half.
TEST(Planner, AJobThatSpansDaemonsIsDividedByNodes) {
  PlanInput input = Input(3, 2, 4);
  input.local_ranks = 2;
  input.nodes = 2;
  const JobPlan first = Plan(input);
  input.node = 1;
  const JobPlan second = Plan(input);
  EXPECT_EQ(first.config.SerializeAsString(), second.config.SerializeAsString());
  EXPECT_EQ(first.layout.front().fingerprint(), second.layout.front().fingerprint());
  EXPECT_EQ(first.config.transport(), model::v1::TRANSPORT_GLOO);
  EXPECT_EQ(first.config.reduction_group(), 2u);
  ASSERT_EQ(second.workers.size(), 4u);
  EXPECT_EQ(second.board.workers, 4u);
  EXPECT_EQ(second.ranks[0].home_worker(), 0u);
  EXPECT_EQ(second.ranks[3].home_worker(), 3u);
  EXPECT_EQ(second.ranks[3].island(), 3u);
  std::set<std::pair<int, uint32_t>> seen;
  for (const JobPlan* plan : {&first, &second}) {
    for (const RegionPlan& region : plan->regions) {
      EXPECT_TRUE(seen.insert({region.kind, region.index}).second) << region.index;
      const bool by_rank = region.kind == WorkerRegion::KIND_GRADIENT_WINDOW ||
                           region.kind == WorkerRegion::KIND_RANK_PAGE;
      const Placement& placement = plan->placement;
      EXPECT_TRUE(by_rank ? placement.has_rank(region.index) : placement.has_worker(region.index));
    }
    EXPECT_EQ(Sums(*plan).all, plan->memory_bytes());
  }
  const JobPlan whole = [&] {
    PlanInput one = Input(3, 4, 4);
    one.config.zeroshard.transport = TransportChoice::kGloo;
    return Plan(one);
  }();
  EXPECT_EQ(first.memory_bytes() + second.memory_bytes(), whole.memory_bytes());
}

TEST(Planner, SharedMemoryBetweenDaemonsIsWarnedOfAndAnInPlaceWindowRefused) {
  PlanInput input = Input(3, 1, 2);
  input.nodes = 2;
  input.config.zeroshard.transport = TransportChoice::kShm;
  EXPECT_THAT(Plan(input).warnings, ::testing::Contains(HasSubstr("spans 2 daemons")));
  input.config.zeroshard.window = WindowChoice::kInPlace;
  const auto refused = PlanJob(input);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("the job spans daemons"));
}

TEST(Planner, ABatchThatDoesNotDivideIsRefused) {
  PlanInput input = Input(3, 1, 7);
  input.config.batch = {256, 2, 18};
  EXPECT_THAT(std::string(PlanJob(input).status().message()), HasSubstr("252"));
}

TEST(Planner, TheLossScaleOfFp16IsAPowerOfTwo) {
  PlanInput input = Input(3, 1, 1);
  input.config.compute_dtype = DType::kFloat16;
  input.config.loss_scale.enabled = true;
  input.manifest.mutable_parameters(0)->set_dtype(model::v1::DTYPE_FLOAT16);
  const JobPlan plan = Plan(input);
  EXPECT_EQ(plan.config.loss_scale().initial(), 65536.0);
  EXPECT_TRUE(plan.config.skip_on_overflow());
}

}  // namespace
}  // namespace zeroshard
