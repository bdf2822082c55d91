// All workers of a job on fake GPUs die at the same time, at every fault point of the device's
// passes and of the step: the next process finds the memory of the devices as it was, and ends with
// the bits of a run on the host. CUDA does not survive a fork, so each life of the job is a process
// of its own.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "tests/fakes/cuda/fake_cuda.h"
#include "tests/storage/temp_dir.h"
#include "tests/worker/device_jobs.h"

namespace zeroshard {
namespace {

constexpr uint32_t kSteps = 3;

class DeviceJobKillTest : public ::testing::TestWithParam<DeviceCase> {
 protected:
  // Does what is left of the job.
  static void GoOn(DeviceJob& job, const std::string& file) {
    if (!job.job().hello(0).initialized()) job.Put();
    auto step = static_cast<uint32_t>(job.job().hello(0).step());
    for (; step < kSteps; ++step) {
      job.Move(step % 2 == 0 ? model::v1::TIER_HOST : model::v1::TIER_GPU, {0});
      job.job().RunMoves();
      if (GetParam().nvme_parameters) job.ExpectGathers(0);
      job.Train(step, step + 1);
    }
    std::ofstream(file) << job.State();
  }

  // Lives and deaths until the job is done; returns the number of deaths.
  int Run(const std::string& faults, std::string& state) {
    DeviceJob job(GetParam(), DeviceJob::Where::kProcesses);
    const std::string file = directory_.path() + "/state";
    int deaths = 0;
    while (job.job().RunProcess(deaths < 4 ? faults : "", [&] { GoOn(job, file); })) ++deaths;
    std::ifstream in(file);
    state.assign(std::istreambuf_iterator<char>(in), {});
    return deaths;
  }

  TempDir directory_;
};

TEST_P(DeviceJobKillTest, AtEveryFaultPoint) {
  if (FaultPointNames().empty()) GTEST_SKIP() << "needs --config=faults";
  std::string expected;
  {
    DeviceJob host(GetParam(), DeviceJob::Where::kHost);
    host.Train(0, kSteps);
    expected = host.State();
  }
  std::string undisturbed;
  EXPECT_EQ(Run("", undisturbed), 0);
  ASSERT_TRUE(undisturbed == expected);
  for (const std::string& point : FaultPointNames()) {
    if (!absl::StartsWith(point, "worker.device.") && !absl::StartsWith(point, "worker.apply.") &&
        !absl::StartsWith(point, "worker.commit.") && !absl::StartsWith(point, "worker.step.")) {
      continue;
    }
    if (absl::StartsWith(point, "worker.device.mirror.")) continue;  // device_job_mirror_kill_test
    int deaths = 0;
    for (const char* hit : {"1", "5"}) {
      std::string state;
      deaths += Run(absl::StrCat(point, "=kill:", hit), state);
      ASSERT_TRUE(state == expected) << point << " hit " << hit;
    }
    // Whether states are on the host and on the device decides which points there are.
    EXPECT_TRUE(deaths > 0 || absl::StartsWith(point, "worker.device.")) << point;
  }
}

// Whoever waits for a device that hangs cannot even give up its memory in order: the process ends.
TEST(DeviceJobHangTest, ADeviceThatDoesNotAnswerIsGivenUp) {
  const TempDir directory;
  const DeviceCase c{.ranks = 1};
  DeviceJob job(c, DeviceJob::Where::kProcesses, {.timeout = absl::Milliseconds(300)});
  const std::string said = directory.path() + "/said";
  const auto live = [&](const std::string& fault, const std::function<void()>& work) {
    ASSERT_EQ(setenv("ZEROSHARD_FAKE_CUDA", absl::StrCat("devices=4,memory=1G", fault).c_str(), 1),
              0);
    EXPECT_FALSE(job.job().RunProcess("", work));
  };
  const auto read = [&] {
    std::ifstream in(said);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  live("", [&] {
    job.Put();
    job.Train(0, 1);
  });
  // Up to where the rank has summed, and no further.
  const auto sum = [&] {
    job.Scatter(1);
    job.plane().Boundary(0, job.job().memory(0).board().attempt());
  };
  live("", [&] {
    sum();
    std::ofstream(said) << FakeCudaCalls("operations") + 3;
  });
  live(absl::StrCat(",fault=hang:", read()), [&] {
    sum();
    job.Arrive();
    std::ofstream(said) << job.LastFailure() << " | " << job.job().engine(0).health();
  });
  EXPECT_TRUE(absl::StrContains(read(), "step 2")) << read();
  EXPECT_TRUE(absl::StrContains(read(), "ABORTED: device lost")) << read();
  EXPECT_TRUE(absl::StrContains(read(), "has not answered for 300ms")) << read();
  live("", [&] {
    job.Train(static_cast<uint32_t>(job.job().hello(0).step()), kSteps);
    std::ofstream(said) << job.State();
  });
  EXPECT_TRUE(read() == TrainedOnHost(c, kSteps));
}

INSTANTIATE_TEST_SUITE_P(
    Tiers, DeviceJobKillTest,
    ::testing::Values(DeviceCase{.form = "adam_int8_split", .stage = 2, .ranks = 1},
                      DeviceCase{.stage = 2, .ranks = 1},
                      DeviceCase{.stage = 3, .tier = model::v1::TIER_HOST, .ratio = 0.5},
                      DeviceCase{.form = "adamw_bf16_states",
                                 .ranks = 1,
                                 .tier = model::v1::TIER_HOST,
                                 .ratio = 0.5,
                                 .without_master = true},
                      DeviceCase{
                          .stage = 2, .ranks = 1, .tier = model::v1::TIER_NVME, .ratio = 0.8},
                      DeviceCase{.stage = 3,
                                 .ranks = 1,
                                 .tier = model::v1::TIER_HOST,
                                 .ratio = 0.5,
                                 .nvme_parameters = true}),
    [](const auto& info) { return absl::StrCat("case", info.index); });

}  // namespace
}  // namespace zeroshard
