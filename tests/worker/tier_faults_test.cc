// One I/O operation of a step goes wrong, each in turn and in each way: the step succeeds with the
// bytes of an undisturbed one, or says what is wrong and leaves the state before it.
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/io_backend.h"
#include "tests/fakes/faulty_io_queue.h"
#include "tests/worker/tier_fixture.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

// A job after its first step, whose files are behind a queue that fails at chosen operations.
class FaultyTier {
 public:
  explicit FaultyTier(IoBackend backend, model::v1::Durability durability = {})
      : job_({.elements = {1000, 700}, .spares = 2, .parent = "/dev/shm"}) {
    job_.options().backend = backend;
    job_.options().config.set_durability(durability);
    EXPECT_EQ(job_.Open(), absl::OkStatus());
    EXPECT_EQ(job_.Fill(), absl::OkStatus());
    EXPECT_EQ(job_.tier().Seal(""), absl::OkStatus());
    EXPECT_EQ(job_.StepAndCommit(1), absl::OkStatus());
  }

  // Later queues are without faults.
  void OpenWith(std::vector<IoFault> faults) {
    for (const IoFault& fault : faults) {
      if (fault.kind == IoFaultKind::kNever) job_.options().io_timeout = absl::Milliseconds(400);
    }
    job_.options().settle_time = absl::Milliseconds(20);
    job_.options().make_queue =
        [this, faults](IoBackend backend,
                       const IoQueueOptions& options) -> absl::StatusOr<std::unique_ptr<IoQueue>> {
      auto inner = MakeIoQueue(backend, options);
      if (!inner.ok() || queue_ != nullptr) return inner;
      auto queue = std::make_unique<FaultyIoQueue>(*std::move(inner), faults, 7);
      queue_ = queue.get();
      return queue;
    };
    EXPECT_EQ(job_.Open(/*recover=*/true, 1), absl::OkStatus());
  }

  // While the queue with faults is there.
  uint64_t injected() const { return queue_->injected(); }
  TierJob& job() { return job_; }

  // The state as a successor finds it.
  absl::Status CheckAgain(uint64_t committed) {
    job_.options().make_queue = MakeIoQueue;
    const absl::Status status = job_.Open(/*recover=*/true, committed);
    return status.ok() ? job_.Check() : status;
  }

 private:
  FaultyIoQueue* queue_ = nullptr;
  TierJob job_;
};

class TierFaultsTest : public ::testing::TestWithParam<IoBackend> {
 protected:
  void SetUp() override {
    if (!IsToBeHad(GetParam())) GTEST_SKIP() << "io_uring is denied here";
  }
};

INSTANTIATE_TEST_SUITE_P(All, TierFaultsTest,
                         ::testing::Values(IoBackend::kUring, IoBackend::kThreads));

constexpr uint64_t kMaxOperations = 200;

TEST_P(TierFaultsTest, WhatIsToldAndWhatPassesLeavesTheSameBytes) {
  for (const auto& [kind, error] :
       std::vector<std::tuple<IoFaultKind, int>>{{IoFaultKind::kError, EIO},
                                                 {IoFaultKind::kError, ENOSPC},
                                                 {IoFaultKind::kShort, 0},
                                                 {IoFaultKind::kDelay, 0},
                                                 {IoFaultKind::kReorder, 0}}) {
    uint64_t injected = 1;
    uint64_t at = 0;
    for (; injected > 0 && at < kMaxOperations; ++at) {
      FaultyTier tier(GetParam());
      tier.OpenWith({{at, kind, error}});
      ASSERT_EQ(tier.job().StepAndCommit(2), absl::OkStatus())
          << "operation " << at << " fault " << static_cast<int>(kind);
      injected = tier.injected();
      const uint64_t retries = tier.job().tier().counters().retries;
      EXPECT_EQ(retries, kind == IoFaultKind::kError ? injected : 0);
      ASSERT_EQ(tier.job().Check(), absl::OkStatus());
      ASSERT_EQ(tier.CheckAgain(2), absl::OkStatus());
    }
    EXPECT_GT(at, 5u);
    EXPECT_LT(at, kMaxOperations);
  }
}

TEST_P(TierFaultsTest, AReadThatIsFlippedOnItsWayIsReadAgain) {
  uint64_t injected = 1;
  for (uint64_t at = 0; injected > 0; ++at) {
    FaultyTier tier(GetParam());
    tier.OpenWith({{at, IoFaultKind::kFlip}});
    // Reads only.
    ASSERT_EQ(tier.job().Check(), absl::OkStatus()) << at;
    injected = tier.injected();
    EXPECT_EQ(tier.job().tier().counters().retries, injected);
    EXPECT_EQ(tier.job().tier().counters().damaged_images, 0u);
  }
}

