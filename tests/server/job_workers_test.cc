// The life of jobs: workers that die, generations that do, and the end.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/server/job_life.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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
