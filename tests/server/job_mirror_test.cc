// Jobs whose GPU is lost: what becomes of their generation, their step and whoever attaches.
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

constexpr MirrorPoint kMirror = {.attempt = 41, .step = 40};

// Two ranks of processes 100 and 101, a worker each; generation 1 is trained by both.
class MirrorStory : public JobStory {
 public:
  MirrorStory() {
    spec_.world_size = 2;
    spec_.local_ranks = 2;
    state_ = NewJob("gpt", spec_, /*workers=*/2, {.rejoin_timeout = absl::Seconds(60)});
    state_.data_plane = true;
    Attach(0, 100);
    Attach(1, 101);
    Ready(0);
    Ready(1);
    EXPECT_EQ(state_.phase, JobPhase::kReady);
  }
  void Attach(uint32_t rank, int64_t pid) {
    AttachRequested in;
    in.attach_id = next_attach_++;
    in.rank = rank;
    in.pid = pid;
    in.spec = std::make_shared<JobSpec>(spec_);
    in.deadline = now_ + absl::Seconds(30);
    Feed(in);
  }
  void Die(uint32_t worker) {
    Feed(WorkerDied{worker, state_.workers[worker].incarnation, "exit 1", absl::OkStatus()});
  }
  void Lose(uint32_t worker, std::optional<MirrorPoint> mirror) {
    Feed(DeviceLost{worker, state_.workers[worker].incarnation, "ECC error", mirror,
                    "restore 'ckpt-1' (step 30)"});
    lost_ = actions_;
    Die(worker);
  }

  std::vector<JobAction> lost_;
};