// What the drive does not tell is found when the image is read, and never taken for the state.
TEST_P(TierFaultsTest, AWriteThatWentWrongUnseenIsFoundByTheNextRead) {
  uint64_t damaged = 0;
  for (const IoFaultKind kind :
       {IoFaultKind::kFlip, IoFaultKind::kTorn, IoFaultKind::kMisdirect, IoFaultKind::kLost}) {
    uint64_t skipped = 0;
    // Operations that the fault does not apply to are passed over.
    for (uint64_t at = 0; skipped < 60; ++at) {
      FaultyTier tier(GetParam());
      tier.OpenWith({{at, kind}});
      const absl::Status step = tier.job().StepAndCommit(2);
      skipped += tier.injected() == 0 ? 1 : 0;
      if (tier.injected() == 0) continue;
      // A misdirected read is read again.
      ASSERT_TRUE(step.ok() || absl::IsDataLoss(step)) << step;
      const absl::Status check = tier.CheckAgain(step.ok() ? 2 : 1);
      ASSERT_TRUE(check.ok() || absl::IsDataLoss(check)) << check;
      if (check.ok()) continue;
      ++damaged;
      EXPECT_THAT(std::string(check.message()), HasSubstr(".extent"));
      EXPECT_THAT(std::string(check.message()), HasSubstr("at offset"));
    }
  }
  EXPECT_GT(damaged, 10u);
}

TEST_P(TierFaultsTest, ATransferThatNeverCompletesEndsThePassAndNotTheTier) {
  uint64_t injected = 1;
  for (uint64_t at = 0; injected > 0; ++at) {
    FaultyTier tier(GetParam());
    tier.OpenWith({{at, IoFaultKind::kNever}});
    const absl::Status status = tier.job().Step(2);
    if (status.ok()) break;  // no operation of the number
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(".extent"));
    // The same process has another queue, and other memory; the state before the step is there.
    ASSERT_EQ(tier.job().Check(), absl::OkStatus());
    ASSERT_EQ(tier.job().StepAndCommit(2), absl::OkStatus());
    ASSERT_EQ(tier.CheckAgain(2), absl::OkStatus());
  }
}

TEST_P(TierFaultsTest, ADriveThatGoesAwayIsAnErrorAndMayComeBack) {
  for (uint64_t at = 0; at < 40; at += 3) {
    FaultyTier tier(GetParam());
    std::vector<IoFault> faults;
    for (uint64_t i = 0; i < 40; ++i) faults.push_back({at + i, IoFaultKind::kError});
    tier.OpenWith(faults);
    const absl::Status status = tier.job().Step(2);
    if (status.ok()) continue;
    EXPECT_THAT(std::string(status.message()), HasSubstr(".extent"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("Input/output error"));
    int tries = 0;
    while (!tier.job().StepAndCommit(2).ok()) ASSERT_LT(++tries, 60);
    ASSERT_EQ(tier.job().Check(), absl::OkStatus());
    ASSERT_EQ(tier.CheckAgain(2), absl::OkStatus());
  }
}

TEST_P(TierFaultsTest, AFailedStepLeavesTheStateBeforeIt) {
  for (uint64_t at = 0; at < 30; at += 4) {
    FaultyTier tier(GetParam());
    std::vector<IoFault> faults;
    for (uint64_t i = at; i < 400; ++i) faults.push_back({i, IoFaultKind::kError});
    tier.OpenWith(faults);
    if (tier.job().Step(2).ok()) continue;
    ASSERT_EQ(tier.CheckAgain(1), absl::OkStatus());
    // The job has dropped the attempt and does the step as another one.
    ASSERT_EQ(tier.job().StepAndCommit(3), absl::OkStatus());
    ASSERT_EQ(tier.CheckAgain(3), absl::OkStatus());
  }
}

TEST_P(TierFaultsTest, AFlushThatFailsIsFinal) {
  FaultyTier tier(GetParam(), model::v1::DURABILITY_POWER);
  uint64_t sync = 0;
  {
    FaultyTier count(GetParam(), model::v1::DURABILITY_POWER);
    count.OpenWith({{kMaxOperations, IoFaultKind::kError}});
    ASSERT_EQ(count.job().Step(2), absl::OkStatus());
    for (const TierPathCounters& path : count.job().tier().counters().paths) {
      sync += path.read_bytes + path.written_bytes;
    }
  }
  // Transfers of a step: images in pieces.
  std::vector<IoFault> faults;
  for (uint64_t at = 0; at < 2; ++at) faults.push_back({sync / 4096 + at, IoFaultKind::kError});
  tier.job().options().config.set_block_bytes(4096);
  tier.OpenWith(faults);
  ASSERT_EQ(tier.job().Step(2), absl::OkStatus());
  ASSERT_FALSE(tier.job().tier().Seal("").ok());
  const absl::Status after = tier.job().tier().Begin(3, 3);
  EXPECT_THAT(std::string(after.message()), HasSubstr("the nvme tier is failed"));
  ASSERT_EQ(tier.CheckAgain(1), absl::OkStatus());
}

}  // namespace
}  // namespace zeroshard
