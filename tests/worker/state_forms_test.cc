// Every optimizer with every form of master and states, in the engine: bit-identity over stages,
// workers and windows, absent parameters, checkpoints between forms, and kills inside the update.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/worker/state_forms.h"

namespace zeroshard {
namespace {

constexpr uint32_t kSteps = 4;

std::string Trained(const StateForm& form, const StateVariant& v) {
  return TrainedStates(form, v, kSteps);
}

class StateFormTest : public ::testing::TestWithParam<StateForm> {};

TEST_P(StateFormTest, TrainsBitIdenticallyWhateverTheStageAndTheNumberOfWorkers) {
  const std::string expected = Trained(GetParam(), {});
  std::vector<StateVariant> variants = {{.stage = 2, .workers = 3, .lanes = 2}};
  for (uint32_t stage : {0u, 1u, 2u, 3u}) {
    if (stage == 0 && GetParam().master == model::v1::MASTER_FORM_NONE) continue;
    for (uint32_t workers : {1u, 2u, 4u}) variants.push_back({.stage = stage, .workers = workers});
    variants.push_back({.stage = stage, .workers = 3, .islands = true});
  }
  variants.push_back({.stage = 3, .workers = 2, .copy = true});
  for (const StateVariant& v : variants) {
    ASSERT_TRUE(Trained(GetParam(), v) == expected)
        << "stage " << v.stage << " W " << v.workers << (v.copy ? " copy" : "")
        << (v.islands ? " islands" : "");
  }
}

TEST_P(StateFormTest, TheNextRunDrawsOtherNumbersOnlyWithAnotherSeed) {
  const auto job = StartStateJob(GetParam(), {.seed = 8});
  TrainSteps(*job, 0, kSteps);
  EXPECT_EQ(job->StateBytes() == Trained(GetParam(), {}),
            GetParam().master != model::v1::MASTER_FORM_NONE);
}

// Runs the step in a child process that is killed after `delay`; the successors of its workers
// finish it. Returns whether the kill came before the child was done.
bool KillInTheStep(LocalJob& job, const StateVariant& v, std::chrono::nanoseconds delay) {
  int ready[2];
  EXPECT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    if (write(ready[1], "x", 1) != 1) _exit(1);
    job.Run();
    _exit(0);
  }
  char byte;
  EXPECT_EQ(read(ready[0], &byte, 1), 1);
  close(ready[0]);
  close(ready[1]);
  const auto until = std::chrono::steady_clock::now() + delay;
  while (std::chrono::steady_clock::now() < until) {
  }
  kill(child, SIGKILL);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  for (uint32_t w = 0; w < v.workers; ++w) job.RestartWorker(w);
  for (uint32_t rank = 0; rank < kStateRanks; ++rank) job.Reconnect(rank);
  job.Run();
  return WIFSIGNALED(status);
}

// ZEROSHARD_KILLS=N: so many kills for each form; a few by default.
TEST_P(StateFormTest, KilledInsideTheUpdateEndsTheSame) {
  int kills = 25;
  if (const char* text = std::getenv("ZEROSHARD_KILLS"); text != nullptr) {
    ASSERT_TRUE(absl::SimpleAtoi(text, &kills)) << text;
  }
  const StateVariant v{.stage = 2, .workers = 2};
  const std::string expected = Trained(GetParam(), {});
  std::mt19937_64 random(5);
  std::chrono::nanoseconds longest = std::chrono::milliseconds(1);
  int killed = 0;
  for (int round = 0; killed < kills && round < 20 * kills; ++round) {
    const auto started = StartStateJob(GetParam(), v);
    LocalJob& job = *started;
    for (uint32_t step = 0; step < kSteps; ++step) {
      ScatterStep(job, step);
      for (uint32_t rank = 0; rank < kStateRanks; ++rank) job.Step(rank, 1, 0.01);
      const bool early = KillInTheStep(
          job, v, std::chrono::nanoseconds(random() % static_cast<uint64_t>(longest.count())));
      killed += early ? 1 : 0;
      // The step takes about as long as the delays from which half of the kills come too late.
      longest = std::clamp<std::chrono::nanoseconds>(early ? longest * 9 / 8 : longest * 7 / 8,
                                                     std::chrono::microseconds(50),
                                                     std::chrono::milliseconds(100));
      ASSERT_EQ(job.result(0).step, step + 1);
    }
    ASSERT_TRUE(job.StateBytes() == expected) << "round " << round;
  }
  EXPECT_GE(killed, kills);
}

INSTANTIATE_TEST_SUITE_P(Forms, StateFormTest,
                         ::testing::ValuesIn(AllStateForms().begin(), AllStateForms().end()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace zeroshard
