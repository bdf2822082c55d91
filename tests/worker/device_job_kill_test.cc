// All workers of a job on fake GPUs die at the same time, at every fault point of the device's
// passes and of the step: the next process finds the memory of the devices as it was, and ends with
// the bits of a run on the host. CUDA does not survive a fork, so each life of the job is a process
// of its own.
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
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
  std::vector<std::string> never;
  for (const std::string& point : FaultPointNames()) {
    if (!absl::StartsWith(point, "worker.device.") && !absl::StartsWith(point, "worker.apply.") &&
        !absl::StartsWith(point, "worker.commit.") && !absl::StartsWith(point, "worker.step.")) {
      continue;
    }
    int deaths = 0;
    for (const char* hit : {"1", "5"}) {
      std::string state;
      deaths += Run(absl::StrCat(point, "=kill:", hit), state);
      ASSERT_TRUE(state == expected) << point << " hit " << hit;
    }
    if (deaths == 0) never.push_back(point);
  }
  EXPECT_EQ(never, std::vector<std::string>({"worker.commit.before_own_counts"}));
}

INSTANTIATE_TEST_SUITE_P(
    Tiers, DeviceJobKillTest,
    ::testing::Values(DeviceCase{.form = "adam_int8_split", .stage = 2, .ranks = 1},
                      DeviceCase{.stage = 3, .tier = model::v1::TIER_HOST, .ratio = 0.5}),
    [](const auto& info) { return absl::StrCat("case", info.index); });

}  // namespace
}  // namespace zeroshard
