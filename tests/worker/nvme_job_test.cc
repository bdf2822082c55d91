// Jobs whose states are on the NVMe tier, whole or in part: every form of states at every stage
// ends with the bits of the same job on the host.
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/shared_memory.h"
#include "tests/storage/nvme_fixture.h"
#include "tests/worker/state_checkpoints.h"
#include "tests/worker/state_forms.h"

namespace zeroshard {
namespace {

constexpr uint32_t kSteps = 4;

std::string Trained(const StateForm& form, const StateVariant& v) {
  return TrainedStates(form, v, kSteps);
}

// Where states are.
struct Where {
  double ratio = 1;
  bool parameters = false;
};
constexpr Where kWhere[] = {{1, false}, {0.5, false}, {0, false}};
constexpr Where kWhereAtStage3[] = {{1, true}, {0.5, true}, {0, true}};

std::string Describe(const StateVariant& v) {
  return absl::StrCat("stage ", v.stage, " W ", v.workers, v.copy ? " copy" : "",
                      v.islands ? " islands" : "", " ratio ", v.ratio,
                      v.parameters ? " with parameters" : "");
}

// The bytes of states that the workers say to be on the tier, and that are still to be moved.
struct Held {
  uint64_t bytes = 0;
  uint64_t left = 0;
  uint64_t written = 0;
};
Held HeldBy(LocalJob& job, uint32_t workers) {
  Held held;
  for (uint32_t w = 0; w < workers; ++w) {
    const internal::v1::Stats stats = job.engine(w).Stats();
    held.bytes += stats.nvme_state_bytes();
    held.left += stats.move_left_bytes();
    for (const auto& path : stats.nvme_paths()) held.written += path.written_bytes();
  }
  return held;
}

const StateForm& FormOf(std::string_view name) {
  for (const StateForm& form : AllStateForms()) {
    if (form.name == name) return form;
  }
  ADD_FAILURE() << name;
  return AllStateForms().front();
}

class NvmeJobTest : public ::testing::TestWithParam<StateForm> {};

TEST_P(NvmeJobTest, EndsWithTheBitsOfTheHost) {
  const std::string expected = Trained(GetParam(), {});
  std::vector<StateVariant> variants;
  for (const Where& where : kWhere) {
    for (uint32_t stage : {0u, 1u, 2u, 3u}) {
      variants.push_back({.stage = stage, .workers = 1 + stage, .ratio = where.ratio});
    }
  }
  variants.push_back({.stage = 0, .workers = 3});
  variants.push_back({.stage = 0, .workers = 2, .islands = true});
  variants.push_back({.stage = 2, .workers = 3, .lanes = 2});
  variants.push_back({.stage = 1, .workers = 2, .islands = true});
  variants.push_back({.stage = 3, .workers = 2, .islands = true});
  for (const Where& where : kWhereAtStage3) {
    variants.push_back({.stage = 3,
                        .workers = 2,
                        .copy = true,
                        .ratio = where.ratio,
                        .parameters = where.parameters});
  }
  variants.push_back({.stage = 3, .workers = 3, .lanes = 2, .islands = true, .parameters = true});
  for (StateVariant& v : variants) {
    if (v.stage == 0 && GetParam().master == model::v1::MASTER_FORM_NONE) continue;
    const DiskDir first, second;
    v.nvme_paths = {first.path(), second.path()};
    ASSERT_TRUE(Trained(GetParam(), v) == expected) << Describe(v);
  }
}

void Move(LocalJob& job, uint32_t workers, model::v1::Tier to, std::vector<uint32_t> units = {}) {
  internal::v1::MoveStates command;
  command.set_to(to);
  command.mutable_units()->Add(units.begin(), units.end());
  for (uint32_t w = 0; w < workers; ++w) job.engine(w).OnMove(command);
}

// Between steps, in the middle of one, and with a worker that dies in the middle of the move.
TEST_P(NvmeJobTest, MovesWhileItTrains) {
  const std::string expected = Trained(GetParam(), {});
  const DiskDir directory;
  StateVariant v{.stage = 2, .workers = 2, .nvme_paths = {directory.path()}, .ratio = 0};
  const auto job = StartStateJob(GetParam(), v);
  EXPECT_EQ(HeldBy(*job, 2).bytes, 0u);
  TrainSteps(*job, 0, 1);
  Move(*job, 2, model::v1::TIER_NVME);
  const uint64_t all = HeldBy(*job, 2).left;
  EXPECT_GT(all, 0u);
  job->engine(0).MoveStates();
  job->RestartWorker(0);
  ScatterStep(*job, 1);
  job->engine(0).MoveStates();
  job->RunMoves();
  EXPECT_EQ(HeldBy(*job, 2).bytes, all);
  EXPECT_EQ(HeldBy(*job, 2).left, 0u);
  for (uint32_t rank = 0; rank < kStateRanks; ++rank) job->Reconnect(rank);
  for (uint32_t rank = 0; rank < kStateRanks; ++rank) job->Step(rank, 1, 0.01);
  job->Run();
  const auto units = static_cast<uint32_t>(job->layout().units().size());
  Move(*job, 2, model::v1::TIER_HOST, {units - 1});
  job->engine(1).MoveStates();
  TrainSteps(*job, 2, 3);
  job->RunMoves();
  EXPECT_LT(HeldBy(*job, 2).bytes, all);
  EXPECT_EQ(HeldBy(*job, 2).bytes > 0, units > 1);
  Move(*job, 2, model::v1::TIER_HOST);
  job->RunMoves();
  EXPECT_EQ(HeldBy(*job, 2).bytes, 0u);
  TrainSteps(*job, 3, kSteps);
  EXPECT_TRUE(job->StateBytes() == expected);
}

TEST_P(NvmeJobTest, CheckpointsGoFromAndToTheTier) {
  const auto whole = StartStateJob(GetParam(), {});
  TrainSteps(*whole, 0, kSteps);
  const DiskDir directory, other;
  const TempDir checkpoints;
  const StateVariant host{.stage = 2, .workers = 2};
  const StateVariant tiered{
      .stage = 1, .workers = 3, .nvme_paths = {directory.path()}, .ratio = 0.5};
  const StateVariant parameters{
      .stage = 3, .workers = 2, .copy = true, .nvme_paths = {other.path()}, .parameters = true};
  const auto first = StartStateJob(GetParam(), parameters);
  TrainSteps(*first, 0, 2);
  SaveState(*first, 2, checkpoints, "tier");
  const auto on_host = StartStateJob(GetParam(), host);
  ASSERT_EQ(RestoreState(*on_host, 2, checkpoints, "tier"), "");
  EXPECT_TRUE(on_host->StateBytes() == first->StateBytes());
  TrainSteps(*on_host, 2, 3);
  SaveState(*on_host, 2, checkpoints, "host");
  const auto next = StartStateJob(GetParam(), tiered);
  TrainSteps(*next, 0, 1);  // what the checkpoint overwrites
  const uint64_t held = HeldBy(*next, 3).bytes;
  ASSERT_EQ(RestoreState(*next, 3, checkpoints, "host"), "");
  EXPECT_EQ(HeldBy(*next, 3).bytes, held);
  EXPECT_TRUE(next->StateBytes() == on_host->StateBytes());
  TrainSteps(*next, 3, kSteps);
  EXPECT_TRUE(next->StateBytes() == whole->StateBytes());
  ASSERT_EQ(RestoreState(*first, 2, checkpoints, "host"), "");
  TrainSteps(*first, 3, kSteps);
  EXPECT_TRUE(first->StateBytes() == whole->StateBytes());
}

INSTANTIATE_TEST_SUITE_P(Forms, NvmeJobTest,
                         ::testing::ValuesIn(AllStateForms().begin(), AllStateForms().end()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(NvmeJobParametersTest, AloneAreRestored) {
  const TempDir checkpoints;
  const DiskDir directory;
  const StateForm& form = FormOf("adamw_split");
  const auto host = StartStateJob(form, {});
  TrainSteps(*host, 0, 2);
  SaveState(*host, 1, checkpoints, "c");
  ASSERT_EQ(RestoreState(*host, 1, checkpoints, "c", /*parameters_only=*/true), "");
  const StateVariant v{
      .stage = 3, .workers = 2, .copy = true, .nvme_paths = {directory.path()}, .parameters = true};
  const auto job = StartStateJob(form, v);
  TrainSteps(*job, 0, 2);
  ASSERT_EQ(RestoreState(*job, 2, checkpoints, "c", /*parameters_only=*/true), "");
  EXPECT_TRUE(job->StateBytes() == host->StateBytes());
  TrainSteps(*host, 2, 3);
  TrainSteps(*job, 2, 3);
  EXPECT_TRUE(job->StateBytes() == host->StateBytes());
}

// Who puts again what is on the tier changes what he names and nothing else.
TEST(NvmeJobParametersTest, ArePutAgain) {
  const DiskDir directory;
  const StateForm& form = FormOf("adamw_split");
  const auto host = StartStateJob(form, {});
  const auto job = StartStateJob(form, {.stage = 3,
                                        .workers = 2,
                                        .copy = true,
                                        .nvme_paths = {directory.path()},
                                        .parameters = true});
  for (LocalJob* each : {host.get(), job.get()}) {
    TrainSteps(*each, 0, 2);
    std::vector<std::vector<float>> values;
    for (uint32_t p = 0; p < each->layout().parameters().size(); ++p) {
      values.emplace_back(each->layout().place(p).elements, 0.25f * static_cast<float>(p));
    }
    each->PutParameters(values);
    TrainSteps(*each, 2, kSteps);
  }
  EXPECT_TRUE(job->StateBytes() == host->StateBytes());
}

// fp32 and fp16 parameters, whose masters on the tier are replicas.
TEST(NvmeJobParametersTest, OfOtherTypesTrainTheSame) {
  for (const model::v1::DType dtype : {model::v1::DTYPE_FLOAT32, model::v1::DTYPE_FLOAT16}) {
    std::string expected;
    for (const bool tier : {false, true}) {
      const DiskDir directory;
      LocalJobOptions options;
      options.manifest = MakeManifest({300, 20000}, dtype);
      options.config = MakeConfig(3, 2, dtype);
      options.config.set_sub_group_elements(2048);
      options.workers = 2;
      if (tier) {
        UseNvme(options.config, 1, /*parameters=*/true);
        options.config.set_window(model::v1::WINDOW_COPY);
        options.nvme_paths = {directory.path()};
      }
      LocalJob job(options);
      job.PutParameters({std::vector<float>(300, 0.3f), std::vector<float>(20000, 0.7f)});
      for (uint32_t step = 0; step < 3; ++step) {
        for (uint32_t rank = 0; rank < 2; ++rank) {
          const float g = 0.1f * static_cast<float>(step + rank + 1);
          job.ScatterAll(rank, 0, {std::vector<float>(300, g), std::vector<float>(20000, -g)});
          job.Step(rank, 1, 0.01);
        }
        job.Run();
        ASSERT_EQ(job.result(0).step, step + 1);
      }
      if (!tier) expected = job.StateBytes();
      EXPECT_TRUE(job.StateBytes() == expected) << "dtype " << dtype;
    }
  }
}

TEST(NvmeJobMemoryTest, OfWhatIsOnTheTierIsGivenBack) {
  const DiskDir directory;
  LocalJobOptions options;
  options.manifest = MakeManifest({3000000, 200000}, model::v1::DTYPE_BFLOAT16);
  options.config = MakeConfig(3, 1, model::v1::DTYPE_BFLOAT16);
  options.config.set_window(model::v1::WINDOW_COPY);
  UseNvme(options.config, 1, /*parameters=*/true);
  options.nvme_paths = {directory.path()};
  LocalJob job(options);
  const PartitionPlan& plan = job.memory(0).plan();
  const auto backed = [&] { return *AllocatedBytes(job.memory(0).partition_fd()); };
  const uint64_t host = plan.totals().accumulator + plan.totals().records + (64 << 10);
  job.PutParameters({std::vector<float>(3000000, 0.1f), std::vector<float>(200000, 0.2f)});
  EXPECT_LT(backed(), host);
  job.ScatterAll(0, 0, {std::vector<float>(3000000, 0.3f), std::vector<float>(200000, 0.4f)});
  job.Step(0, 1, 0.01);
  job.Run();
  EXPECT_EQ(job.result(0).step, 1u);
  EXPECT_LT(backed(), host);
  EXPECT_GT(plan.bytes(), 2 * host);
  const TempDir checkpoints;
  SaveState(job, 1, checkpoints, "c");
  EXPECT_LT(backed(), host) << "what reads a hole makes it memory";
  ASSERT_EQ(RestoreState(job, 1, checkpoints, "c"), "");
  EXPECT_LT(backed(), host);
  job.RestartWorker(0);
  EXPECT_LT(backed(), host);
  Move(job, 1, model::v1::TIER_HOST);
  job.RunMoves();
  EXPECT_GT(backed(), host);
  Move(job, 1, model::v1::TIER_NVME);
  job.RunMoves();
  EXPECT_LT(backed(), host);
}

}  // namespace
}  // namespace zeroshard
