// The life of jobs, told as stories on a clock that is moved by hand: ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/server/job_life.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

TEST(JobForming, AllRanksAttachThenWorkersStartThenEverybodyHears) {
  Story job(2);
  job.Attach(0, 100);
  EXPECT_EQ(job.state_.phase, JobPhase::kForming);
  EXPECT_THAT(job.actions_, IsEmpty());
  EXPECT_EQ(job.reason_, "1 of 2 ranks are here");

  job.Attach(1, 101);
  EXPECT_EQ(job.state_.phase, JobPhase::kStarting);
  EXPECT_EQ(job.All<CreateJob>().size(), 1u);
  EXPECT_EQ(job.state_.generation, 1u);

  job.Ready(0);
  EXPECT_THAT(job.All<ReplyAttached>(), IsEmpty());
  job.Ready(1);
  EXPECT_EQ(job.state_.phase, JobPhase::kReady);
  ASSERT_EQ(job.All<ReplyAttached>().size(), 2u);
  EXPECT_FALSE(job.All<ReplyAttached>()[0].resumed);
  EXPECT_EQ(job.All<AnnounceRank>().size(), 2u);
}

TEST(JobForming, WorkersHearOfARankBeforeItsCallIsAnswered) {
  Story job(1, 1);
  job.Attach(0, 100);
  job.Ready(0);
  ASSERT_GE(job.actions_.size(), 3u);
  size_t announced = 0;
  size_t replied = 0;
  for (size_t i = 0; i < job.actions_.size(); ++i) {
    if (std::holds_alternative<AnnounceRank>(job.actions_[i])) announced = i;
    if (std::holds_alternative<ReplyAttached>(job.actions_[i])) replied = i;
  }
  EXPECT_LT(announced, replied);
}

TEST(JobForming, AMissingRankIsNamedWhenTheDeadlinePasses) {
  Story job(3);
  job.Attach(0, 100);
  job.Attach(2, 102);
  job.Wait(absl::Seconds(31));
  ASSERT_EQ(job.All<FailAttach>().size(), 2u);
  EXPECT_EQ(job.All<FailAttach>()[0].status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(job.All<FailAttach>()[0].status.message()),
              HasSubstr("only 2 of 3 ranks attached in time; missing: rank 1"));
  EXPECT_EQ(job.state_.phase, JobPhase::kEnded);
  EXPECT_EQ(job.All<EndJob>().size(), 1u);
}

TEST(JobForming, WorldSizesThatDisagreeFailBothRanksNamingThemAndTheValues) {
  Story job(2);
  job.Attach(0, 100);
  job.Attach(1, 101, Spec(3));
  ASSERT_EQ(job.All<FailAttach>().size(), 2u);
  for (const FailAttach& failed : job.All<FailAttach>()) {
    EXPECT_EQ(failed.status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(failed.status.message()),
                HasSubstr("world_size is 2 on rank 0 but 3 on rank 1"));
  }
  EXPECT_EQ(job.state_.phase, JobPhase::kEnded);
}

TEST(JobForming, ShapesThatDisagreeNameTheParameterAndBothShapes) {
  Story job(2);
  job.Attach(0, 100);
  JobSpec other = Spec(2);
  other.parameters[0] = "'w': float32[2,4], trainable";
  job.Attach(1, 101, other);
  ASSERT_EQ(job.All<FailAttach>().size(), 2u);
  EXPECT_THAT(std::string(job.All<FailAttach>()[0].status.message()),
              AllOf(HasSubstr("'w': float32[4,2], trainable on rank 0"),
                    HasSubstr("'w': float32[2,4], trainable on rank 1")));
}

TEST(JobForming, ConfigsThatDisagreeShowTheKey) {
  Story job(2);
  job.Attach(0, 100);
  JobSpec other = Spec(2);
  other.config[1] = "zero_optimization.stage = 2";
  job.Attach(1, 101, other);
  ASSERT_EQ(job.All<FailAttach>().size(), 2u);
  EXPECT_THAT(std::string(job.All<FailAttach>()[0].status.message()),
              AllOf(HasSubstr("{zero_optimization.stage = 3} on rank 0"),
                    HasSubstr("{zero_optimization.stage = 2} on rank 1")));
}

TEST(JobForming, AParameterMoreIsADifference) {
  Story job(2);
  job.Attach(0, 100);
  JobSpec other = Spec(2);
  other.parameters.push_back("'c': float32[1], trainable");
  job.Attach(1, 101, other);
  EXPECT_THAT(std::string(job.All<FailAttach>()[0].status.message()),
              HasSubstr("the number of parameters is 2 on rank 0 but 3 on rank 1"));
}

