// The life of jobs, told as stories on a clock that is moved by hand.
#include "tests/server/job_story.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

JobSpec Spec(uint32_t world_size) {
  JobSpec spec;
  spec.world_size = world_size;
  spec.local_ranks = world_size;
  spec.parameters = {"'w': float32[4,2], trainable", "'b': float32[2], trainable"};
  spec.config = {"optimizer.type = \"AdamW\"", "zero_optimization.stage = 3"};
  return spec;
}

// One job with its actions as they come; every method is one thing that happens in the world.
class Story : public JobStory {
 public:
  explicit Story(uint32_t world_size, uint32_t workers = 2)
      : Story(world_size, workers, JobLimits{.rejoin_timeout = absl::Seconds(60)}) {}
  Story(uint32_t world_size, uint32_t workers, const JobLimits& limits) {
    spec_ = Spec(world_size);
    state_ = NewJob("gpt", spec_, workers, limits);
  }

  uint64_t Attach(uint32_t rank, int64_t pid) { return Attach(rank, pid, spec_); }
  uint64_t Attach(uint32_t rank, int64_t pid, const JobSpec& spec) {
    const uint64_t id = next_attach_++;
    Feed(AttachRequested{id, rank, pid, std::make_shared<JobSpec>(spec), now_ + absl::Seconds(30)});
    return id;
  }
  void Cancel(uint64_t id) { Feed(AttachCancelled{id}); }
  void Die(uint32_t rank) { Feed(RankGone{rank, state_.ranks[rank].attach_id}); }
  void Detach(uint32_t rank, bool keep) { Feed(DetachRequested{rank, keep}); }
  void WorkerEnds(uint32_t worker, absl::Status fatal = absl::OkStatus()) {
    Feed(WorkerDied{worker, state_.workers[worker].incarnation, "killed by signal 9", fatal});
  }
  // Time passes; the host ticks when the job asked for it.
  void Wait(absl::Duration duration) {
    const Instant end = now_ + duration;
    while (NextDeadline(state_) <= end) {
      now_ = std::max(now_, NextDeadline(state_));
      Feed(Tick{});
      if (state_.phase == JobPhase::kEnded) break;
    }
    now_ = end;
  }
  // A job of `world_size` ranks with processes 100, 101, ... that runs.
  void Start() {
    for (uint32_t r = 0; r < spec_.world_size; ++r) Attach(r, 100 + r);
    for (uint32_t w = 0; w < state_.workers.size(); ++w) Ready(w);
    ASSERT_EQ(state_.phase, JobPhase::kReady);
  }
};

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

TEST(JobWorkers, AWorkerIsStartedAgainAtOnceAndRecovers) {
  Story job(2);
  job.Start();
  job.WorkerEnds(1);
  ASSERT_EQ(job.All<StartWorker>().size(), 1u);
  EXPECT_EQ(job.All<StartWorker>()[0].worker, 1u);
  EXPECT_EQ(job.All<StartWorker>()[0].incarnation, 2u);
  EXPECT_TRUE(job.All<StartWorker>()[0].recover);
  EXPECT_EQ(job.state_.phase, JobPhase::kReady);
  EXPECT_EQ(job.state_.workers[1].last_exit, "killed by signal 9");
  job.Ready(1);
  EXPECT_EQ(job.state_.workers[1].phase, WorkerPhase::kReady);
}

TEST(JobWorkers, OneThatWasNeverReadyHasNothingToRecover) {
  Story job(1);
  job.Attach(0, 100);
  job.WorkerEnds(0);
  ASSERT_EQ(job.All<StartWorker>().size(), 1u);
  EXPECT_FALSE(job.All<StartWorker>()[0].recover);
}

TEST(JobWorkers, TheWaitBeforeARestartGrows) {
  Story job(1);
  job.Start();
  job.WorkerEnds(0);
  EXPECT_EQ(job.All<StartWorker>().size(), 1u);
  job.WorkerEnds(0);
  EXPECT_THAT(job.All<StartWorker>(), IsEmpty());
  EXPECT_EQ(NextDeadline(job.state_), job.now_ + absl::Milliseconds(100));
  job.Wait(absl::Milliseconds(100));
  EXPECT_EQ(job.All<StartWorker>().size(), 1u);
  job.WorkerEnds(0);
  EXPECT_EQ(NextDeadline(job.state_), job.now_ + absl::Milliseconds(200));
}

