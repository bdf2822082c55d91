#include "device/cpu/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <xmmintrin.h>

#include <atomic>
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

TEST(CpusOfNumaNodeTest, KnowsWhatIsThere) {
  EXPECT_EQ(CpusOfNumaNode(9999).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(CpusOfNumaNode(-1).status().code(), absl::StatusCode::kNotFound);
  const auto node0 = CpusOfNumaNode(0);
  if (!node0.ok()) GTEST_SKIP() << "the kernel shows no NUMA node 0";
  EXPECT_FALSE(node0->empty());
}

}  // namespace
}  // namespace zeroshard
