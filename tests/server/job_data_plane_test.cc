// The life of jobs whose ranks have a data plane: one rank's death is everybody's, and all come
// back together.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tests/server/job_story.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Two ranks of processes 100 and 101, a worker each.
class DataPlaneStory : public JobStory {
 public:
  DataPlaneStory() {
    spec_.world_size = 2;
    spec_.local_ranks = 2;
    state_ = NewJob("gpt", spec_, /*workers=*/2, {.rejoin_timeout = absl::Seconds(60)});
    state_.data_plane = true;
  }
  uint64_t Attach(uint32_t rank, int64_t pid, const std::string& gave_up = "") {
    AttachRequested in;
    in.attach_id = next_attach_++;
    in.rank = rank;
    in.pid = pid;
    in.spec = std::make_shared<JobSpec>(spec_);
    in.deadline = now_ + absl::Seconds(30);
    in.gave_up = gave_up;
    in.step = 8;
    Feed(in);
    return in.attach_id;
  }
  void Die(uint32_t rank) { Feed(RankGone{rank, state_.ranks[rank].attach_id, /*step=*/8}); }
  void Start() {
    Attach(0, 100);
    Attach(1, 101);
    Ready(0);
    Ready(1);
    ASSERT_EQ(state_.phase, JobPhase::kReady);
  }
};

