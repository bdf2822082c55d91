// The machine's cores shared out among processes: never more than there are, in turn, and not lost
// with a process that is killed.
#include "device/cpu/core_budget.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "base/shared_memory.h"

namespace zeroshard {
namespace {

NumaCores Node(int os_index, int cores) {
  NumaCores node{.os_index = os_index, .cpus = {}};
  for (int cpu = 0; cpu < cores; ++cpu) node.cpus.push_back(os_index * 100 + cpu);
  return node;
}

// A budget in memory that children share.
class Shared {
 public:
  explicit Shared(const std::vector<NumaCores>& nodes) {
    const UniqueFd fd = *CreateSealedMemfd("zeroshard-test", CoreBudget::Bytes());
    region_ = *MappedRegion::Map(fd.get(), CoreBudget::Bytes(), Access::kReadWrite);
    EXPECT_TRUE(CoreBudget::Format(region_.bytes(), nodes).ok());
  }
  CoreBudget budget() const { return *CoreBudget::Adopt(region_.bytes()); }

 private:
  MappedRegion region_;
};

template <typename T>
T* SharedCell() {
  void* const memory =
      mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return new (memory) T();
}

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

void AwaitWaiting(const CoreBudget& budget, uint32_t count) {
  while (budget.usage(0).waiting != count) std::this_thread::yield();
}

TEST(CoreBudgetTest, HandsOutWhatThereIsByNode) {
  const Shared shared({Node(0, 3), Node(1, 2)});
  const CoreBudget budget = shared.budget();
  EXPECT_EQ(budget.nodes(), 2u);
  EXPECT_EQ(budget.Cpus(1), (std::vector<int>{100, 101}));
  const uint32_t a = *budget.AddHolder(0);
  const uint32_t b = *budget.AddHolder(0);
  const uint32_t c = *budget.AddHolder(1);
  EXPECT_EQ(budget.Acquire(a, 2), 2);
  EXPECT_EQ(budget.Acquire(b, 2), 1);
  EXPECT_EQ(budget.Acquire(c, 8), 2);
  EXPECT_EQ(budget.usage(0).in_use, 3u);
  EXPECT_EQ(budget.usage(1).in_use, 2u);
  budget.Release(a);
  EXPECT_EQ(budget.usage(0).in_use, 1u);
  EXPECT_EQ(budget.Acquire(a, 1), 1);
  for (const uint32_t holder : {a, b, c}) budget.Release(holder);
  EXPECT_EQ(budget.usage(0).in_use + budget.usage(1).in_use, 0u);
  EXPECT_GT(budget.usage(0).busy_seconds, 0);
}

TEST(CoreBudgetTest, RefusesForeignMemory) {
  std::vector<std::byte> zeros(CoreBudget::Bytes());
  EXPECT_EQ(CoreBudget::Adopt(zeros).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_FALSE(CoreBudget::Format(std::span(zeros).first(100), {Node(0, 1)}).ok());
  EXPECT_FALSE(CoreBudget::Format(zeros, {}).ok());
}

TEST(CoreBudgetTest, NumbersOfHoldersAreGivenOutAgain) {
  const Shared shared({Node(0, 1)});
  const CoreBudget budget = shared.budget();
  for (uint32_t h = 0; h < CoreBudget::kMaxHolders; ++h) EXPECT_EQ(*budget.AddHolder(0), h);
  EXPECT_EQ(budget.AddHolder(0).status().code(), absl::StatusCode::kResourceExhausted);
  budget.RemoveHolder(7);
  EXPECT_EQ(*budget.AddHolder(0), 7u);
}

TEST(CoreBudgetTest, WaitersGoInTheOrderInWhichTheyCame) {
  const Shared shared({Node(0, 1)});
  const CoreBudget budget = shared.budget();
  const uint32_t first = *budget.AddHolder(0);
  ASSERT_EQ(budget.Acquire(first, 1), 1);
  constexpr int kWaiters = 5;
  std::atomic<int> turn = 0;
  std::vector<int> turns(kWaiters, -1);
  std::vector<std::thread> threads;
  for (int i = 0; i < kWaiters; ++i) {
    threads.emplace_back([&, i, holder = *budget.AddHolder(0)] {
      EXPECT_EQ(budget.Acquire(holder, 1, absl::InfiniteDuration()), 1);
      turns[i] = turn++;
      budget.Release(holder);
    });
    AwaitWaiting(budget, static_cast<uint32_t>(i) + 1);
  }
  budget.Release(first);
  for (std::thread& thread : threads) thread.join();
  for (int i = 0; i < kWaiters; ++i) EXPECT_EQ(turns[i], i);
  EXPECT_GT(budget.usage(0).wait_seconds, 0);
}

TEST(CoreBudgetTest, TheFirstInTheQueueLeavesOneForEachOther) {
  const Shared shared({Node(0, 4)});
  const CoreBudget budget = shared.budget();
  const uint32_t all = *budget.AddHolder(0);
  ASSERT_EQ(budget.Acquire(all, 4), 4);
  std::atomic<int> taken = 0;
  std::atomic<int> done = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&, holder = *budget.AddHolder(0)] {
      taken += budget.Acquire(holder, 4, absl::InfiniteDuration());
      ++done;
      while (done < 3) std::this_thread::yield();
      budget.Release(holder);
    });
    AwaitWaiting(budget, static_cast<uint32_t>(i) + 1);
  }
  budget.Release(all);
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(taken, 3);
  EXPECT_LE(taken, 4);
}

