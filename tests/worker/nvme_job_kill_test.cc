// All workers of a job with states on the NVMe tier die at the same time, at every fault point of
// the tier and of the update, or anywhere: their successors end with the bits of a run on the host.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "tests/storage/nvme_fixture.h"
#include "tests/worker/state_forms.h"

namespace zeroshard {
namespace {

constexpr uint32_t kSteps = 4;
constexpr char kRebuild[] = "worker.tier.rebuild.before_forget";

const StateForm& Form() { return AllStateForms()[0]; }

const std::string& Expected() {
  static const std::string expected = [] {
    const auto job = StartStateJob(Form(), {});
    TrainSteps(*job, 0, kSteps);
    return job->StateBytes();
  }();
  return expected;
}

struct Tier {
  const char* name;
  StateVariant variant;
  model::v1::Durability durability = model::v1::DURABILITY_PROCESS;
};

const Tier kTiers[] = {
    {"half_of_the_states", {.stage = 2, .workers = 2, .ratio = 0.5}},
    {"states_and_parameters", {.stage = 3, .workers = 2, .copy = true, .parameters = true}},
    {"islands", {.stage = 3, .workers = 2, .islands = true, .parameters = true}},
    {"power", {.stage = 2, .workers = 2}, model::v1::DURABILITY_POWER},
};

class NvmeJobKillTest : public ::testing::TestWithParam<Tier> {
 protected:
  std::unique_ptr<LocalJob> Start(const DiskDir& directory) {
    StateVariant v = GetParam().variant;
    v.nvme_paths = {directory.path()};
    v.durability = GetParam().durability;
    return StartStateJob(Form(), v);
  }

  // All states that are on the tier leave it, or come back.
  void Move(LocalJob& job, model::v1::Tier to) {
    internal::v1::MoveStates command;
    command.set_to(to);
    for (uint32_t w = 0; w < GetParam().variant.workers; ++w) job.engine(w).OnMove(command);
  }

  // Trains with a child that dies in every step; returns how many did.
  int TrainWithDeaths(LocalJob& job, const std::string& faults,
                      absl::Duration longest = absl::InfiniteDuration()) {
    int deaths = 0;
    for (uint32_t step = 0; step < kSteps; ++step) {
      // With durability `power` states stay where they are.
      if (GetParam().durability == model::v1::DURABILITY_PROCESS) {
        Move(job, step % 2 == 0 ? model::v1::TIER_HOST : model::v1::TIER_NVME);
      }
      ScatterStep(job, step);
      for (uint32_t rank = 0; rank < kStateRanks; ++rank) job.Step(rank, 1, 0.01);
      absl::Duration delay = longest;
      if (delay != absl::InfiniteDuration()) delay *= static_cast<double>(random_() % 1000) / 1000;
      deaths += job.RunInChild(faults, delay) ? 1 : 0;
      job.Run();
      EXPECT_EQ(job.result(0).step, step + 1) << faults;
    }
    return deaths;
  }

  std::mt19937_64 random_{11};
};

TEST_P(NvmeJobKillTest, AtEveryFaultPoint) {
  if (FaultPointNames().empty()) GTEST_SKIP() << "needs --config=faults";
  for (const std::string& point : FaultPointNames()) {
    const bool tier = absl::StartsWith(point, "worker.tier.");
    if (!tier && !absl::StartsWith(point, "worker.apply.")) continue;
    // Only a fresh start comes to these (tier_kill_test), and to the third only damage (below).
    if (point == "worker.tier.creating" || point == "worker.tier.before_format") continue;
    if (point == kRebuild) continue;
    int deaths = 0;
    for (const int hit : {1, 4, 13}) {
      const DiskDir directory("/dev/shm");
      const auto job = Start(directory);
      deaths += TrainWithDeaths(*job, absl::StrCat(point, "=kill:", hit));
      ASSERT_TRUE(job->StateBytes() == Expected()) << point << " hit " << hit;
    }
    const bool power_alone =
        point == "worker.tier.after_flush" || point == "worker.tier.after_prepare";
    const bool moving_alone =
        point == "worker.tier.move" || point == "worker.tier.promote.before_forget" ||
        point == "worker.tier.before_forget" || point == "worker.tier.demote.before_punch";
    const bool on_host_alone = point == "worker.apply.group";
    const bool power = GetParam().durability == model::v1::DURABILITY_POWER;
    const bool comes_there = power ? !moving_alone && !on_host_alone : !power_alone;
    EXPECT_EQ(deaths > 0, comes_there) << point;
  }
}

TEST_P(NvmeJobKillTest, Anywhere) {
  int deaths = 0;
  for (int round = 0; round < 8; ++round) {
    const DiskDir directory;
    const auto job = Start(directory);
    deaths += TrainWithDeaths(*job, "", absl::Milliseconds(60));
    ASSERT_TRUE(job->StateBytes() == Expected()) << "round " << round;
  }
  EXPECT_GT(deaths, 0);
}

INSTANTIATE_TEST_SUITE_P(Tiers, NvmeJobKillTest, ::testing::ValuesIn(kTiers),
                         [](const auto& info) { return std::string(info.param.name); });

class NvmeParametersKillTest : public NvmeJobKillTest {};

// In the middle of a gather; successors find some images made anew, one of which the predecessor
// had filled but not forgotten, and others damaged still.
TEST_P(NvmeParametersKillTest, WhileDamagedOnesAreMadeAnew) {
  if (FaultPointNames().empty()) GTEST_SKIP() << "needs --config=faults";
  const uint32_t islands = GetParam().variant.islands ? GetParam().variant.workers : 1;
  for (const int hit : {1, 3, 0}) {
    const DiskDir directory("/dev/shm");
    const auto job = Start(directory);
    TrainSteps(*job, 0, 2);
    ASSERT_GT(DamageParameters(*job, 1, directory.path(), ~size_t{0}), 3u);
    std::vector<uint64_t> gathers;
    for (uint32_t rank = 0; rank < kStateRanks; ++rank) gathers.push_back(GatherAll(*job, rank));
    if (hit != 0) {
      EXPECT_TRUE(job->RunInChild(absl::StrCat(kRebuild, "=kill:", hit))) << hit;
    }
    job->Run();
    for (uint32_t rank = 0; rank < kStateRanks; ++rank) {
      EXPECT_TRUE(job->Done(rank, gathers[rank])) << hit;
    }
    static const std::vector<float> expected = [] {
      const auto whole = StartStateJob(Form(), {});
      TrainSteps(*whole, 0, 2);
      return WindowOf(*whole, 0);
    }();
    for (uint32_t island = 0; island < islands; ++island) {
      EXPECT_TRUE(WindowOf(*job, island) == expected) << hit << " island " << island;
    }
    TrainSteps(*job, 2, kSteps);
    EXPECT_TRUE(job->StateBytes() == Expected()) << hit;
  }
}

INSTANTIATE_TEST_SUITE_P(Tiers, NvmeParametersKillTest, ::testing::Values(kTiers[1], kTiers[2]),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace zeroshard
