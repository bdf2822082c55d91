// Jobs with a data plane on fake GPUs: whatever optimizer, form of states, stage, number of ranks
// and tiers, they end with the bits of the same job on the host.
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/shared_memory.h"
#include "tests/fakes/cuda/fake_cuda.h"
#include "tests/storage/temp_dir.h"
#include "tests/worker/device_jobs.h"
#include "tests/worker/state_checkpoints.h"

namespace zeroshard {
namespace {

using model::v1::TIER_GPU;
using model::v1::TIER_HOST;
using model::v1::TIER_NVME;
using Where = DeviceJob::Where;

constexpr uint32_t kSteps = 5;
constexpr uint64_t kPage = 4096;

void ExpectTheBitsOfTheHost(const DeviceCase& c) {
  DeviceJob job(c, Where::kDevice);
  job.Train(0, kSteps);
  ASSERT_TRUE(job.State() == TrainedOnHost(c, kSteps)) << Describe(c);
}

TEST(DeviceJobTest, OneRankOnOneDevice) { ExpectTheBitsOfTheHost({.stage = 2, .ranks = 1}); }

TEST(DeviceJobTest, AllStagesAndNumbersOfRanks) {
  for (uint32_t stage : {1u, 2u, 3u}) ExpectTheBitsOfTheHost({.stage = stage, .ranks = 1 + stage});
}

TEST(DeviceJobTest, SeveralMicroSteps) {
  for (uint32_t stage : {1u, 2u, 3u}) {
    ExpectTheBitsOfTheHost({.stage = stage, .ranks = 3, .micro_steps = 3});
  }
  ExpectTheBitsOfTheHost({.stage = 1, .ranks = 2, .micro_steps = 3, .ranks_first = true});
}

TEST(DeviceJobTest, StatesInEveryTierAndInSeveral) {
  for (const auto tier : {TIER_HOST, TIER_NVME}) {
    ExpectTheBitsOfTheHost({.stage = 3, .tier = tier, .ratio = 1, .lanes = 2});
    ExpectTheBitsOfTheHost({.stage = 2, .ranks = 3, .tier = tier, .ratio = 0.4});
  }
}

TEST(DeviceJobTest, ParametersOnTheHost) {
  for (const auto tier : {TIER_GPU, TIER_HOST, TIER_NVME}) {
    for (const double ratio : {0.4, 1.0}) {
      ExpectTheBitsOfTheHost(
          {.stage = 3, .ranks = 3, .tier = tier, .ratio = ratio, .host_parameters = true});
    }
  }
  ExpectTheBitsOfTheHost({.form = "adagrad",
                          .stage = 3,
                          .ranks = 1,
                          .dtype = model::v1::DTYPE_FLOAT32,
                          .host_parameters = true});
}

TEST(DeviceJobTest, ParametersWithoutAMasterInEveryTier) {
  for (const bool host_parameters : {false, true}) {
    for (const double ratio : {0.4, 1.0}) {
      ExpectTheBitsOfTheHost({.stage = 3,
                              .ranks = 3,
                              .micro_steps = 2,
                              .tier = TIER_NVME,
                              .ratio = ratio,
                              .accumulator = model::v1::DTYPE_BFLOAT16,
                              .host_parameters = host_parameters,
                              .without_master = true});
    }
  }
}

TEST(DeviceJobTest, ParametersOnTheNvmeTier) {
  for (const auto tier : {TIER_GPU, TIER_HOST, TIER_NVME}) {
    for (const double ratio : {0.4, 1.0}) {
      ExpectTheBitsOfTheHost(
          {.stage = 3, .ranks = 3, .tier = tier, .ratio = ratio, .nvme_parameters = true});
    }
    ExpectTheBitsOfTheHost({.stage = 3,
                            .ranks = 2,
                            .tier = tier,
                            .ratio = 0.5,
                            .without_master = true,
                            .nvme_parameters = true});
  }
  ExpectTheBitsOfTheHost({.form = "adagrad",
                          .stage = 3,
                          .ranks = 1,
                          .dtype = model::v1::DTYPE_FLOAT32,
                          .nvme_parameters = true});
}

TEST(DeviceJobTest, ShardsOnTheNvmeTierComeToTheirRanks) {
  const DeviceCase c{.stage = 3, .ranks = 2, .tier = TIER_HOST, .nvme_parameters = true};
  DeviceJob job(c, Where::kDevice);
  for (uint32_t step = 0; step < kSteps; ++step) {
    for (uint32_t rank = 0; rank < c.ranks; ++rank) {
      job.ExpectGathers(rank, [&] {
        job.job().RestartWorker(rank);
        job.job().Reconnect(rank);
      });
    }
    job.Train(step, step + 1);
  }
  EXPECT_TRUE(job.State() == TrainedOnHost(c, kSteps));
}

TEST(DeviceJobTest, OtherTypes) {
  ExpectTheBitsOfTheHost({.form = "adagrad", .dtype = model::v1::DTYPE_FLOAT32});
  ExpectTheBitsOfTheHost(
      {.form = "adagrad", .tier = TIER_HOST, .ratio = 0.5, .dtype = model::v1::DTYPE_FLOAT16});
  ExpectTheBitsOfTheHost({.micro_steps = 2, .accumulator = model::v1::DTYPE_BFLOAT16});
}

class DeviceJobFormTest : public ::testing::TestWithParam<const char*> {};

TEST_P(DeviceJobFormTest, EndsWithTheBitsOfTheHost) {
  ExpectTheBitsOfTheHost({.form = GetParam(), .stage = 3});
  ExpectTheBitsOfTheHost({.form = GetParam(), .stage = 1, .tier = TIER_HOST, .ratio = 0.5});
}

TEST_P(DeviceJobFormTest, AlsoWithoutAMaster) {
  ExpectTheBitsOfTheHost({.form = GetParam(), .stage = 3, .without_master = true});
  ExpectTheBitsOfTheHost(
      {.form = GetParam(), .stage = 1, .tier = TIER_HOST, .ratio = 0.5, .without_master = true});
}

INSTANTIATE_TEST_SUITE_P(Forms, DeviceJobFormTest,
                         ::testing::Values("adamw_bf16_states", "adamw_int8_fp32_master",
                                           "adam_int8_split", "sgd_split",
                                           "sgd_momentum_bf16_split", "adagrad", "lion_int8_split"),
                         [](const auto& info) { return std::string(info.param); });

TEST(DeviceJobTest, StatesMoveBetweenAllTiers) {
  const DeviceCase c{.ranks = 2, .tier = TIER_NVME, .ratio = 0.5};
  DeviceJob job(c, Where::kDevice);
  const uint64_t on_devices = job.OnDevices();
  const uint64_t on_drives = job.OnDrives();
  EXPECT_GT(on_devices, 0u);
  EXPECT_GT(on_drives, 0u);
  job.Train(0, 1);
  job.Move(TIER_HOST);
  job.job().RunMoves();
  EXPECT_EQ(job.OnDevices() + job.OnDrives(), 0u);
  job.Train(1, 2);
  job.Move(TIER_NVME);
  job.job().RunMoves();
  EXPECT_EQ(job.OnDrives(), on_devices + on_drives);
  EXPECT_EQ(job.OnDevices(), 0u);
  job.job().RestartWorker(1);
  job.job().Reconnect(1);
  job.job().Run();
  job.Train(2, 3);
  job.Move(TIER_GPU, {0});
  job.job().RunMoves();
  EXPECT_GT(job.OnDevices(), 0u);
  EXPECT_GT(job.OnDrives(), 0u);
  job.Train(3, kSteps);
  EXPECT_TRUE(job.State() == TrainedOnHost(c, kSteps));
}

// A parameter without a gradient keeps the value that it got elsewhere.
TEST(DeviceJobTest, StatesMoveBetweenAnyTwoSteps) {
  for (const DeviceCase& c :
       {DeviceCase{.ranks = 1}, DeviceCase{.ranks = 1, .without_master = true},
        DeviceCase{.form = "adam_int8_split", .ranks = 1}}) {
    DeviceJob job(c, Where::kDevice);
    for (uint32_t step = 0; step < kSteps; ++step) {
      job.Move(step % 2 == 0 ? TIER_HOST : TIER_GPU);
      job.job().RunMoves();
      job.Train(step, step + 1);
    }
    EXPECT_TRUE(job.State() == TrainedOnHost(c, kSteps)) << Describe(c);
  }
}

TEST(DeviceJobTest, WhatFindsNoRoomStaysWhereItIs) {
  DeviceJob job({.ranks = 1, .tier = TIER_HOST, .ratio = 1}, Where::kDevice);
  job.Move(TIER_GPU);
  for (int i = 0; i < 50; ++i) job.job().engine(0).MoveStates();
  EXPECT_EQ(job.OnDevices(), 0u);
  job.Train(0, kSteps);
  EXPECT_TRUE(job.State() == TrainedOnHost({.ranks = 1}, kSteps));
}

TEST(DeviceJobTest, WorkersAreReplacedBetweenAnyTwoRequests) {
  const DeviceCase c{.stage = 3, .ranks = 2, .tier = TIER_HOST, .ratio = 0.5};
  DeviceJob job(c, Where::kDevice);
  for (uint32_t step = 0; step < kSteps; ++step) {
    job.job().RestartWorker(step % 2);
    job.job().Reconnect(step % 2);
    job.Scatter(step);
    job.job().RestartWorker(1);
    job.job().Reconnect(1);
    job.Arrive();
    EXPECT_EQ(job.job().result(0).step, step + 1) << job.LastFailure();
  }
  EXPECT_TRUE(job.State() == TrainedOnHost(c, kSteps));
}

class DeviceJobCheckpointTest : public ::testing::TestWithParam<bool> {};

TEST_P(DeviceJobCheckpointTest, GoesFromAndToDevices) {
  const TempDir checkpoints;
  const DeviceCase c{
      .stage = 3, .ranks = 2, .tier = TIER_HOST, .ratio = 0.5, .without_master = GetParam()};
  DeviceJob whole(c, Where::kHost);
  DeviceJob device(c, Where::kDevice);
  DeviceJob host(c, Where::kHost);
  whole.Train(0, kSteps);
  device.Train(0, 2);
  SaveState(device.job(), 2, checkpoints, "device");
  ASSERT_EQ(RestoreState(host.job(), 1, checkpoints, "device"), "");
  EXPECT_TRUE(host.job().StateBytes() == device.job().StateBytes());
  host.Train(2, 3);
  SaveState(host.job(), 1, checkpoints, "host");
  DeviceJob next({.stage = 2, .ranks = 2, .without_master = GetParam()}, Where::kDevice);
  next.Train(0, 1);  // what the checkpoint overwrites
  const uint64_t held = next.OnDevices();
  ASSERT_EQ(RestoreState(next.job(), 2, checkpoints, "host"), "");
  EXPECT_EQ(next.OnDevices(), held);
  EXPECT_TRUE(next.job().StateBytes() == host.job().StateBytes());
  next.Train(3, kSteps);
  EXPECT_TRUE(next.State() == whole.State());
}

INSTANTIATE_TEST_SUITE_P(Masters, DeviceJobCheckpointTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "None" : "Split"; });

// Parameters of a job with masters become the copies of one without.
TEST(DeviceJobTest, ParametersOfAnotherFormAreRestored) {
  const TempDir checkpoints;
  const DeviceCase split{.ranks = 2};
  const DeviceCase none{.ranks = 2, .without_master = true};
  DeviceJob first(split, Where::kDevice);
  first.Train(0, 2);
  SaveState(first.job(), 2, checkpoints, "split");
  std::string states[2];
  for (const bool on_device : {false, true}) {
    DeviceJob job(none, on_device ? Where::kDevice : Where::kHost);
    job.Train(0, 1);
    ASSERT_EQ(RestoreState(job.job(), on_device ? 2 : 1, checkpoints, "split"), "");
    job.Train(2, 3);
    ASSERT_EQ(RestoreState(job.job(), on_device ? 2 : 1, checkpoints, "split", true), "");
    job.Train(3, kSteps);
    states[on_device] = job.State();
  }
  EXPECT_TRUE(states[0] == states[1]);
}

// Chunks of full size, and squares of several halves.
TEST(DeviceJobTest, LargeUnits) {
  std::string states[2];
  for (const bool on_device : {false, true}) {
    KernelDataPlane plane;
    LocalJobOptions options;
    options.manifest = MakeManifest({4500000, 300}, model::v1::DTYPE_BFLOAT16);
    options.config = MakeConfig(2, 1, model::v1::DTYPE_BFLOAT16);
    options.config.set_gradient_clipping(0.1);
    if (on_device) {
      options.config.set_data_plane(true);
      options.config.set_tiered(true);
      options.config.set_optimizer_tier(TIER_HOST);
      options.config.set_optimizer_ratio(0.5);
      options.config.set_parameter_tier(TIER_GPU);
      options.config.set_window(model::v1::WINDOW_COPY);
      options.data_plane = &plane;
      options.open_device = [](JobMemory& memory) { return CudaShard::Open(memory); };
    }
    LocalJob job(options);
    plane.Attach(job);
    std::vector<std::vector<float>> values = {std::vector<float>(4500000, 0.25f),
                                              std::vector<float>(300, 0.5f)};
    job.PutParameters(values);
    for (uint32_t step = 0; step < 2; ++step) {
      for (size_t i = 0; i < values[0].size(); ++i) {
        values[0][i] = static_cast<float>(i % (977 + step)) * 1e-3f - 0.4f;
      }
      job.ScatterAll(0, 0, values);
      job.Step(0, 1, 0.01);
      job.Run();
      ASSERT_EQ(job.result(0).step, step + 1);
    }
    states[on_device] = absl::StrCat(job.result(0).grad_norm, "\n", job.StateBytes());
  }
  EXPECT_TRUE(states[0] == states[1]);
}

TEST(DeviceJobTest, ParametersArePutAgain) {
  for (const bool without_master : {false, true}) {
    const DeviceCase c{.ranks = 2, .without_master = without_master};
    DeviceJob host(c, Where::kHost);
    DeviceJob device(c, Where::kDevice);
    for (DeviceJob* job : {&host, &device}) {
      job->Train(0, 2);
      job->Put(/*seed=*/5);
      job->Train(2, 3);
    }
    EXPECT_TRUE(device.State() == host.State()) << Describe(c);
  }
}

// The devices' memory is gone: parameters that are not on the drives are made of their masters.
TEST(DeviceJobTest, GoesOnFromItsDrives) {
  for (const bool parameters : {false, true}) {
    const DeviceCase c{.stage = 3,
                       .ranks = 2,
                       .tier = TIER_NVME,
                       .power = true,
                       .without_master = parameters,
                       .nvme_parameters = parameters};
    DeviceJob first(c, Where::kDevice);
    first.Train(0, 2);
    first.End();
    DeviceJob next(first);
    next.Train(2, kSteps);
    EXPECT_TRUE(next.State() == TrainedOnHost(c, kSteps)) << Describe(c);
  }
}

// Of states on the device the host has no pages.
TEST(DeviceJobTest, MemoryOfWhatIsOnTheDeviceIsGivenBack) {
  DeviceJob job({.ranks = 1}, Where::kDevice);
  const auto backed = [&] { return *AllocatedBytes(job.job().memory(0).partition_fd()); };
  const PartitionPlan& plan = job.job().memory(0).plan();
  const uint64_t records = plan.totals().records + (16 << 10);
  EXPECT_LT(backed(), records);
  job.Train(0, 2);
  EXPECT_LT(backed(), records);
  job.Move(TIER_HOST);
  job.job().RunMoves();
  EXPECT_GT(backed(), plan.totals().master);
  job.Move(TIER_GPU);
  job.job().RunMoves();
  EXPECT_LT(backed(), records);
}

// Gradients and parameters of what is offloaded go through a ring, not through memory of their own.
TEST(DeviceJobTest, OffloadedStatesTakeNoMemoryForAllGradients) {
  std::optional<uint64_t> slow_copies;  // the test's own: those of a job without offloading
  for (const auto tier : {TIER_GPU, TIER_HOST, TIER_NVME}) {
    DeviceJob job({.ranks = 1, .tier = tier}, Where::kDevice);
    const JobMemory& memory = job.job().memory(0);
    const PartitionPlan& plan = memory.plan();
    job.Train(0, 1);
    const uint64_t backed = *AllocatedBytes(memory.partition_fd());
    EXPECT_LT(backed, plan.totals().records + (16 << 10) +
                          (tier == TIER_HOST ? 3 * plan.totals().master : 0));
    const uint64_t copies = FakeCudaCalls("pageable copies");
    job.Train(1, 3);
    EXPECT_EQ(*AllocatedBytes(memory.partition_fd()), backed);
    const uint64_t slow = FakeCudaCalls("pageable copies") - copies;
    EXPECT_EQ(slow, slow_copies.value_or(slow));
    slow_copies = slow;
    ASSERT_GT(plan.chunks().size(), 12u);
    EXPECT_EQ(job.device(0).counters().ring_bytes, tier == TIER_GPU ? 0 : 12 * (kPage + kPage))
        << "twelve parcels a lane";
  }
}

// The rank has arrived before its device has summed; the device rings the worker's doorbell.
TEST(DeviceJobTest, SumsMayComeAfterTheRank) {
  const DeviceCase c{.ranks = 1};
  DeviceJob job(c, Where::kDevice);
  job.Scatter(0);
  job.plane().Hold();
  job.Arrive();
  EXPECT_EQ(job.job().result(0).step, 0u);
  job.job().RestartWorker(0);
  job.job().Reconnect(0);
  job.job().Run();
  EXPECT_EQ(job.job().result(0).step, 0u);
  job.plane().LetGo();
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (job.job().result(0).step == 0 && absl::Now() < deadline) job.job().Run();
  job.Train(1, kSteps);
  EXPECT_TRUE(job.State() == TrainedOnHost(c, kSteps));
}

TEST(DeviceJobTest, ADeviceThatDoesNotSumEndsTheStep) {
  DeviceJob job({.ranks = 1}, Where::kDevice);
  job.job().memory(0);
  job.Scatter(0);
  job.plane().Hold();
  job.Arrive();
  job.job().clock().Advance(absl::Minutes(60));
  job.job().engine(0).Tick();
  EXPECT_TRUE(absl::StrContains(job.LastFailure(), "step 1 aborted")) << job.LastFailure();
  EXPECT_TRUE(absl::StrContains(job.LastFailure(), "rank 0")) << job.LastFailure();
  job.plane().LetGo();
}

TEST(DeviceJobTest, AnErrorOfARanksDataPlaneEndsTheStep) {
  const DeviceCase c{.ranks = 2};
  DeviceJob job(c, Where::kDevice);
  job.Train(0, 1);
  job.Scatter(1);
  job.job().memory(1).device_counters().error.store(14);
  job.job().Run();
  EXPECT_TRUE(absl::StrContains(job.LastFailure(), "step 2 aborted")) << job.LastFailure();
  EXPECT_TRUE(absl::StrContains(job.LastFailure(), "rank 1")) << job.LastFailure();
  job.NextGeneration();
  EXPECT_EQ(job.LastFailure(), "");
  EXPECT_EQ(job.job().hello(1).step(), 1u);
  job.Train(1, kSteps);
  EXPECT_TRUE(job.State() == TrainedOnHost(c, kSteps));
}

TEST(DeviceJobTest, ARankThatDiesInAStepEndsIt) {
  const DeviceCase c{.ranks = 2};
  DeviceJob job(c, Where::kDevice);
  job.Train(0, 2);
  for (uint32_t w = 0; w < 2; ++w) job.job().engine(w).OnRankDied(1);
  job.job().Run();
  EXPECT_EQ(job.LastFailure(), "") << "it had not begun the step";
  job.job().Hello(1, false);
  job.job().Run();
  job.Scatter(2);
  for (uint32_t w = 0; w < 2; ++w) job.job().engine(w).OnRankDied(1);
  job.job().Run();
  EXPECT_TRUE(absl::StrContains(job.LastFailure(), "step 3 aborted")) << job.LastFailure();
  job.NextGeneration();
  job.Train(2, kSteps);
  EXPECT_TRUE(job.State() == TrainedOnHost(c, kSteps));
}

}  // namespace
}  // namespace zeroshard
