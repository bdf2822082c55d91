// One node's part of a job that spans daemons, told as stories.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "tests/server/job_story.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Node 1 of two: ranks 2 and 3, worker 1.
class SpanStory : public JobStory {
 public:
  SpanStory() {
    spec_.world_size = 4;
    spec_.local_ranks = 2;
    state_ = NewJob("gpt", spec_, /*workers=*/1, {.rejoin_timeout = absl::Seconds(60)});
    state_.spans = true;
    state_.first_rank = 2;
    state_.first_worker = 1;
    state_.missing_nodes = {"node 0 (10.0.0.1:7401)"};
  }
  void Attach(uint32_t rank) {
    Feed(AttachRequested{next_attach_++, rank, 100 + rank, std::make_shared<JobSpec>(spec_),
                         now_ + absl::Seconds(30)});
  }
  void Start() {
    Attach(2);
    Attach(3);
    Feed(NodesMissing{});
    Feed(WorkerReady{0, 1});
    ASSERT_EQ(state_.phase, JobPhase::kReady);
  }
  void Die(uint32_t rank) { Feed(RankGone{rank, state_.ranks[rank].attach_id}); }
};

TEST(JobSpan, RanksAreInOnceAllNodesAreHereAndTheWorkersAreReady) {
  SpanStory job;
  job.Attach(2);
  EXPECT_EQ(job.Count<CreateJob>(), 0u);
  job.Attach(3);
  EXPECT_EQ(job.Count<CreateJob>(), 1u);
  job.Feed(NodesMissing{});
  EXPECT_EQ(job.Count<ReplyAttached>(), 0u);
  job.Feed(WorkerReady{0, 1});
  EXPECT_EQ(job.Count<ReplyAttached>(), 2u);
}

TEST(JobSpan, AnAttachThatTimesOutNamesTheNodeThatDidNotCome) {
  SpanStory job;
  job.Attach(2);
  job.Attach(3);
  job.TickAtDeadline();
  EXPECT_THAT(job.reason_, HasSubstr("node 0 (10.0.0.1:7401)"));
  EXPECT_EQ(job.Count<FailAttach>(), 2u);
  EXPECT_EQ(job.state_.phase, JobPhase::kEnded);
}

TEST(JobSpan, OnlyRanksOfThisNodeAreMissing) {
  SpanStory job;
  job.Attach(2);
  job.TickAtDeadline();
  EXPECT_THAT(job.reason_, AllOf(HasSubstr("1 of 2 ranks"), HasSubstr("missing: rank 3")));
}

TEST(JobSpan, WorkersAreNamedAsTheJobNumbersThem) {
  SpanStory job;
  job.Start();
  job.Feed(WorkerDied{0, 1, "killed by signal 9", absl::OkStatus()});
  EXPECT_EQ(job.Count<StartWorker>(), 1u);
  EXPECT_THAT(job.state_.workers[0].last_exit, HasSubstr("signal 9"));
  EXPECT_THAT(job.reason_, HasSubstr("worker 1"));
}

TEST(JobSpan, TheStepInFlightIsKeptWhenNoRankOfTheNodeIsLeft) {
  SpanStory job;
  job.Start();
  job.Die(2);
  job.Die(3);
  EXPECT_EQ(job.state_.phase, JobPhase::kIdle);
  EXPECT_EQ(job.Count<DropAttempt>(), 0u);
  job.Attach(2);
  job.Attach(3);
  EXPECT_EQ(job.state_.phase, JobPhase::kReady);
}

TEST(JobSpan, OtherNodesAreToldWhenNoSuccessorCame) {
  SpanStory job;
  job.Start();
  job.Die(2);
  job.Die(3);
  job.TickAtDeadline();
  EXPECT_EQ(job.Count<PoisonGeneration>(), 1u);
  EXPECT_EQ(job.state_.phase, JobPhase::kFailed);
  EXPECT_THAT(job.reason_, HasSubstr("no successor attached within 1m"));
}

