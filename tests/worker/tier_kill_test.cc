// A worker that is killed at any of the tier's fault points, and its successor in another process:
// the states are those of the last committed step, and the job goes on as if nobody had died.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <iostream>
#include <new>
#include <string>
#include <tuple>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "gtest/gtest.h"
#include "tests/worker/tier_fixture.h"

namespace zeroshard {
namespace {

constexpr uint64_t kSteps = 3;

// What the server keeps of a job.
struct Board {
  std::atomic<bool> filled{false};
  std::atomic<uint64_t> committed{0};
  std::atomic<bool> finished{false};
};

class Killed : public ::testing::TestWithParam<std::tuple<IoBackend, model::v1::Durability>> {
 protected:
  void SetUp() override {
    if (FaultPointNames().empty()) GTEST_SKIP() << "needs --config=faults";
    void* memory = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    board_ = new (memory) Board;
  }
  void TearDown() override {
    if (board_ != nullptr) ::munmap(board_, 4096);
  }

  // A worker's life: the end of the job or an error, which is returned.
  absl::Status Live(TierJob& job) {
    absl::Status status = job.Open(/*recover=*/true, board_->committed);
    if (!status.ok()) return status;
    if (!board_->filled) {
      status = job.Fill();
      if (status.ok()) status = job.tier().Seal("");
      if (!status.ok()) return status;
      board_->filled = true;
    } else {
      job.FillModel();
      for (uint64_t step = 1; step <= board_->committed; ++step) job.Expect(step);
    }
    status = job.Check();
    for (uint64_t step = board_->committed + 1; status.ok() && step <= kSteps; ++step) {
      status = job.Step(step);
      if (status.ok()) status = job.tier().Seal("");
      if (!status.ok()) return status;
      board_->committed = step;
      status = job.tier().Commit(step);
      job.Expect(step);
      if (status.ok()) status = job.Check();
    }
    if (status.ok()) status = job.tier().Forget(job.Images().front());
    if (status.ok()) board_->finished = true;
    return status;
  }

  // Runs a worker with the fault in a child; how it ended.
  int RunChild(TierJob& job, const std::string& faults) {
    return RunAsChild([&] {
      const absl::Status armed = ArmFaultPoints(faults);
      return armed.ok() ? Live(job) : armed;
    });
  }

  static int RunAsChild(absl::FunctionRef<absl::Status()> life) {
    const pid_t child = ::fork();
    if (child == 0) {
      const absl::Status status = life();
      if (!status.ok()) std::cerr << status << std::endl;
      ::_exit(status.ok() && !::testing::Test::HasFailure() ? 0 : 1);
    }
    int status = 0;
    EXPECT_EQ(::waitpid(child, &status, 0), child);
    return status;
  }

  Board* board_ = nullptr;
};

INSTANTIATE_TEST_SUITE_P(All, Killed,
                         ::testing::Combine(::testing::Values(IoBackend::kUring,
                                                              IoBackend::kThreads),
                                            ::testing::Values(model::v1::DURABILITY_PROCESS,
                                                              model::v1::DURABILITY_POWER)));

TEST_P(Killed, AtEveryHitOfEveryPointTheSuccessorGoesOn) {
  const auto& [backend, durability] = GetParam();
  for (const std::string point :
       {"worker.tier.creating", "worker.tier.before_format", "worker.tier.before_write",
        "worker.tier.after_write", "worker.tier.after_complete", "worker.tier.after_flush",
        "worker.tier.after_prepare", "worker.tier.before_commit", "worker.tier.before_forget"}) {
    int deaths = 0;
    for (uint64_t hit = 1;; ++hit) {
      new (board_) Board;
      TierJob job({.elements = {1000, 700}, .spares = 4, .parent = "/dev/shm"});
      job.options().backend = backend;
      job.options().config.set_durability(durability);
      const int first = RunChild(job, absl::StrCat(point, "=kill:", hit));
      if (WIFEXITED(first)) {
        ASSERT_EQ(WEXITSTATUS(first), 0) << point << " hit " << hit;
        break;
      }
      ++deaths;
      ASSERT_EQ(WTERMSIG(first), SIGKILL);
      ASSERT_EQ(RunChild(job, ""), 0) << "after " << point << " hit " << hit;
      ASSERT_TRUE(board_->finished);
    }
    const bool power = durability == model::v1::DURABILITY_POWER;
    const bool manifest = point.ends_with("_flush") || point.ends_with("_prepare");
    EXPECT_EQ(deaths > 0, power || !manifest) << point;
  }
}

// Each incarnation dies once more, so that dead generations pile up; files are drained in between.
TEST_P(Killed, ManyTimesInOneStep) {
  const auto& [backend, durability] = GetParam();
  TierJob job({.elements = {1000, 700, 2000}, .spares = 2, .parent = "/dev/shm"});
  job.options().backend = backend;
  job.options().config.set_durability(durability);
  int deaths = 0;
  for (int life = 0; !board_->finished; ++life) {
    ASSERT_LT(life, 100);
    const char* point = life % 2 == 0 ? "after_write" : "before_write";
    const int status = RunChild(job, absl::StrCat("worker.tier.", point, "=kill:", 2 + life % 5));
    ASSERT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0);
    deaths += WIFSIGNALED(status) ? 1 : 0;
  }
  EXPECT_GT(deaths, 3);
}

// A step that the job drops while the worker is dead.
TEST_P(Killed, WhenTheStepIsDroppedTheStateBeforeItIsThere) {
  const auto& [backend, durability] = GetParam();
  for (uint64_t i = 0; i < 30; ++i) {
    new (board_) Board;
    TierJob job({.elements = {1000, 700}, .spares = 4, .parent = "/dev/shm"});
    job.options().backend = backend;
    job.options().config.set_durability(durability);
    // After the manifest, too: then it is revoked.
    const char* point = i % 6 == 0 ? "after_prepare=kill:" : "after_complete=kill:";
    const int first =
        RunChild(job, absl::StrCat("worker.tier.", point, i % 6 == 0 ? 2 + i / 6 : i));
    if (!WIFSIGNALED(first) || !board_->filled) continue;
    job.FillModel();
    for (uint64_t step = 1; step <= board_->committed; ++step) job.Expect(step);
    ASSERT_EQ(RunAsChild([&] {
                absl::Status status = job.Open(/*recover=*/true, board_->committed);
                if (status.ok()) status = job.Check();
                if (status.ok()) status = job.StepAndCommit(board_->committed + 2);
                if (status.ok()) status = job.Check();
                return status;
              }),
              0)
        << i;
  }
}

}  // namespace
}  // namespace zeroshard