TEST(CoreBudgetTest, WhoIsNotServedInTimeRunsOneThreadAndIsCounted) {
  const Shared shared({Node(0, 1)});
  const CoreBudget budget = shared.budget();
  const uint32_t stopped = *budget.AddHolder(0);
  const uint32_t other = *budget.AddHolder(0);
  ASSERT_EQ(budget.Acquire(stopped, 1), 1);
  EXPECT_EQ(budget.Acquire(other, 4, absl::Milliseconds(20)), 1);
  EXPECT_EQ(budget.usage(0).overdrafts, 1u);
  EXPECT_EQ(budget.usage(0).in_use, 1u);
  EXPECT_EQ(budget.usage(0).waiting, 0u);
  budget.Release(other);
  EXPECT_EQ(budget.usage(0).in_use, 1u);
  budget.Release(stopped);
  EXPECT_EQ(budget.usage(0).in_use, 0u);
}

// Processes that take and give back as fast as they can: at no time do more run than there are
// cores, all get their share, and none waits for ever.
TEST(CoreBudgetTest, ManyProcessesNeverRunMoreThreadsThanCores) {
  constexpr int kCores = 3;
  constexpr int kProcesses = 6;
  constexpr int kRounds = 3000;
  const Shared shared({Node(0, kCores)});
  const CoreBudget budget = shared.budget();
  auto* running = SharedCell<std::atomic<int>>();
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    const uint32_t holder = *budget.AddHolder(0);
    children.push_back(Fork([&, holder, p] {
      std::mt19937 random(static_cast<uint32_t>(p));
      for (int round = 0; round < kRounds; ++round) {
        const int n =
            budget.Acquire(holder, 1 + static_cast<int>(random() % 4), absl::InfiniteDuration());
        if (running->fetch_add(n) + n > kCores) return 1;
        for (uint32_t i = random() % 200; i > 0; --i) asm volatile("");
        running->fetch_sub(n);
        budget.Release(holder);
      }
      return 0;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(ExitOf(child), 0);
  EXPECT_EQ(budget.usage(0).in_use, 0u);
  EXPECT_EQ(budget.usage(0).waiting, 0u);
  EXPECT_EQ(budget.usage(0).overdrafts, 0u);
}

TEST(CoreBudgetTest, OneCoreIsSharedEvenly) {
  constexpr int kProcesses = 3;
  const Shared shared({Node(0, 1)});
  const CoreBudget budget = shared.budget();
  struct Counts {
    std::atomic<int> rounds[kProcesses];
    std::atomic<int> all;
  };
  auto* counts = SharedCell<Counts>();
  std::vector<pid_t> children;
  for (int p = 0; p < kProcesses; ++p) {
    const uint32_t holder = *budget.AddHolder(0);
    children.push_back(Fork([&, holder, p] {
      while (counts->all < 3000) {
        budget.Acquire(holder, 1, absl::InfiniteDuration());
        ++counts->rounds[p];
        ++counts->all;
        // Long against a turn of the scheduler, all in all: else one would be done before the
        // others run at all.
        const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
        while (std::chrono::steady_clock::now() < end) {
        }
        budget.Release(holder);
      }
      return 0;
    }));
  }
  for (const pid_t child : children) EXPECT_EQ(ExitOf(child), 0);
  for (int p = 0; p < kProcesses; ++p) EXPECT_GT(counts->rounds[p], 300) << p;
}

// Children are killed at any instruction; the parent takes back what they held, and at the end all
// is there again. Others go on meanwhile.
TEST(CoreBudgetTest, TokensOfAKilledProcessComeBack) {
  constexpr int kCores = 2;
  const Shared shared({Node(0, kCores)});
  const CoreBudget budget = shared.budget();
  auto* rounds = SharedCell<std::atomic<int>>();
  auto* stop = SharedCell<std::atomic<bool>>();
  const auto spin = [&](uint32_t holder) {
    while (!stop->load()) {
      budget.Acquire(holder, kCores, absl::InfiniteDuration());
      ++*rounds;
      budget.Release(holder);
    }
    return 0;
  };
  const uint32_t survivor = *budget.AddHolder(0);
  const pid_t surviving = Fork([&] { return spin(survivor); });
  std::mt19937 random(7);
  for (int kill_number = 0; kill_number < 200; ++kill_number) {
    const uint32_t holder = *budget.AddHolder(0);
    const pid_t child = Fork([&] { return spin(holder); });
    usleep(random() % 2000);
    kill(child, SIGKILL);
    EXPECT_EQ(ExitOf(child), -SIGKILL);
    budget.RemoveHolder(holder);
    const int before = *rounds;
    while (*rounds < before + 3) std::this_thread::yield();  // the survivor is not held up
  }
  *stop = true;
  EXPECT_EQ(ExitOf(surviving), 0);
  const CoreBudget::Usage usage = budget.usage(0);
  EXPECT_EQ(usage.in_use, 0u);
  EXPECT_EQ(usage.waiting, 0u);
}

// The holder of every token is killed while another waits.
TEST(CoreBudgetTest, AWaiterGoesOnWhenTheHolderIsKilled) {
  const Shared shared({Node(0, 1)});
  const CoreBudget budget = shared.budget();
  auto* holding = SharedCell<std::atomic<bool>>();
  const uint32_t killed = *budget.AddHolder(0);
  const uint32_t waiter = *budget.AddHolder(0);
  const pid_t child = Fork([&] {
    budget.Acquire(killed, 1);
    *holding = true;
    while (true) pause();
    return 0;
  });
  while (!*holding) std::this_thread::yield();
  std::thread waiting([&] {
    EXPECT_EQ(budget.Acquire(waiter, 1, absl::InfiniteDuration()), 1);
    budget.Release(waiter);
  });
  AwaitWaiting(budget, 1);
  kill(child, SIGKILL);
  EXPECT_EQ(ExitOf(child), -SIGKILL);
  budget.RemoveHolder(killed);
  waiting.join();
  EXPECT_EQ(budget.usage(0).overdrafts, 0u);
}

}  // namespace
}  // namespace zeroshard