TEST(JobSpan, ADeadGenerationStaysDead) {
  SpanStory job;
  job.Start();
  job.Feed(GenerationPoisoned{1, absl::UnavailableError("no connection to node 0")});
  EXPECT_EQ(job.Count<PoisonGeneration>(), 1u);
  job.Die(2);
  job.Die(3);
  EXPECT_EQ(job.state_.phase, JobPhase::kFailed);
  EXPECT_THAT(job.reason_, HasSubstr("no connection to node 0"));
}

TEST(JobSpan, AJobWithoutRanksHearsOfItsEnd) {
  SpanStory job;
  job.Start();
  job.Die(2);
  job.Die(3);
  job.Feed(GenerationPoisoned{1, absl::UnavailableError("no connection to node 0")});
  EXPECT_EQ(job.state_.phase, JobPhase::kFailed);
}

TEST(JobSpan, EndsWhenTheRanksOfAllNodesHaveDetached) {
  SpanStory job;
  job.Start();
  job.Feed(DetachRequested{2, false});
  job.Feed(DetachRequested{3, false});
  EXPECT_EQ(job.state_.phase, JobPhase::kLeaving);
  EXPECT_EQ(job.Count<EndJob>(), 0u);
  job.Feed(NodesLeft{});
  EXPECT_EQ(job.Count<EndJob>(), 1u);
}

TEST(JobSpan, DoesNotWaitForeverForTheOthersToDetach) {
  SpanStory job;
  job.Start();
  job.Feed(DetachRequested{2, false});
  job.Feed(DetachRequested{3, false});
  job.TickAtDeadline();
  EXPECT_EQ(job.Count<EndJob>(), 1u);
}

TEST(JobSpan, ADisagreementOfTheNodesFailsEveryAttach) {
  SpanStory job;
  job.Attach(2);
  job.Attach(3);
  job.Feed(StartFailed{absl::FailedPreconditionError("the nodes disagree")});
  EXPECT_EQ(job.Count<FailAttach>(), 2u);
  EXPECT_EQ(job.Count<EndJob>(), 1u);
  job.Feed(NodesMissing{});
  EXPECT_THAT(job.actions_, IsEmpty());
}

// The same with a data plane: all ranks of all nodes leave a generation and enter the next.
class SpanningPlaneStory : public SpanStory {
 public:
  SpanningPlaneStory() {
    state_.data_plane = true;
    Start();
  }
  void Return(uint32_t rank) {
    Feed(AttachRequested{.attach_id = next_attach_++,
                         .rank = rank,
                         .pid = 100 + rank,
                         .spec = std::make_shared<JobSpec>(spec_),
                         .deadline = now_ + absl::Seconds(30)});
  }
  void HearOfDeath() {
    Feed(GenerationPoisoned{state_.alive_since, absl::AbortedError("step 8 aborted: rank 0 died")});
  }
};

TEST(JobSpan, RanksOnGpusWaitUntilAllNodesAgreeOnTheNextGeneration) {
  SpanningPlaneStory job;
  job.HearOfDeath();
  EXPECT_EQ(job.Count<PoisonGeneration>(), 1u);
  job.Return(2);
  EXPECT_FALSE(WantsGeneration(job.state_)) << "rank 3 is still inside";
  job.Return(3);
  EXPECT_TRUE(WantsGeneration(job.state_));
  EXPECT_EQ(job.Count<DropAttempt>() + job.Count<ReplyAttached>(), 0u);
  job.Feed(GenerationAgreed{17});
  EXPECT_EQ(job.Count<DropAttempt>(), 1u);
  EXPECT_EQ(job.Count<ReplyAttached>(), 2u);
  EXPECT_EQ(job.state_.alive_since, 17u);
  EXPECT_EQ(job.state_.phase, JobPhase::kReady);
  EXPECT_TRUE(job.state_.poison.ok());
}

TEST(JobSpan, TheDeathOfTheLastRankOfANodeOnGpusIsToldToTheOthers) {
  SpanningPlaneStory job;
  job.Die(2);
  EXPECT_EQ(job.Count<PoisonGeneration>(), 1u);
  job.Die(3);
  EXPECT_EQ(job.state_.phase, JobPhase::kIdle);
  EXPECT_EQ(job.Count<DropAttempt>(), 0u) << "not before the others have left";
  EXPECT_EQ(NextDeadline(job.state_), absl::InfiniteDuration());
  job.Attach(2);
  job.Attach(3);
  EXPECT_TRUE(WantsGeneration(job.state_));
}

