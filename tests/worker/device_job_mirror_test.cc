// Jobs with mirrors of their GPUs' memory: a lost device takes the job back to its last mirror,
// from where it ends with the bits of an undisturbed run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/worker/device_jobs.h"

namespace zeroshard {
namespace {

using model::v1::TIER_HOST;
using Where = DeviceJob::Where;

constexpr uint32_t kSteps = 6;

MirrorPoint LastMirror(DeviceJob& job, uint32_t worker) {
  return job.device(worker).LastMirror().value_or(MirrorPoint{});
}

ThreadPool& Pool() {
  static const auto pool = *ThreadPool::Create({.threads = 1});
  return *pool;
}

internal::v1::GoBack GoBackTo(DeviceJob& job, uint64_t attempt) {
  internal::v1::GoBack command;
  command.set_attempt(attempt);
  command.mutable_poison()->set_generation(job.job().memory(0).board().header().generation.load());
  command.mutable_poison()->set_code(static_cast<uint32_t>(absl::StatusCode::kAborted));
  command.mutable_poison()->set_message("the job goes back");
  const JobMemory& memory = job.job().memory(0);
  for (uint32_t w = 0; w < memory.workers() && !memory.one_island(); ++w) {
    const uint64_t attempt = job.job().memory(w).board().attempt();
    command.set_committed_as(std::max(command.committed_as(), attempt + 1));
  }
  return command;
}

// What the server says when all workers are there.
void GoBack(DeviceJob& job, uint64_t attempt, uint32_t workers) {
  const internal::v1::GoBack command = GoBackTo(job, attempt);
  for (uint32_t w = 0; w < workers; ++w) {
    ASSERT_TRUE(job.job().engine(w).GoBack(command).ok()) << job.job().engine(w).GoBack(command);
  }
}

// Steps [from, to), each with a user_state of its own.
void TrainNamed(DeviceJob& job, uint32_t from, uint32_t to, uint32_t ranks) {
  for (uint32_t step = from; step < to; ++step) {
    job.Scatter(step);
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      job.job().Step(rank, 1, 0.01, absl::StrCat("rank ", rank, " after ", step + 1));
    }
    job.job().Run();
    ASSERT_EQ(job.job().result(0).step, step + 1) << job.LastFailure();
  }
}

TEST(DeviceJobMirrorTest, IsTakenAtFirstAndAfterEveryKthStep) {
  DeviceJob job({.stage = 3, .mirror_steps = 3}, Where::kDevice);
  EXPECT_EQ(LastMirror(job, 0).step, 0u) << "nothing is trained yet";
  for (const auto& [steps, mirrored] :
       {std::pair{1u, 1u}, {2u, 1u}, {3u, 3u}, {5u, 3u}, {6u, 6u}}) {
    job.Train(static_cast<uint32_t>(job.job().memory(0).board().numbers().step), steps);
    job.job().Run();
    for (uint32_t w = 0; w < 2; ++w) EXPECT_EQ(LastMirror(job, w).step, mirrored) << steps;
  }
  EXPECT_EQ(job.job().engine(0).Stats().gpu_mirror_step(), 6u);
  EXPECT_GT(job.job().engine(0).Stats().gpu_mirror_us(), 0u);
  EXPECT_TRUE(job.State() == TrainedOnHost({.stage = 3}, kSteps));
}

TEST(DeviceJobMirrorTest, WithoutThemNothingIsMirrored) {
  DeviceJob job({}, Where::kDevice);
  job.Train(0, 2);
  EXPECT_FALSE(job.device(0).LastMirror().has_value());
  EXPECT_EQ(job.device(0).LoadMirror(2, Pool()).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

void ExpectTheBitsAfterALoss(const DeviceCase& c, const std::vector<uint32_t>& lost) {
  const std::string expected = TrainedOnHost(c, kSteps);
  DeviceJob job(c, Where::kDevice);
  TrainNamed(job, 0, 5, c.ranks);
  const MirrorPoint last = LastMirror(job, 0);
  ASSERT_EQ(last.step, 4u);
  job.Scatter(5);  // of a step that will not be
  for (const uint32_t w : lost) job.job().LoseDevice(w);
  EXPECT_TRUE(job.device(lost[0]).IsBlank());
  GoBack(job, last.attempt, c.ranks);
  EXPECT_FALSE(job.device(lost[0]).IsBlank());
  job.NextGeneration();
  for (uint32_t rank = 0; rank < c.ranks; ++rank) {
    EXPECT_EQ(job.job().hello(rank).step(), 4u);
    EXPECT_EQ(job.job().hello(rank).user_state(), absl::StrCat("rank ", rank, " after 4"));
  }
  TrainNamed(job, 4, kSteps, c.ranks);
  ASSERT_TRUE(job.State() == expected) << Describe(c);
  job.job().Run();
  EXPECT_EQ(LastMirror(job, 0).step, kSteps - kSteps % c.mirror_steps);
}

TEST(DeviceJobMirrorTest, ALostDeviceTakesTheJobBack) {
  ExpectTheBitsAfterALoss({.stage = 3, .mirror_steps = 2}, {1});
  ExpectTheBitsAfterALoss({.stage = 1, .ranks = 1, .mirror_steps = 4}, {0});
  ExpectTheBitsAfterALoss({.stage = 2, .ranks = 3, .mirror_steps = 2}, {0, 2});
}

TEST(DeviceJobMirrorTest, AlsoOfOtherFormsAndOfStatesThatArePartlyOnTheHost) {
  ExpectTheBitsAfterALoss({.form = "adam_int8_split", .stage = 3, .mirror_steps = 2}, {0});
  ExpectTheBitsAfterALoss({.stage = 3, .tier = TIER_HOST, .ratio = 0.5, .mirror_steps = 2}, {1});
  ExpectTheBitsAfterALoss({.stage = 2, .tier = TIER_HOST, .mirror_steps = 2}, {1});
  ExpectTheBitsAfterALoss(
      {.stage = 3, .tier = TIER_HOST, .ratio = 0.5, .mirror_steps = 2, .host_parameters = true},
      {0});
}

TEST(DeviceJobMirrorTest, AlsoWorkersThatShareNoMemory) {
  ExpectTheBitsAfterALoss({.stage = 3, .mirror_steps = 2, .islands = true}, {0});
  ExpectTheBitsAfterALoss({.stage = 2, .tier = TIER_HOST, .mirror_steps = 2, .islands = true}, {1});
}

// One of them has yet to commit what the other one has committed.
TEST(DeviceJobMirrorTest, IslandsAtDifferentAttemptsGoBackTogether) {
  const DeviceCase c{.stage = 3, .mirror_steps = 2, .islands = true};
  for (const uint32_t lost : {0u, 1u}) {
    DeviceJob job(c, Where::kDevice);
    job.Train(0, 5);
    const MirrorPoint last = LastMirror(job, 1);
    ASSERT_EQ(last.step, 4u);
    job.Scatter(5);
    for (uint32_t rank = 0; rank < 2; ++rank) job.job().Step(rank, 1, 0.01);
    const auto committed = [&](uint32_t w) {
      return job.job().memory(w).board().committed_attempt();
    };
    for (int turn = 0; turn < 5000 && committed(0) == committed(1); ++turn) {
      job.job().RunWorker(turn % 2);
      absl::SleepFor(absl::Milliseconds(1));
    }
    ASSERT_NE(committed(0), committed(1));
    job.job().LoseDevice(lost);
    const internal::v1::GoBack command = GoBackTo(job, last.attempt);
    for (const uint32_t w : {0u, 1u, 0u}) {
      ASSERT_TRUE(job.job().engine(w).GoBack(command).ok()) << "may be said again";
    }
    for (uint32_t w = 0; w < 2; ++w) {
      const Board& board = job.job().memory(w).board();
      EXPECT_EQ(board.committed_attempt(), command.committed_as());
      EXPECT_EQ(board.attempt(), command.committed_as() + 1);
      EXPECT_EQ(board.numbers().step, 4u);
    }
    job.NextGeneration();
    job.Train(4, kSteps);
    EXPECT_TRUE(job.State() == TrainedOnHost(c, kSteps)) << lost;
  }
}

// One worker has applied the decided step, the other one has lost its device before it.
TEST(DeviceJobMirrorTest, ADecidedStepIsGivenUp) {
  const DeviceCase c{.stage = 2, .mirror_steps = 2};
  DeviceJob job(c, Where::kDevice);
  job.Train(0, 5);
  const MirrorPoint last = LastMirror(job, 0);
  job.Scatter(5);
  for (uint32_t rank = 0; rank < 2; ++rank) job.job().Step(rank, 1, 0.01);
  const Board& board = job.job().memory(0).board();
  const auto ready = [&](uint32_t w) { return board.worker(w).ready.load() == board.attempt(); };
  for (int turn = 0; turn < 5000 && !ready(1); ++turn) {
    job.job().RunWorker(0);
    job.job().RunWorker(1);
    absl::SleepFor(absl::Milliseconds(1));
  }
  const auto applied = [&] { return board.worker(0).applied.load() == board.attempt(); };
  for (int turn = 0; turn < 5000 && !applied(); ++turn) {
    job.job().RunWorker(0);
    absl::SleepFor(absl::Milliseconds(1));
  }
  ASSERT_TRUE(applied());
  ASSERT_FALSE(job.job().engine(0).AtBoundary());
  job.job().LoseDevice(1);
  job.job().RunWorker(1);
  EXPECT_NE(board.worker(1).applied.load(), board.attempt()) << "with memory that holds nothing";
  GoBack(job, last.attempt, 2);
  job.NextGeneration();
  EXPECT_EQ(job.job().hello(1).step(), 4u);
  job.Train(4, kSteps);
  EXPECT_TRUE(job.State() == TrainedOnHost(c, kSteps));
}

// Byte `at` of the half that holds the attempt.
std::byte& InMirror(DeviceJob& job, uint32_t worker, uint64_t attempt, uint64_t at) {
  const JobMemory& memory = job.job().memory(worker);
  std::byte* const begin = memory.device_mirror().data();
  const uint64_t half_bytes = memory.mirror_plan()->half_bytes();
  for (uint64_t half = 0; half < 2; ++half) {
    uint64_t found = 0;
    std::memcpy(&found, begin + half * half_bytes + 48, sizeof(found));
    if (found == attempt) return begin[half * half_bytes + at];
  }
  ADD_FAILURE() << "no mirror of attempt " << attempt;
  return *begin;
}

// A bit of a mirror has changed: it is told before anything is loaded, and the mirror before that
// one is still there.
TEST(DeviceJobMirrorTest, ADamagedMirrorIsNamedAndTheOtherOneIsLoaded) {
  const DeviceCase c{.stage = 3, .mirror_steps = 2};
  for (const bool parameters : {false, true}) {
    DeviceJob job(c, Where::kDevice);
    job.Train(0, 3);
    const MirrorPoint before = LastMirror(job, 0);
    ASSERT_EQ(before.step, 2u);
    job.Train(3, 5);
    const MirrorPoint last = LastMirror(job, 0);
    ASSERT_EQ(last.step, 4u);
    job.job().LoseDevice(1);
    const MirrorPlan& plan = *job.job().memory(1).mirror_plan();
    const auto is_parameters = [](const MirrorPart& part) {
      return part.image == MirrorPart::kNone;
    };
    const auto part = std::find_if(plan.parts().begin(), plan.parts().end(),
                                   [&](const auto& p) { return is_parameters(p) == parameters; });
    ASSERT_NE(part, plan.parts().end());
    InMirror(job, 1, last.attempt, part->offset + part->bytes / 2) ^= std::byte{4};
    ASSERT_TRUE(job.job().engine(0).GoBack(GoBackTo(job, last.attempt)).ok());
    const absl::Status status = job.job().engine(1).GoBack(GoBackTo(job, last.attempt));
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_TRUE(IsMemoryLost(status)) << "the server chooses the other mirror";
    const std::string name = absl::StrCat(parameters ? "parameters of unit " : "chunk ",
                                          parameters ? part->unit : part->image);
    EXPECT_TRUE(absl::StrContains(status.message(), name)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "of worker 1")) << status;
    EXPECT_EQ(job.job().engine(1).Stats().gpu_damaged_mirrors(), 1u);
    EXPECT_TRUE(job.device(1).IsBlank()) << "nothing was loaded";
    EXPECT_EQ(LastMirror(job, 1), before);
    GoBack(job, before.attempt, 2);
    job.NextGeneration();
    job.Train(2, kSteps);
    EXPECT_TRUE(job.State() == TrainedOnHost(c, kSteps));
  }
}

TEST(DeviceJobMirrorTest, MaySayItAgainAndLoseTheDeviceAgain) {
  const DeviceCase c{.stage = 3, .mirror_steps = 2};
  DeviceJob job(c, Where::kDevice);
  job.Train(0, 5);
  const MirrorPoint last = LastMirror(job, 0);
  for (const uint32_t lost : {0u, 1u, 0u}) {
    job.job().LoseDevice(lost);
    GoBack(job, last.attempt, 2);
  }
  job.NextGeneration();
  job.Train(4, kSteps);
  EXPECT_TRUE(job.State() == TrainedOnHost(c, kSteps));
}

TEST(DeviceJobMirrorTest, AfterARestoreThereIsANewMirrorAtOnce) {
  DeviceJob job({.stage = 3, .mirror_steps = 4}, Where::kDevice);
  job.Train(0, 5);
  const records::v1::JobState state = job.job().engine(0).JobState();
  for (uint32_t w = 0; w < 2; ++w) {
    ASSERT_TRUE(job.job().engine(w).FinishRestore(state, /*parameters_only=*/false).ok());
  }
  job.job().Run();
  const uint64_t committed = job.job().memory(0).board().committed_attempt();
  for (uint32_t w = 0; w < 2; ++w) {
    EXPECT_EQ(LastMirror(job, w), (MirrorPoint{committed, 5}));
    const JobMemory& memory = job.job().memory(w);
    EXPECT_EQ(DeviceMirror::PointsIn(memory.device_mirror(), memory.start().job_id()).size(), 1u)
        << "what was before the restore";
  }
}

TEST(DeviceJobMirrorTest, AMirrorThatThereIsNotIsAnError) {
  DeviceJob job({.mirror_steps = 2}, Where::kDevice);
  job.Train(0, 2);
  EXPECT_EQ(job.device(1).LoadMirror(77, Pool()).status().code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace zeroshard
