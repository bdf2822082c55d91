// Holders that are killed at every store, and many processes and threads at once.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "storage/io_budget.h"
#include "tests/storage/io_budget_fixture.h"

namespace zeroshard {
namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr uint32_t kDepth = 8;

pid_t Fork(const std::function<int()>& body) {
  const pid_t pid = fork();
  if (pid == 0) _exit(body());
  return pid;
}

int ExitOf(pid_t pid) {
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// Granted, refused for the rate and for the depth, completed; reads, writes and slowed writes.
void Work(const IoBudget& budget, uint32_t holder) {
  for (uint32_t device : {0u, 1u}) {
    for (int i = 0; i < 4; ++i) {
      for (const IoDirection direction : {IoDirection::kRead, IoDirection::kWrite}) {
        budget.TryTake(device, holder, kMiB, direction);
        if (i > 1) budget.TryTake(device, holder, 20 * kMiB, direction);
      }
      if (i % 2 == 1) budget.Give(device, holder);
    }
  }
}

// A budget after the death of `killed`: whole, with the full rate, depth and fairness for others.
void ExpectWhole(ManualClock& clock, const IoBudget& budget, uint32_t killed, uint32_t other) {
  budget.Release(killed);
  for (uint32_t device : {0u, 1u}) {
    EXPECT_EQ(budget.usage(device).in_flight, 0u);
    EXPECT_EQ(budget.usage(device).waiting, 0u);
    EXPECT_LE(budget.job_bytes().size(), 2u);
  }
  clock.Advance(absl::Seconds(60));  // past what was paid for
  for (uint32_t i = 0; i < kDepth; ++i) {
    EXPECT_TRUE(budget.TryTake(1, other, kMiB, IoDirection::kRead).granted);
  }
  EXPECT_FALSE(budget.TryTake(1, other, kMiB, IoDirection::kRead).granted);
  budget.Release(other);
  IoSimulation simulation(&clock, budget, 0);
  simulation.Add({.holder = killed});  // its successor
  simulation.Add({.holder = other, .direction = IoDirection::kRead});
  const absl::Duration start = clock.Elapsed();
  simulation.RunUntil(start + absl::Seconds(3));
  EXPECT_NEAR(static_cast<double>(simulation.total()), 300.0 * kMiB, 9.0 * kMiB);
  EXPECT_NEAR(static_cast<double>(simulation.moved(0)), 150.0 * kMiB, 40.0 * kMiB);
}

TEST(IoBudgetCrashTest, AKillAtAnyStoreLeavesNothingTaken) {
  int kills = 0;
  for (int at = 1;; ++at) {
    ManualClock clock;
    const SharedIoBudget shared(&clock);
    const IoBudget budget = shared.budget();
    ASSERT_TRUE(budget.AddDevice("/rate", {.bytes_per_second = 100 * kMiB}).ok());
    ASSERT_TRUE(budget.AddDevice("/depth", {.depth = kDepth, .write_budget = 3 * kMiB}).ok());
    const uint32_t killed = *budget.AddHolder("killed", 0);
    const uint32_t other = *budget.AddHolder("other", 0);
    const pid_t child = Fork([&] {
      IoBudget observed = shared.budget();
      int stores = 0;
      observed.ObserveStores([&] {
        if (++stores == at) kill(getpid(), SIGKILL);
      });
      Work(observed, killed);
      return 0;
    });
    const int exit = ExitOf(child);
    ExpectWhole(clock, budget, killed, other);
    // Whoever was killed may have counted at the device and not yet for itself, never the reverse.
    for (const IoBudget::JobBytes& job : budget.job_bytes()) {
      const IoBudget::Usage usage = budget.usage(job.device);
      for (int i = 0; i < 2; ++i) EXPECT_LE(job.bytes[i], usage.bytes[i]);
    }
    for (uint32_t device : {0u, 1u}) {
      EXPECT_GE(budget.today(device).written, budget.usage(device).bytes[1]);
    }
    if (exit == 0) break;
    ASSERT_EQ(exit, -SIGKILL);
    ++kills;
    ASSERT_FALSE(testing::Test::HasFailure()) << "killed at store " << at;
  }
  EXPECT_GT(kills, 100);
}

// Takes and gives for a while; counts its own bytes, and how many are in flight over all.
struct Tally {
  std::atomic<int> in_flight = 0;
  std::atomic<int> most = 0;
  std::atomic<uint64_t> bytes = 0;
};

void Hammer(const IoBudget& budget, uint32_t holder, Tally& tally, absl::Duration how_long) {
  SystemClock clock;
  std::mt19937 random(holder);
  const absl::Duration end = clock.Elapsed() + how_long;
  int mine = 0;
  while (clock.Elapsed() < end) {
    const auto direction = static_cast<IoDirection>(random() % 2);
    const uint64_t bytes = 4096 << random() % 9;
    const IoTurn turn = budget.TryTake(0, holder, bytes, direction);
    if (turn.granted) {
      ++mine;
      tally.bytes += bytes;
      const int now = ++tally.in_flight;
      int most = tally.most;
      while (most < now && !tally.most.compare_exchange_weak(most, now)) {
      }
    } else if (mine == 0) {
      clock.SleepFor(turn.wait);
    }
    if (mine > 0 && (!turn.granted || random() % 2 == 0)) {
      --mine;
      --tally.in_flight;
      budget.Give(0, holder);
    }
  }
  for (; mine > 0; --mine) {
    --tally.in_flight;
    budget.Give(0, holder);
  }
}

TEST(IoBudgetCrashTest, ManyThreadsHoldDepthAndRate) {
  SystemClock clock;
  const SharedIoBudget shared(&clock);
  const IoBudget budget = shared.budget();
  constexpr uint64_t rate = 200 * kMiB;
  ASSERT_TRUE(budget.AddDevice("/d", {.bytes_per_second = rate, .depth = kDepth}).ok());
  Tally tally;
  std::vector<std::thread> threads;
  const absl::Duration start = clock.Elapsed();
  for (uint32_t i = 0; i < 6; ++i) {
    threads.emplace_back([&, holder = *budget.AddHolder(i < 3 ? "a" : "b", i)] {
      Hammer(budget, holder, tally, absl::Seconds(1));
    });
  }
  for (std::thread& thread : threads) thread.join();
  const double seconds = absl::ToDoubleSeconds(clock.Elapsed() - start + IoBudget::kBurst);
  EXPECT_LE(tally.most, static_cast<int>(kDepth));
  EXPECT_LE(static_cast<double>(tally.bytes), seconds * rate + 2 * kMiB);
  const IoBudget::Usage usage = budget.usage(0);
  EXPECT_EQ(usage.bytes[0] + usage.bytes[1], tally.bytes);
  EXPECT_EQ(usage.in_flight, 0u);
  EXPECT_EQ(budget.today(0).written, usage.bytes[1]);
}

TEST(IoBudgetCrashTest, ManyProcessesAreKilledAtRandomAndTheOthersGoOn) {
  SystemClock clock;
  const SharedIoBudget shared(&clock);
  const IoBudget budget = shared.budget();
  ASSERT_TRUE(budget.AddDevice("/d", {.depth = kDepth}).ok());
  std::mt19937 random(3);
  constexpr uint32_t holders = 5;
  std::vector<pid_t> children;
  for (uint32_t i = 0; i < holders; ++i) ASSERT_EQ(*budget.AddHolder("a", i), i);
  const auto start = [&](uint32_t holder) {
    return Fork([&budget, holder] {
      Tally tally;
      Hammer(budget, holder, tally, absl::Seconds(30));
      return 0;
    });
  };
  for (uint32_t i = 0; i < holders; ++i) children.push_back(start(i));
  uint64_t moved = 0;
  for (int kills = 0; kills < 60; ++kills) {
    clock.SleepFor(absl::Milliseconds(5 + random() % 10));
    const uint32_t victim = random() % holders;
    ASSERT_EQ(kill(children[victim], SIGKILL), 0);
    ASSERT_EQ(ExitOf(children[victim]), -SIGKILL);
    budget.Release(victim);
    const IoBudget::Usage usage = budget.usage(0);
    EXPECT_LE(usage.in_flight, kDepth);
    if (kills % 20 == 19) {
      EXPECT_GT(usage.bytes[0], moved);
      moved = usage.bytes[0];
    }
    children[victim] = start(victim);
  }
  for (uint32_t i = 0; i < holders; ++i) {
    kill(children[i], SIGKILL);
    ExitOf(children[i]);
    budget.Release(i);
  }
  EXPECT_EQ(budget.usage(0).in_flight, 0u);
}

}  // namespace
}  // namespace zeroshard