TEST(JobWorkers, TheSixthDeathWithinAMinuteFailsTheJob) {
  Story job(1);
  job.Start();
  for (int i = 0; i < kMaxRestarts; ++i) {
    job.WorkerEnds(0);
    EXPECT_EQ(job.state_.phase, JobPhase::kReady) << i;
    job.Wait(absl::Seconds(2));
  }
  job.WorkerEnds(0);
  EXPECT_EQ(job.state_.phase, JobPhase::kFailed);
  EXPECT_EQ(job.All<PoisonGeneration>().size(), 1u);
  EXPECT_THAT(job.state_.reason, HasSubstr("died 6 times within 1m"));
  EXPECT_EQ(NextDeadline(job.state_), absl::InfiniteDuration());

  job.Attach(0, 200);
  EXPECT_THAT(job.Refused(), AllOf(HasSubstr("has failed"), HasSubstr("zeroshard remove gpt")));
  job.Die(0);
  EXPECT_EQ(job.state_.phase, JobPhase::kFailed);
  job.Feed(RemoveRequested{false});
  EXPECT_EQ(job.state_.phase, JobPhase::kEnded);
}

TEST(JobWorkers, AWorkerThatGetsStuckAtOneStepAgainAndAgainFailsTheJob) {
  Story job(1);
  job.Start();
  auto hang = [&](uint64_t step) {
    job.Feed(WorkerDied{1, job.state_.workers[1].incarnation, "process 7 had not answered for 30s",
                        absl::OkStatus(), /*stuck=*/true, step});
    job.Wait(absl::Seconds(40));
  };
  for (uint64_t step = 3; step < 10; ++step) {
    hang(step);
    hang(step);
    EXPECT_EQ(job.state_.phase, JobPhase::kReady) << step;
  }
  job.WorkerEnds(1);
  job.Wait(absl::Minutes(11));
  hang(9);
  hang(9);
  EXPECT_EQ(job.state_.phase, JobPhase::kReady) << "the others were long ago";
  hang(9);
  EXPECT_EQ(job.state_.phase, JobPhase::kFailed);
  EXPECT_THAT(job.state_.reason,
              HasSubstr("worker 1 of job 'gpt' got stuck 3 times at step 9, last: process 7 had "
                        "not answered for 30s"));
}

TEST(JobWorkers, DeathsLongAgoAreForgotten) {
  Story job(1);
  job.Start();
  for (int i = 0; i < 20; ++i) {
    job.WorkerEnds(0);
    job.Wait(absl::Seconds(30));
  }
  EXPECT_EQ(job.state_.phase, JobPhase::kReady);
  EXPECT_EQ(job.state_.workers[0].restarts, 20u);
}

TEST(JobWorkers, ASuccessorRankWaitsForAWorkerThatIsBeingRestarted) {
  Story job(2);
  job.Start();
  job.Die(1);
  job.WorkerEnds(0);
  job.Attach(1, 201);
  EXPECT_EQ(job.state_.ranks[1].phase, RankPhase::kWaiting);
  EXPECT_THAT(job.All<ReplyAttached>(), IsEmpty());
  job.Ready(0);
  EXPECT_EQ(job.All<ReplyAttached>().size(), 1u);
}

TEST(JobWorkers, NewsOfAPreviousIncarnationIsIgnored) {
  Story job(1);
  job.Start();
  job.WorkerEnds(0);
  job.Feed(WorkerReady{0, 1});
  EXPECT_EQ(job.state_.workers[0].phase, WorkerPhase::kStarting);
  job.Feed(WorkerDied{0, 1, "late", absl::OkStatus()});
  EXPECT_EQ(job.state_.workers[0].phase, WorkerPhase::kStarting);
}

