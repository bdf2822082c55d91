// A job that goes back to its mirror, and that takes mirrors, dies at each point on the way. CUDA
// does not survive a fork, so that this process uses none.
#include <gtest/gtest.h>

#include <filesystem>
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

using Where = DeviceJob::Where;

MirrorPoint LastMirror(DeviceJob& job, uint32_t worker) {
  return job.device(worker).LastMirror().value_or(MirrorPoint{});
}

// What the server says when all workers are there.
void GoBack(DeviceJob& job, uint64_t attempt) {
  internal::v1::GoBack command;
  command.set_attempt(attempt);
  command.mutable_poison()->set_generation(job.job().memory(0).board().header().generation.load());
  command.mutable_poison()->set_code(static_cast<uint32_t>(absl::StatusCode::kAborted));
  command.mutable_poison()->set_message("the job goes back");
  for (uint32_t w = 0; w < 2; ++w) {
    ASSERT_TRUE(job.job().engine(w).GoBack(command).ok()) << job.job().engine(w).GoBack(command);
  }
}

// Every life of the job is a process. In the end the job goes back to its last mirror, and trains
// to the same step again.
class DeviceJobMirrorKillTest : public ::testing::Test {
 protected:
  static constexpr uint32_t kLast = 3;

  std::string File(const char* name) const { return absl::StrCat(directory_.path(), "/", name); }

  static void TrainToTheLast(DeviceJob& job) {
    for (auto step = static_cast<uint32_t>(job.job().hello(0).step()); step < kLast; ++step) {
      job.Train(step, step + 1);
    }
  }

  void GoOn(DeviceJob& job) const {
    // The server would say it again before anybody is let in.
    if (!std::filesystem::exists(File("going-back"))) {
      if (!job.job().hello(0).initialized()) job.Put();
      TrainToTheLast(job);
      job.job().Run();
      ASSERT_EQ(LastMirror(job, 0).step, 2u);
      std::ofstream(File("going-back")) << LastMirror(job, 0).attempt;
    }
    uint64_t attempt = 0;
    std::ifstream(File("going-back")) >> attempt;
    if (!std::filesystem::exists(File("went-back"))) {
      GoBack(job, attempt);
      std::ofstream(File("went-back")) << "1";
      job.NextGeneration();
      ASSERT_EQ(job.job().hello(0).step(), 2u);
    }
    TrainToTheLast(job);
    std::ofstream(File("state")) << job.State();
  }

  std::string StateOf(const std::string& faults, int& deaths) const {
    for (const char* name : {"going-back", "went-back"}) std::filesystem::remove(File(name));
    DeviceJob job({.stage = 3, .mirror_steps = 2}, Where::kProcesses);
    while (job.job().RunProcess(deaths < 3 ? faults : "", [&] { GoOn(job); })) ++deaths;
    std::ifstream in(File("state"));
    return {std::istreambuf_iterator<char>(in), {}};
  }

  TempDir directory_;
};

TEST_F(DeviceJobMirrorKillTest, AtEveryFaultPoint) {
  if (FaultPointNames().empty()) GTEST_SKIP() << "needs --config=faults";
  std::string expected;
  {
    DeviceJob host({.stage = 3}, Where::kHost);
    host.Train(0, kLast);
    expected = host.State();
  }
  for (const std::string& point : FaultPointNames()) {
    const bool on_the_way = point == "worker.device.demote.before_name";
    if (!absl::StartsWith(point, "worker.device.mirror.") && !on_the_way) continue;
    for (const char* hit : {"1", "3"}) {
      int deaths = 0;
      ASSERT_TRUE(StateOf(absl::StrCat(point, "=kill:", hit), deaths) == expected)
          << point << " hit " << hit;
      EXPECT_TRUE(deaths > 0 || *hit != '1') << point;
    }
  }
}

}  // namespace
}  // namespace zeroshard
