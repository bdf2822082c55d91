#include "device/cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <xmmintrin.h>

#include <atomic>
#include <cstddef>
#include <span>
#include <thread>
#include <vector>

namespace zeroshard {
namespace {

TEST(ItemsOfLaneTest, EveryItemOnceInOrder) {
  for (size_t items : {0u, 1u, 2u, 5u, 7u, 100u}) {
    for (int lanes : {1, 2, 3, 8}) {
      size_t next = 0;
      for (int lane = 0; lane < lanes; ++lane) {
        const ItemRange range = ItemsOfLane(items, lane, lanes);
        EXPECT_EQ(range.begin, next);
        EXPECT_LE(range.end - range.begin, (items + lanes - 1) / lanes);
        next = range.end;
      }
      EXPECT_EQ(next, items);
    }
  }
}

class ThreadPoolTest : public ::testing::TestWithParam<int> {};

TEST_P(ThreadPoolTest, RunsEveryItemOnItsLane) {
  const auto pool = *ThreadPool::Create({.threads = GetParam()});
  for (int round = 0; round < 300; ++round) {
    const size_t items = static_cast<size_t>(round % 17);
    std::vector<int> lane_of(items, -1);
    pool->ParallelFor(items, [&](size_t item, int lane) {
      EXPECT_EQ(lane_of[item], -1);
      lane_of[item] = lane;
    });
    for (int lane = 0; lane < pool->lanes(); ++lane) {
      const ItemRange range = ItemsOfLane(items, lane, pool->lanes());
      for (size_t item = range.begin; item < range.end; ++item) EXPECT_EQ(lane_of[item], lane);
    }
  }
}

TEST_P(ThreadPoolTest, EveryLaneHasTheSameFloatStateAndTheCallerKeepsHis) {
  const auto pool = *ThreadPool::Create({.threads = GetParam()});
  const uint32_t before = _mm_getcsr();
  const uint32_t flushing = before | 0x8040;  // flush to zero, denormals are zero
  _mm_setcsr(flushing);
  std::vector<uint32_t> states(64);
  pool->ParallelFor(states.size(), [&](size_t item, int) { states[item] = _mm_getcsr() & ~0x3fu; });
  const uint32_t after = _mm_getcsr();
  _mm_setcsr(before);
  for (uint32_t state : states) EXPECT_EQ(state, 0x1f80u);
  EXPECT_EQ(after & ~0x3fu, flushing & ~0x3fu);
}

TEST_P(ThreadPoolTest, CallersFromSeveralThreadsTakeTurns) {
  const auto pool = *ThreadPool::Create({.threads = GetParam()});
  std::atomic<int> count = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int i = 0; i < 100; ++i) pool->ParallelFor(3, [&](size_t, int) { ++count; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(count, 1200);
}

INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolTest, ::testing::Values(1, 2, 3, 5));

TEST(ThreadPoolCreateTest, RefusesBadOptions) {
  EXPECT_EQ(ThreadPool::Create({.threads = 0}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ThreadPool::Create({.threads = 1, .cpus = {100000}}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(ThreadPoolCreateTest, PinsToTheGivenProcessors) {
  const int cpu = AllowedCpus().back();
  const auto pool = *ThreadPool::Create({.threads = 2, .cpus = {cpu}, .pin = true});
  int seen = -1;
  pool->ParallelFor(2, [&](size_t, int lane) {
    if (lane == 1) seen = sched_getcpu();
  });
  EXPECT_EQ(seen, cpu);
}

// Two pools of four lanes each on two cores, as the workers of two jobs are.
TEST(ThreadPoolBudgetTest, RunsAllLanesOnTheCoresThereAre) {
  std::vector<std::byte> memory(CoreBudget::Bytes() + 64);
  const size_t skip = 64 - reinterpret_cast<uintptr_t>(memory.data()) % 64;
  const CoreBudget budget =
      *CoreBudget::Format(std::span(memory).subspan(skip), {{.os_index = 0, .cpus = {0, 1}}});
  std::atomic<int> running = 0;
  std::atomic<int> most = 0;
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 2; ++caller) {
    callers.emplace_back([&] {
      const uint32_t holder = *budget.AddHolder(0);
      const auto pool = *ThreadPool::Create(
          {.threads = 4, .cores = CoreShare{.budget = budget, .holder = holder}});
      for (int round = 0; round < 300; ++round) {
        std::vector<int> lane_of(9, -1);
        pool->ParallelFor(lane_of.size(), [&](size_t item, int lane) {
          const int now = ++running;
          int before = most;
          while (before < now && !most.compare_exchange_weak(before, now)) {
          }
          EXPECT_EQ(lane_of[item], -1);
          lane_of[item] = lane;
          --running;
        });
        for (int lane = 0; lane < 4; ++lane) {
          const ItemRange range = ItemsOfLane(lane_of.size(), lane, 4);
          for (size_t item = range.begin; item < range.end; ++item) EXPECT_EQ(lane_of[item], lane);
        }
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_LE(most, 2);
  EXPECT_EQ(budget.usage(0).in_use, 0u);
  EXPECT_GT(budget.usage(0).busy_seconds, 0);
}

TEST(ThreadPoolProgressTest, EveryItemRaisesIt) {
  std::atomic<uint64_t> progress = 0;
  const auto pool = *ThreadPool::Create({.threads = 2, .progress = &progress});
  pool->ParallelFor(17, [](size_t, int) {});
  EXPECT_EQ(progress, 17u);
}

}  // namespace
}  // namespace zeroshard