TEST(JobSpan, AGenerationOnGpusThatBeganWithoutThisNodeEndsAgain) {
  SpanningPlaneStory job;
  job.HearOfDeath();
  job.Return(2);
  job.Return(3);
  job.Die(3);  // just before the word of it came
  EXPECT_FALSE(WantsGeneration(job.state_));
  job.Feed(GenerationAgreed{17});
  EXPECT_EQ(job.Count<DropAttempt>(), 1u);
  EXPECT_EQ(job.Count<ReplyAttached>(), 0u);
  job.Feed(GenerationPoisoned{16, absl::AbortedError("of the one before")});
  EXPECT_TRUE(job.state_.poison.ok());
  job.HearOfDeath();
  job.Attach(3);
  EXPECT_TRUE(WantsGeneration(job.state_));
}

constexpr MirrorPoint kMirror = {.attempt = 41, .step = 40};

// Its worker 1 loses its GPU in the middle of a generation.
class LosingStory : public SpanningPlaneStory {
 public:
  void Lose(std::optional<MirrorPoint> mirror = kMirror) {
    Feed(DeviceLost{0, state_.workers[0].incarnation, "ECC error", mirror, "start anew"});
    lost_ = actions_;
    Feed(WorkerDied{0, state_.workers[0].incarnation, "exit 1", absl::OkStatus()});
    if (Count<StartWorker>() == 0 && state_.phase != JobPhase::kFailed) TickAtDeadline();
  }
  void LoseAndReturn() {
    Lose();
    Return(2);
    Return(3);
  }

  std::vector<JobAction> lost_;
};

TEST(JobSpan, ALostGpuIsToldToAllNodesAndTheyAgreeOnAMirror) {
  LosingStory job;
  job.Lose();
  const auto poison = ActionsOf<PoisonGeneration>(job.lost_);
  ASSERT_EQ(poison.size(), 1u);
  EXPECT_EQ(std::string(poison[0].status.message()),
            "device lost on worker 1: the job goes back to its last mirror");
  job.Ready(0);
  EXPECT_EQ(job.Count<PoisonGeneration>(), 1u) << "the worker that died could not tell the others";
  EXPECT_EQ(job.Count<GoBack>(), 0u) << "not known where to";
  job.Return(2);
  job.Return(3);
  EXPECT_TRUE(WantsGeneration(job.state_));
  EXPECT_EQ(job.state_.lost, "device lost on worker 1");
  job.Feed(GoBackAgreed{.mirror = kMirror, .committed_as = 50, .lost = job.state_.lost});
  ASSERT_EQ(job.Count<GoBack>(), 1u);
  EXPECT_EQ(job.All<GoBack>()[0].mirror, kMirror);
  EXPECT_EQ(job.All<GoBack>()[0].committed_as, 50u);
  EXPECT_THAT(job.reason_, HasSubstr("goes back to step 40"));
  EXPECT_FALSE(WantsGeneration(job.state_)) << "others wait for this node";
  job.Feed(WentBack{});
  EXPECT_EQ(job.Count<DropAttempt>() + job.Count<ReplyAttached>(), 0u);
  EXPECT_TRUE(WantsGeneration(job.state_));
  EXPECT_EQ(job.state_.lost, "");
  job.Feed(GenerationAgreed{17});
  EXPECT_EQ(job.Count<DropAttempt>(), 1u);
  EXPECT_EQ(job.Count<ReplyAttached>(), 2u);
}

TEST(JobSpan, ANodeThatLostNothingGoesBackOnceItsWorkersAreReady) {
  SpanningPlaneStory job;
  job.HearOfDeath();
  job.Return(2);
  job.Return(3);
  job.Feed(WorkerDied{0, 1, "killed by signal 9", absl::OkStatus()});
  job.Feed(GoBackAgreed{.mirror = kMirror, .committed_as = 50, .lost = "device lost on worker 0"});
  EXPECT_EQ(job.Count<GoBack>(), 0u);
  job.Ready(0);
  ASSERT_EQ(job.Count<GoBack>(), 1u);
  EXPECT_EQ(job.All<GoBack>()[0].committed_as, 50u);
  job.Feed(WentBack{});
  EXPECT_TRUE(WantsGeneration(job.state_));
}

