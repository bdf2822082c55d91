// Ranks that die, come again or never come, in the middle of a step of the engine.
#include <gtest/gtest.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "tests/worker/engine_fixture.h"

namespace zeroshard {
namespace {

// All ranks of two workers die, and others come.
void ReplaceAllRanks(LocalJob& job) {
  const uint64_t generation = job.next_generation();
  for (uint32_t w = 0; w < 2; ++w) job.engine(w).OnDropAttempt(generation);
  job.Run();
  for (uint32_t rank = 0; rank < 2; ++rank) job.Hello(rank, false);
  job.Run();
}

// The steps of Train, by two ranks. The fake has one place for a rank's gradients.
void TrainTwoSteps(LocalJob& job, uint32_t micro_steps) {
  for (uint32_t step = 0; step < 2; ++step) {
    for (uint32_t micro = 0; micro < micro_steps; ++micro) {
      for (uint32_t rank = 0; rank < 2; ++rank) {
        job.ScatterAll(rank, micro, GradientsOf(step, micro, rank));
      }
      job.Run();
    }
    for (uint32_t rank = 0; rank < 2; ++rank) job.Step(rank, micro_steps, 0.01);
    job.Run();
  }
}

TEST(EngineTest, ADeadRanksSuccessorReplaysTheStepInFlight) {
  const Variant v{.stage = 2, .workers = 2, .ranks = 3, .micro_steps = 3};
  const std::string expected = Train(v);
  LocalJob job(Options(v));
  job.PutParameters(RandomValues(kSizes, 1));
  for (uint32_t step = 0; step < 2; ++step) {
    // Rank 1 dies with its gradients on the board; rank 0 waits for others, rank 2 has not begun.
    job.ScatterAll(0, 0, GradientsOf(step, 0, 0));
    job.ScatterAll(1, 0, GradientsOf(step, 0, 1));
    job.Run();
    job.Hello(1, /*reconnect=*/false);
    job.Run();
    EXPECT_EQ(job.hello(1).step(), step);
    EXPECT_TRUE(job.hello(1).initialized());
    std::memset(job.gradient_window(1), 0x7f,
                64);  // the successor writes to the window as it likes
    for (uint32_t micro = 0; micro < v.micro_steps; ++micro) {
      // The window's slots are free again only once a micro-step is summed.
      for (uint32_t rank : {2u, 1u, 0u}) {
        if (rank != 0 || micro != 0) job.ScatterAll(rank, micro, GradientsOf(step, micro, rank));
      }
      job.Run();
    }
    for (uint32_t rank = 0; rank < v.ranks; ++rank) {
      job.Step(rank, v.micro_steps, 0.01, absl::StrCat("rank ", rank, " step ", step));
    }
    job.Run();
    EXPECT_EQ(job.result(0).step, step + 1);
  }
  EXPECT_TRUE(job.StateBytes() == expected);
  job.Hello(2, false);
  job.Run();
  EXPECT_EQ(job.hello(2).step(), 2u);
  EXPECT_EQ(job.hello(2).user_state(), "rank 2 step 1");
}

TEST(EngineTest, ARankThatDiesAfterItArrivedGetsTheResultOfTheStep) {
  const Variant v{.stage = 3, .workers = 1, .ranks = 2};
  LocalJob job(Options(v));
  job.PutParameters(RandomValues(kSizes, 1));
  job.ScatterAll(0, 0, GradientsOf(0, 0, 0));
  job.Step(0, 1, 0.01, "mine");
  job.Run();
  job.Hello(0, false);
  job.Run();
  EXPECT_EQ(job.hello(0).step(), 0u) << "no new reply before the step in flight is settled";
  job.ScatterAll(1, 0, GradientsOf(0, 0, 1));
  job.Step(1, 1, 0.01);
  job.Run();
  EXPECT_EQ(job.hello(0).step(), 1u);
  EXPECT_EQ(job.hello(0).user_state(), "mine");
}

TEST(EngineTest, GradientsOfADroppedStepAreForgotten) {
  const Variant v{.stage = 3, .workers = 2, .ranks = 2, .micro_steps = 3};
  const std::string expected = Train(v);
  LocalJob job(Options(v));
  job.PutParameters(RandomValues(kSizes, 1));
  // Both ranks die in the first step, with different gradients than the ones to come.
  for (uint32_t rank = 0; rank < 2; ++rank) job.ScatterAll(rank, 0, GradientsOf(77, 0, rank));
  job.ScatterAll(0, 1, GradientsOf(77, 1, 0));
  job.Run();
  ReplaceAllRanks(job);
  TrainTwoSteps(job, v.micro_steps);
  EXPECT_TRUE(job.StateBytes() == expected);
}

// A whole step was queued behind a gradient that waits for the other rank.
TEST(EngineTest, WhatDeadProcessesHadQueuedIsNotTakenForTheNextStep) {
  for (bool islands : {false, true}) {
    const Variant v{.stage = 3, .workers = 2, .ranks = 2, .micro_steps = 3, .islands = islands};
    const std::string expected = Train(v);
    LocalJob job(Options(v));
    job.PutParameters(RandomValues(kSizes, 1));
    for (uint32_t micro = 0; micro < 3; ++micro) job.ScatterAll(0, micro, GradientsOf(0, micro, 0));
    job.Step(0, 3, 0.01);
    job.ScatterAll(1, 0, GradientsOf(0, 0, 1));
    job.Run();
    ReplaceAllRanks(job);
    EXPECT_EQ(job.hello(0).step(), 0u);
    TrainTwoSteps(job, v.micro_steps);
    EXPECT_TRUE(job.StateBytes() == expected) << "islands " << islands;
  }
}

// All ranks die when the leader has decided and another island has not heard of it, or when one has
// committed and another not yet.
TEST(EngineTest, IslandsAgreeOnWhichStepIsDropped) {
  const Variant v{.stage = 2, .workers = 2, .ranks = 2, .islands = true};
  const std::string expected = Train(v);
  for (uint32_t turns = 0; turns < 12; ++turns) {
    LocalJob job(Options(v));
    job.PutParameters(RandomValues(kSizes, 1));
    for (uint32_t rank = 0; rank < 2; ++rank) {
      job.ScatterAll(rank, 0, GradientsOf(0, 0, rank));
      job.Step(rank, 1, 0.01);
    }
    for (uint32_t turn = 0; turn < turns; ++turn) job.RunWorker(turn % 2);
    const uint64_t generation = job.next_generation();
    for (uint32_t w : {1, 0}) job.engine(w).OnDropAttempt(generation);
    for (uint32_t rank = 0; rank < 2; ++rank) job.Hello(rank, false);
    job.Run();
    const uint64_t done = job.hello(0).step();
    ASSERT_EQ(job.hello(1).step(), done) << "after " << turns << " turns";
    ASSERT_EQ(job.hello(1).attempt(), job.hello(0).attempt());
    for (uint64_t step = done; step < 2; ++step) {
      for (uint32_t rank = 0; rank < 2; ++rank) {
        job.ScatterAll(rank, 0, GradientsOf(step, 0, rank));
        job.Step(rank, 1, 0.01);
      }
      job.Run();
    }
    EXPECT_TRUE(job.StateBytes() == expected) << "after " << turns << " turns, step " << done;
  }
}

TEST(EngineTest, ARankThatNeverComesIsNamedWithinTheDeadline) {
  LocalJobOptions options = Options({.stage = 3, .workers = 2, .ranks = 3});
  options.config.set_collective_timeout_ms(1000);
  LocalJob job(std::move(options));
  job.PutParameters(RandomValues(kSizes, 1));
  for (uint32_t rank : {0u, 2u}) {
    job.ScatterAll(rank, 0, GradientsOf(0, 0, rank));
    job.Step(rank, 1, 0.01);
  }
  job.Run();
  for (int i = 0; i < 30; ++i) {
    job.clock().Advance(absl::Milliseconds(100));
    for (uint32_t w = 0; w < 2; ++w) job.engine(w).Tick();
    job.Run();
  }
  for (uint32_t rank = 0; rank < 3; ++rank) {
    ASSERT_FALSE(job.failures(rank).empty()) << rank;
    EXPECT_NE(job.failures(rank).back().message().find("rank 1"), std::string::npos);
    EXPECT_EQ(job.failures(rank).back().message().find("rank 2 ("), std::string::npos);
  }
}

}  // namespace
}  // namespace zeroshard