TEST(JobForming, TheSameRankTwiceIsRefusedNamingTheHolder) {
  Story job(2);
  job.Attach(0, 100);
  job.Attach(0, 999);
  EXPECT_THAT(job.Refused(), HasSubstr("rank 0 of job 'gpt' is held by process 100"));
  EXPECT_EQ(job.All<FailAttach>()[0].status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(job.state_.phase, JobPhase::kForming);
}

TEST(JobForming, ACallerThatGivesUpLeavesNothingBehind) {
  Story job(2);
  const uint64_t id = job.Attach(0, 100);
  job.Cancel(id);
  EXPECT_EQ(job.state_.phase, JobPhase::kEnded);
  EXPECT_EQ(job.All<FailAttach>().size(), 1u);
}

TEST(JobForming, ACallerThatGivesUpMayComeBackWhileOthersWait) {
  Story job(3);
  const uint64_t first = job.Attach(0, 100);
  job.Attach(1, 101);
  job.Cancel(first);
  EXPECT_EQ(job.state_.phase, JobPhase::kForming);
  EXPECT_EQ(PresentRanks(job.state_), 1u);
  job.Attach(0, 200);
  job.Attach(2, 102);
  EXPECT_EQ(job.state_.phase, JobPhase::kStarting);
  EXPECT_EQ(job.state_.ranks[0].pid, 200);
}

TEST(JobStarting, MemoryThatCannotBeHadFailsEveryRank) {
  Story job(2);
  job.Attach(0, 100);
  job.Attach(1, 101);
  job.Feed(StartFailed{absl::ResourceExhaustedError("needs 900 GiB")});
  ASSERT_EQ(job.All<FailAttach>().size(), 2u);
  EXPECT_EQ(job.All<FailAttach>()[1].status.message(), "needs 900 GiB");
  EXPECT_EQ(job.state_.phase, JobPhase::kEnded);
}

TEST(JobStarting, AWorkerThatSaysItCannotGoOnFailsTheJobAtOnce) {
  Story job(1);
  job.Attach(0, 100);
  job.WorkerEnds(1, absl::DataLossError("the partition is not this job's"));
  EXPECT_THAT(job.Refused(), HasSubstr("worker 1 of job 'gpt': the partition is not this job's"));
  EXPECT_EQ(job.state_.phase, JobPhase::kEnded);
}

TEST(JobStarting, WorkersThatHangAreNamedAtTheDeadline) {
  Story job(1);
  job.Attach(0, 100);
  job.Ready(0);
  job.Wait(absl::Seconds(31));
  EXPECT_THAT(job.Refused(), HasSubstr("worker 1 is starting"));
  EXPECT_EQ(job.state_.phase, JobPhase::kEnded);
}

TEST(JobReady, ASecondJobOfTheSameNameIsToldWhatDiffersAndHowToRemoveTheFirst) {
  Story job(1);
  job.Start();
  JobSpec other = Spec(1);
  other.config[1] = "zero_optimization.stage = 1";
  job.Attach(0, 200, other);
  EXPECT_THAT(job.Refused(),
              AllOf(HasSubstr("zero_optimization.stage = 1"), HasSubstr("zeroshard remove gpt")));
  EXPECT_EQ(job.All<FailAttach>()[0].status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(job.state_.phase, JobPhase::kReady);
}

TEST(JobReady, AnAttachedRankIsHeld) {
  Story job(2);
  job.Start();
  job.Attach(1, 999);
  EXPECT_THAT(job.Refused(), HasSubstr("held by process 101"));
}

TEST(JobReady, ARankDiesAndItsSuccessorTakesItsPlace) {
  Story job(2);
  job.Start();
  job.Die(1);
  EXPECT_EQ(job.state_.phase, JobPhase::kReady);
  EXPECT_EQ(job.state_.generation, 2u);
  ASSERT_EQ(job.All<AnnounceRankDied>().size(), 1u);
  EXPECT_EQ(job.All<AnnounceRankDied>()[0].reason, "rank 1 (process 101) died");
  EXPECT_THAT(job.All<DropAttempt>(), IsEmpty());

  job.Wait(absl::Seconds(10));
  job.Attach(1, 201);
  EXPECT_EQ(job.state_.generation, 3u);
  ASSERT_EQ(job.All<ReplyAttached>().size(), 1u);
  EXPECT_TRUE(job.All<ReplyAttached>()[0].resumed);
  EXPECT_EQ(job.All<AnnounceRank>()[0].rank, 1u);

  job.Wait(absl::Seconds(600));
  EXPECT_TRUE(job.state_.poison.ok());
}

TEST(JobReady, SurvivorsGetAnErrorWhenNoSuccessorComesInTime) {
  Story job(2);
  job.Start();
  job.Die(1);
  job.Wait(absl::Seconds(61));
  ASSERT_EQ(job.All<PoisonGeneration>().size(), 1u);
  EXPECT_THAT(std::string(job.All<PoisonGeneration>()[0].status.message()),
              HasSubstr("rank 1 (process 101) of job 'gpt' died and no successor attached"));

  job.Attach(1, 201);
  EXPECT_THAT(job.Refused(), HasSubstr("takes new ranks once rank 0 ended"));

  job.Die(0);
  EXPECT_EQ(job.state_.phase, JobPhase::kIdle);
  EXPECT_EQ(job.All<DropAttempt>().size(), 1u);
  EXPECT_TRUE(job.state_.poison.ok());
}

TEST(JobReady, AllRanksDieAndTheWholeJobComesBack) {
  Story job(2);
  job.Start();
  job.Die(0);
  job.Die(1);
  EXPECT_EQ(job.state_.phase, JobPhase::kIdle);
  EXPECT_EQ(job.All<DropAttempt>().size(), 1u);
  EXPECT_EQ(NextDeadline(job.state_), absl::InfiniteDuration());

  job.Attach(0, 200);
  EXPECT_EQ(job.state_.phase, JobPhase::kForming);
  EXPECT_THAT(job.All<ReplyAttached>(), IsEmpty());
  job.Attach(1, 201);
  EXPECT_EQ(job.state_.phase, JobPhase::kReady);
  ASSERT_EQ(job.All<ReplyAttached>().size(), 2u);
  EXPECT_TRUE(job.All<ReplyAttached>()[0].resumed);
  EXPECT_THAT(job.All<CreateJob>(), IsEmpty());
}

TEST(JobReady, AKeptJobGoesBackToIdleWhenTooFewRanksReturn) {
  Story job(2);
  job.Start();
  job.Die(0);
  job.Die(1);
  job.Attach(0, 200);
  job.Wait(absl::Seconds(31));
  EXPECT_THAT(job.Refused(), HasSubstr("missing: rank 1"));
  EXPECT_EQ(job.state_.phase, JobPhase::kIdle);
}

TEST(JobReady, AnAnswerThatNobodyTakesIsTakenBack) {
  Story job(1);
  const uint64_t id = job.Attach(0, 100);
  job.Ready(0);
  job.Ready(1);
  job.Cancel(id);
  EXPECT_EQ(job.state_.ranks[0].phase, RankPhase::kDead);
  EXPECT_EQ(job.state_.phase, JobPhase::kIdle);
}

TEST(JobReady, DetachingEndsTheJobUnlessItIsKept) {
  Story job(2);
  job.Start();
  job.Detach(0, false);
  EXPECT_EQ(job.state_.phase, JobPhase::kReady);
  job.Detach(1, true);
  EXPECT_EQ(job.state_.phase, JobPhase::kEnded);
  EXPECT_EQ(job.All<EndJob>().size(), 1u);

  Story kept(2);
  kept.Start();
  kept.Detach(0, true);
  kept.Detach(1, true);
  EXPECT_EQ(kept.state_.phase, JobPhase::kIdle);
  kept.Attach(0, 300);
  kept.Attach(1, 301);
  EXPECT_EQ(kept.state_.phase, JobPhase::kReady);
}

TEST(JobReady, ADeadRankKeepsWhatTheOthersWouldHaveEnded) {
  Story job(2);
  job.Start();
  job.Die(0);
  job.Detach(1, false);
  EXPECT_EQ(job.state_.phase, JobPhase::kIdle);
}

TEST(JobReady, ALateDeathOfAPredecessorDoesNotTouchItsSuccessor) {
  Story job(2);
  job.Start();
  const uint64_t old = job.state_.ranks[1].attach_id;
  job.Die(1);
  job.Attach(1, 201);
  job.Feed(RankGone{1, old});
  EXPECT_EQ(job.state_.ranks[1].phase, RankPhase::kAttached);
  EXPECT_THAT(job.actions_, IsEmpty());
}

}  // namespace
}  // namespace zeroshard