TEST(JobSpan, ADamagedMirrorIsAgreedUponAgain) {
  LosingStory job;
  job.LoseAndReturn();
  job.Ready(0);
  job.Feed(GoBackAgreed{.mirror = kMirror, .committed_as = 50, .lost = job.state_.lost});
  job.Lose(MirrorPoint{.attempt = 31, .step = 30});
  EXPECT_TRUE(WantsGeneration(job.state_)) << "the others have to know";
  EXPECT_FALSE(job.state_.lost.empty());
  job.Feed(WentBack{});  // of before
  EXPECT_FALSE(job.state_.lost.empty());
  job.Feed(GoBackAgreed{.mirror = {.attempt = 31, .step = 30}, .committed_as = 60, .lost = "it"});
  job.Ready(0);
  ASSERT_EQ(job.Count<GoBack>(), 1u);
  EXPECT_EQ(job.All<GoBack>()[0].committed_as, 60u);
  job.Lose(std::nullopt);
  EXPECT_EQ(job.state_.phase, JobPhase::kFailed);
}

TEST(JobSpan, AGenerationThatBeganBeforeTheLossWasKnownEndsAgain) {
  LosingStory job;
  job.HearOfDeath();
  job.Return(2);
  job.Return(3);
  job.Lose();
  job.Feed(GenerationAgreed{17});
  EXPECT_EQ(job.Count<DropAttempt>(), 1u);
  EXPECT_EQ(job.Count<PoisonGeneration>(), 1u);
  EXPECT_EQ(job.Count<ReplyAttached>(), 0u);
  EXPECT_TRUE(WantsGeneration(job.state_));
  job.Ready(0);
  EXPECT_EQ(job.Count<ReplyAttached>(), 0u);
}

TEST(JobSpan, AJobOnGpusFailsWithANodeThatIsLost) {
  SpanningPlaneStory job;
  job.Feed(GenerationPoisoned{1, absl::UnavailableError("no connection to node 0"), true});
  EXPECT_EQ(job.state_.phase, JobPhase::kFailed);
  EXPECT_THAT(job.reason_, HasSubstr("node 0"));
}

TEST(JobSpan, AJobOnGpusWhoseOtherNodeHasFailedFailsWithItsName) {
  SpanningPlaneStory job;
  job.HearOfDeath();
  job.Return(2);
  job.Return(3);
  EXPECT_TRUE(WantsGeneration(job.state_));
  job.Feed(NodeLost{absl::FailedPreconditionError("the part of node 0 is over")});
  EXPECT_EQ(job.state_.phase, JobPhase::kFailed);
  EXPECT_EQ(job.Count<FailAttach>(), 2u);
  EXPECT_THAT(job.state_.reason, HasSubstr("node 0"));
}

TEST(JobSpan, ANodeThatIsLostOnceTheRanksDetachedEndsTheJob) {
  SpanningPlaneStory job;
  job.Feed(DetachRequested{2, false});
  job.Feed(DetachRequested{3, false});
  EXPECT_EQ(job.state_.phase, JobPhase::kLeaving);
  job.Feed(NodeLost{absl::FailedPreconditionError("the part of node 0 is over")});
  EXPECT_EQ(job.Count<EndJob>(), 1u);
}

TEST(JobSpan, AJobOnGpusOutlivesADriveThatFailsAndNotOneThatLostStates) {
  SpanningPlaneStory job;
  job.Feed(GenerationPoisoned{1, absl::UnavailableError("step 8: write FILE: EIO")});
  EXPECT_EQ(job.Count<PoisonGeneration>(), 1u);
  job.Return(2);
  job.Return(3);
  EXPECT_TRUE(WantsGeneration(job.state_));
  job.Feed(GenerationAgreed{17});
  EXPECT_EQ(job.Count<DropAttempt>(), 1u);
  job.Feed(GenerationPoisoned{17, absl::DataLossError("step 8: FILE at offset 0: checksum")});
  EXPECT_EQ(job.state_.phase, JobPhase::kFailed);
}

}  // namespace
}  // namespace zeroshard