TEST(JobMirror, TheGenerationEndsWithTheStepThatTheJobGoesBackTo) {
  MirrorStory job;
  job.Lose(1, kMirror);
  const auto poison = ActionsOf<PoisonGeneration>(job.lost_);
  ASSERT_EQ(poison.size(), 1u);
  EXPECT_EQ(poison[0].status.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(std::string(poison[0].status.message()),
            "device lost on worker 1: the job goes back to step 40, its last mirror");
  ASSERT_EQ(job.Count<StartWorker>(), 1u);
  EXPECT_TRUE(job.All<StartWorker>()[0].recover);
}

TEST(JobMirror, AllWorkersLoadTheirMirrorBeforeTheStepIsDroppedAndRanksAreLetIn) {
  MirrorStory job;
  job.Lose(1, kMirror);
  job.Attach(0, 100);
  job.Attach(1, 202);  // is held by process 101, which lives
  job.Attach(1, 101);
  EXPECT_EQ(job.Count<DropAttempt>(), 0u);
  EXPECT_EQ(job.state_.phase, JobPhase::kStarting);
  job.Ready(1);
  ASSERT_EQ(job.Count<GoBack>(), 1u);
  EXPECT_EQ(job.All<GoBack>()[0].mirror, kMirror);
  EXPECT_EQ(job.Count<ReplyAttached>(), 0u);
  // A worker's word of the dead generation that comes late changes nothing.
  job.Feed(GenerationPoisoned{job.state_.generation, absl::AbortedError("late")});
  EXPECT_EQ(job.state_.phase, JobPhase::kStarting);
  const uint64_t told = job.state_.generation;
  job.Feed(WentBack{});
  EXPECT_EQ(job.Count<DropAttempt>(), 1u);
  EXPECT_EQ(job.Count<ReplyAttached>(), 2u);
  EXPECT_GT(job.state_.alive_since, told) << "what the workers were told is dropped";
  EXPECT_EQ(job.state_.phase, JobPhase::kReady);
  EXPECT_TRUE(job.state_.poison.ok());
}

TEST(JobMirror, RanksThatComeAfterwardsFormTheNextGenerationAsEver) {
  MirrorStory job;
  job.Lose(0, kMirror);
  job.Ready(0);
  job.Feed(WentBack{});
  EXPECT_EQ(job.Count<DropAttempt>(), 0u) << "ranks are still in the dead generation";
  EXPECT_FALSE(job.state_.poison.ok());
  job.Attach(0, 100);
  job.Attach(1, 101);
  EXPECT_EQ(job.Count<ReplyAttached>(), 2u);
  EXPECT_EQ(job.state_.phase, JobPhase::kReady);
}

TEST(JobMirror, AWorkerThatDiesOnTheWayBackTakesAllBackAgain) {
  MirrorStory job;
  job.Lose(1, kMirror);
  job.Ready(1);
  job.Die(0);
  job.Feed(WentBack{});  // of before
  EXPECT_TRUE(job.state_.going_back.has_value());
  job.Ready(0);
  EXPECT_EQ(job.Count<GoBack>(), 1u);
  // Also one that loses its device again.
  job.Lose(1, kMirror);
  EXPECT_EQ(job.state_.going_back, kMirror);
  job.now_ = NextDeadline(job.state_);
  job.Feed(Tick{});
  job.Ready(1);
  EXPECT_EQ(job.Count<GoBack>(), 1u);
}

TEST(JobMirror, ADamagedMirrorIsLeftForTheOneBeforeItOrTheJobFails) {
  MirrorStory job;
  job.Lose(1, kMirror);
  job.Ready(1);
  ASSERT_EQ(job.Count<GoBack>(), 1u);
  // Worker 0 lost no device, but what it should load is damaged: its memory holds nothing now.
  const MirrorPoint before = {.attempt = 31, .step = 30};
  job.Lose(0, before);
  EXPECT_EQ(job.state_.going_back, before);
  EXPECT_NE(job.state_.phase, JobPhase::kFailed);
  job.now_ = NextDeadline(job.state_);
  job.Feed(Tick{});
  job.Ready(0);
  ASSERT_EQ(job.Count<GoBack>(), 1u);
  EXPECT_EQ(job.All<GoBack>()[0].mirror, before);
  job.Lose(1, std::nullopt);
  EXPECT_EQ(job.state_.phase, JobPhase::kFailed);
}

TEST(JobMirror, WithoutRanksTheJobGoesBackToo) {
  MirrorStory job;
  job.Feed(RankGone{0, job.state_.ranks[0].attach_id});
  job.Feed(RankGone{1, job.state_.ranks[1].attach_id});
  ASSERT_EQ(job.state_.phase, JobPhase::kIdle);
  job.Lose(1, kMirror);
  EXPECT_THAT(ActionsOf<PoisonGeneration>(job.lost_), IsEmpty());
  job.Ready(1);
  job.Feed(WentBack{});
  EXPECT_EQ(job.Count<DropAttempt>(), 1u);
  EXPECT_EQ(job.state_.phase, JobPhase::kIdle);
}

TEST(JobMirror, WithoutAMirrorTheJobFailsAndSaysWhatToDo) {
  MirrorStory job;
  job.Lose(1, std::nullopt);
  EXPECT_EQ(job.state_.phase, JobPhase::kFailed);
  const auto poison = ActionsOf<PoisonGeneration>(job.lost_);
  ASSERT_EQ(poison.size(), 1u);
  EXPECT_THAT(std::string(poison[0].status.message()),
              AllOf(HasSubstr("device lost on worker 1 of job 'gpt': ECC error"),
                    HasSubstr("restore 'ckpt-1' (step 30)")));
  EXPECT_EQ(job.Count<StartWorker>(), 0u);
}

TEST(JobMirror, AWorkerThatWasNeverReadyHasLostNothing) {
  MirrorStory job;
  job.state_.workers[1].was_ready = false;
  job.Lose(1, std::nullopt);
  EXPECT_EQ(job.state_.phase, JobPhase::kReady);
  ASSERT_EQ(job.Count<StartWorker>(), 1u);
  EXPECT_FALSE(job.All<StartWorker>()[0].recover);
}

}  // namespace
}  // namespace zeroshard