TEST(JobDataPlane, TheDeathOfARankAbortsTheStepOfTheOthersAtOnce) {
  DataPlaneStory job;
  job.Start();
  job.Die(1);
  const auto poison = job.All<PoisonGeneration>();
  ASSERT_EQ(poison.size(), 1u);
  EXPECT_EQ(poison[0].status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(std::string(poison[0].status.message()), "step 8 aborted: rank 1 (process 101) died");
  EXPECT_THAT(job.All<DropAttempt>(), IsEmpty()) << "rank 0 is still in it";
  EXPECT_EQ(job.state_.phase, JobPhase::kReady);
}

TEST(JobDataPlane, SurvivorAndSuccessorFormTheNextGenerationTogether) {
  DataPlaneStory job;
  job.Start();
  job.Die(1);
  job.Attach(0, 100);  // the same process
  EXPECT_THAT(job.All<FailAttach>(), IsEmpty()) << job.Refused();
  ASSERT_EQ(job.All<AnnounceRankDied>().size(), 1u) << "its old session ends";
  ASSERT_EQ(job.All<DropAttempt>().size(), 1u) << "nobody is left in the dead generation";
  EXPECT_THAT(job.All<ReplyAttached>(), IsEmpty()) << "rank 1 is not here";
  EXPECT_EQ(job.state_.phase, JobPhase::kForming);
  const uint64_t dropped = job.state_.generation;

  job.Attach(1, 202);
  ASSERT_EQ(job.All<ReplyAttached>().size(), 2u);
  EXPECT_TRUE(job.All<ReplyAttached>()[0].resumed);
  EXPECT_EQ(job.state_.phase, JobPhase::kReady);
  EXPECT_TRUE(job.state_.poison.ok());
  EXPECT_GT(job.state_.generation, dropped);
}

TEST(JobDataPlane, TheSuccessorMayComeBeforeTheSurvivorReturns) {
  DataPlaneStory job;
  job.Start();
  job.Die(1);
  job.Attach(1, 202);
  EXPECT_THAT(job.actions_, IsEmpty()) << "it waits: " << job.reason_;
  job.Attach(0, 100);
  EXPECT_EQ(job.All<DropAttempt>().size(), 1u);
  EXPECT_EQ(job.All<ReplyAttached>().size(), 2u);
  EXPECT_EQ(job.state_.phase, JobPhase::kReady);
}

TEST(JobDataPlane, WorkersHearOfTheDropBeforeTheRanksOfTheNextGeneration) {
  DataPlaneStory job;
  job.Start();
  job.Die(1);
  job.Attach(1, 202);
  job.Attach(0, 100);
  size_t left = 0, dropped = 0, announced = 0;
  for (size_t i = 0; i < job.actions_.size(); ++i) {
    if (std::holds_alternative<AnnounceRankDied>(job.actions_[i])) left = i;
    if (std::holds_alternative<DropAttempt>(job.actions_[i])) dropped = i;
    if (std::holds_alternative<AnnounceRank>(job.actions_[i]) && announced == 0) announced = i;
  }
  EXPECT_LT(left, dropped);
  EXPECT_LT(dropped, announced);
}

TEST(JobDataPlane, ASurvivorThatEndsIsAsGoodAsOneThatReturns) {
  DataPlaneStory job;
  job.Start();
  job.Die(1);
  job.Attach(1, 202);
  job.Die(0);
  EXPECT_EQ(job.All<DropAttempt>().size(), 1u);
  EXPECT_EQ(job.state_.phase, JobPhase::kForming);
  job.Attach(0, 201);
  EXPECT_EQ(job.All<ReplyAttached>().size(), 2u);
}

TEST(JobDataPlane, AnotherProcessCannotTakeThePlaceOfASurvivor) {
  DataPlaneStory job;
  job.Start();
  job.Die(1);
  job.Attach(0, 300);
  EXPECT_THAT(job.Refused(), HasSubstr("rank 0 of job 'gpt' is held by process 100"));
}

TEST(JobDataPlane, ARankWhoseCommunicatorFailedEndsTheGenerationWithItsReason) {
  DataPlaneStory job;
  job.Start();
  job.Attach(0, 100, "NCCL: unhandled system error");
  const auto poison = job.All<PoisonGeneration>();
  ASSERT_EQ(poison.size(), 1u);
  EXPECT_EQ(std::string(poison[0].status.message()),
            "step 8 aborted: rank 0 (process 100): NCCL: unhandled system error");
  EXPECT_THAT(job.reason_, HasSubstr("NCCL: unhandled system error")) << "the log tells it";
  job.Attach(1, 101);
  EXPECT_EQ(job.All<ReplyAttached>().size(), 2u) << job.reason_;
}

TEST(JobDataPlane, ALiveRankIsNotAttachedTwiceByMistake) {
  DataPlaneStory job;
  job.Start();
  job.Attach(0, 100);
  EXPECT_THAT(job.Refused(), HasSubstr("is held by process 100"));
  EXPECT_TRUE(job.state_.poison.ok());
}

TEST(JobDataPlane, AnErrorOfAWorkerIsSurvivedByAttachingAgain) {
  DataPlaneStory job;
  job.Start();
  job.Feed(GenerationPoisoned{job.state_.generation, absl::InternalError("device lost")});
  EXPECT_EQ(job.All<PoisonGeneration>().size(), 1u);
  job.Attach(0, 100);
  job.Attach(1, 101);
  EXPECT_EQ(job.All<ReplyAttached>().size(), 2u);
  EXPECT_EQ(job.state_.phase, JobPhase::kReady);
}

TEST(JobDataPlane, AHungSurvivorIsNamedWhenTheOthersHaveWaitedLongEnough) {
  DataPlaneStory job;
  job.Start();
  job.Die(1);
  job.Attach(1, 202);
  job.TickAtDeadline();
  EXPECT_THAT(job.Refused(),
              AllOf(HasSubstr("the next generation cannot form: rank 0 (process 100)"),
                    HasSubstr("neither attached again nor ended")));
  job.Attach(0, 100);
  job.Attach(1, 203);
  EXPECT_EQ(job.All<ReplyAttached>().size(), 2u) << job.reason_;
}

TEST(JobDataPlane, AMissingSuccessorIsNamed) {
  DataPlaneStory job;
  job.Start();
  job.Die(1);
  job.Attach(0, 100);
  job.TickAtDeadline();
  EXPECT_THAT(job.Refused(), HasSubstr("missing: rank 1"));
  EXPECT_EQ(job.state_.phase, JobPhase::kIdle) << "the state is kept";
}

TEST(JobDataPlane, TheLastRankToDieLeavesAnIdleJob) {
  DataPlaneStory job;
  job.Start();
  job.Die(1);
  job.Die(0);
  EXPECT_EQ(job.All<DropAttempt>().size(), 1u);
  EXPECT_EQ(job.state_.phase, JobPhase::kIdle);
  EXPECT_TRUE(job.state_.poison.ok());
}

TEST(JobDataPlane, DetachingDisturbsNobody) {
  DataPlaneStory job;
  job.Start();
  job.Feed(DetachRequested{1, /*keep=*/false});
  EXPECT_THAT(job.All<PoisonGeneration>(), IsEmpty());
  job.Feed(DetachRequested{0, /*keep=*/false});
  EXPECT_EQ(job.state_.phase, JobPhase::kEnded);
}

TEST(JobDataPlane, ARankThatReturnsAfterItDetachedWaitsForAllOthers) {
  DataPlaneStory job;
  job.Start();
  job.Feed(DetachRequested{1, /*keep=*/true});
  job.Attach(1, 202);
  EXPECT_THAT(job.All<ReplyAttached>(), IsEmpty()) << "rank 0's communicator knows process 101";
  job.Feed(DetachRequested{0, /*keep=*/true});
  EXPECT_EQ(job.state_.phase, JobPhase::kForming);
  job.Attach(0, 203);
  EXPECT_EQ(job.All<ReplyAttached>().size(), 2u);
}

TEST(JobDataPlane, NobodyAttachesWithoutTheOthersWhenOneDiesWhileWorkersStart) {
  DataPlaneStory job;
  job.Attach(0, 100);
  job.Attach(1, 101);
  job.Die(1);
  job.Ready(0);
  job.Ready(1);
  EXPECT_THAT(job.All<ReplyAttached>(), IsEmpty());
  job.Attach(1, 202);
  EXPECT_EQ(job.All<ReplyAttached>().size(), 2u);
}

TEST(JobDataPlane, WorkersThatCannotStartFailWhoeverStillWaits) {
  DataPlaneStory job;
  job.Attach(0, 100);
  job.Attach(1, 101);
  job.Die(1);
  job.Feed(StartFailed{absl::ResourceExhaustedError("cuda:0 is full")});
  EXPECT_THAT(job.Refused(), HasSubstr("cuda:0 is full"));
  EXPECT_EQ(job.state_.phase, JobPhase::kEnded);
}

TEST(JobDataPlane, AWorkerThatRestartsIsAwaitedByTheNextGeneration) {
  DataPlaneStory job;
  job.Start();
  job.Feed(WorkerDied{0, 1, "killed by signal 9", absl::OkStatus()});
  job.Die(1);
  job.Attach(0, 100);
  job.Attach(1, 202);
  EXPECT_THAT(job.All<ReplyAttached>(), IsEmpty());
  job.Ready(0);
  EXPECT_EQ(job.All<ReplyAttached>().size(), 2u);
}

TEST(JobDataPlane, NewsOfTheDeadGenerationDoesNotKillTheNext) {
  DataPlaneStory job;
  job.Start();
  const uint64_t old = job.state_.generation;
  job.Die(1);
  job.Attach(0, 100);
  job.Attach(1, 202);
  job.Feed(GenerationPoisoned{old, absl::AbortedError("late")});
  EXPECT_TRUE(job.state_.poison.ok());
}

}  // namespace
}  // namespace zeroshard