TEST(JobPoison, AMismatchReachesEveryWorkerOnce) {
  Story job(2);
  job.Start();
  const absl::Status mismatch = absl::AbortedError("rank 0 gathers unit 1, rank 1 unit 2");
  job.Feed(GenerationPoisoned{1, mismatch});
  ASSERT_EQ(job.All<PoisonGeneration>().size(), 1u);
  EXPECT_EQ(job.All<PoisonGeneration>()[0].status, mismatch);
  job.Feed(GenerationPoisoned{1, mismatch});
  EXPECT_THAT(job.actions_, IsEmpty());
}

TEST(JobPoison, BeforeAnybodyIsInItFailsTheStart) {
  Story job(1);
  job.Attach(0, 100);
  job.Ready(0);
  job.Feed(GenerationPoisoned{1, absl::AbortedError("the mesh broke")});
  EXPECT_EQ(job.Refused(), "the mesh broke");
  EXPECT_EQ(job.state_.phase, JobPhase::kEnded);
}

TEST(JobPoison, ARankThatWaitsForAWorkerHearsOfIt) {
  Story job(2);
  job.Start();
  job.Die(1);
  job.WorkerEnds(0);
  job.Attach(1, 201);
  job.Feed(GenerationPoisoned{3, absl::AbortedError("rank 0 disagrees")});
  EXPECT_EQ(job.Refused(), "rank 0 disagrees");
  EXPECT_EQ(job.state_.ranks[1].phase, RankPhase::kDead);
}

TEST(JobPoison, NewsOfADeadGenerationDoesNotKillTheNext) {
  Story job(1);
  job.Start();
  const uint64_t old = job.state_.generation;
  job.Die(0);
  job.Attach(0, 200);
  ASSERT_EQ(job.state_.phase, JobPhase::kReady);
  job.Feed(GenerationPoisoned{old, absl::AbortedError("late")});
  EXPECT_TRUE(job.state_.poison.ok());
}

TEST(JobRemove, IsRefusedWhileRanksAreAttachedUnlessForced) {
  Story job(2);
  job.Start();
  job.Feed(RemoveRequested{false});
  ASSERT_EQ(job.All<RefuseRemove>().size(), 1u);
  EXPECT_THAT(std::string(job.All<RefuseRemove>()[0].status.message()),
              AllOf(HasSubstr("rank 0 (process 100), rank 1 (process 101)"), HasSubstr("--force")));
  EXPECT_EQ(job.state_.phase, JobPhase::kReady);
  job.Feed(RemoveRequested{true});
  EXPECT_EQ(job.All<PoisonGeneration>().size(), 1u);
  EXPECT_EQ(job.state_.phase, JobPhase::kEnded);
}

TEST(JobRemove, AnEndedJobTakesNoMoreInputs) {
  Story job(1);
  job.Start();
  job.Feed(RemoveRequested{true});
  job.Attach(0, 200);
  EXPECT_THAT(job.actions_, IsEmpty());
  EXPECT_EQ(job.state_.phase, JobPhase::kEnded);
}

TEST(Job, RanksWaitLongerForWorkersThatWriteFilesFirst) {
  JobLimits limits;
  limits.first_work = "write files of 9.00 GiB for the NVMe tier";
  limits.first_work_time = absl::Minutes(3);
  Story story(2, 2, limits);
  story.Attach(0, 100);
  story.Attach(1, 101);
  EXPECT_THAT(story.reason_, HasSubstr("starting 2 workers, which first write files of 9.00 GiB"));
  story.Ready(0);
  story.Wait(absl::Minutes(3));
  EXPECT_EQ(story.state_.phase, JobPhase::kStarting);
  story.Wait(absl::Minutes(1));
  ASSERT_EQ(story.All<FailAttach>().size(), 2u);
  EXPECT_THAT(std::string(story.All<FailAttach>()[0].status.message()),
              HasSubstr("not ready in time: worker 1"));
  EXPECT_THAT(std::string(story.All<FailAttach>()[0].status.message()),
              HasSubstr("write files of 9.00 GiB"));
}

TEST(Job, NobodyWaitsLongerForRanksThatDoNotCome) {
  JobLimits limits;
  limits.first_work_time = absl::Minutes(3);
  Story story(2, 2, limits);
  story.Attach(0, 100);
  story.Wait(absl::Seconds(31));
  EXPECT_EQ(story.All<FailAttach>().size(), 1u);
}

}  // namespace
}  // namespace zeroshard
