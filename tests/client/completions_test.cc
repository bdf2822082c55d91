#include "client/completions.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "base/futex.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

using Outcome = Completions::Outcome;

class CompletionsTest : public ::testing::Test {
 protected:
  void Publish(uint64_t id, RankPage::Outcome outcome) {
    page_->slots[id % kMaxPendingRequests].store(id * 4 + outcome, std::memory_order_release);
    page_->wake.fetch_add(1, std::memory_order_release);
    FutexWakeAll(page_->wake);
  }

  std::unique_ptr<RankPage> page_ = std::make_unique<RankPage>();
  Completions completions_{*page_};
};

TEST_F(CompletionsTest, AFreshPageIsValidAndUnused) {
  EXPECT_TRUE(Completions::Validate(*page_, sizeof(RankPage)).ok());
  EXPECT_TRUE(completions_.CheckUnused().ok());
  EXPECT_EQ(completions_.Look(1), Outcome::kPending);
  EXPECT_FALSE(completions_.poisoned());
}

TEST_F(CompletionsTest, AWrongMagicAndAShortPageAreRefused) {
  EXPECT_TRUE(absl::IsDataLoss(Completions::Validate(*page_, sizeof(RankPage) - 1)));
  page_->magic = 5;
  EXPECT_TRUE(absl::IsDataLoss(Completions::Validate(*page_, sizeof(RankPage))));
}

TEST_F(CompletionsTest, APredecessorsSlotsAreNoticed) {
  Publish(3, RankPage::kOk);
  EXPECT_TRUE(absl::IsFailedPrecondition(completions_.CheckUnused()));
}

TEST_F(CompletionsTest, ThePageMayTellWhyTheJobIsDead) {
  EXPECT_TRUE(completions_.PoisonReason().ok());
  std::strcpy(page_->reason, "worker 1 got stuck");
  page_->reason_code.store(static_cast<uint32_t>(absl::StatusCode::kDeadlineExceeded));
  EXPECT_EQ(completions_.PoisonReason(), absl::DeadlineExceededError("worker 1 got stuck"));
}

TEST_F(CompletionsTest, AReasonThatIsNoneIsStillAnError) {
  std::memset(page_->reason, 'x', kReasonBytes);
  page_->reason_code.store(4711);
  EXPECT_TRUE(absl::IsUnknown(completions_.PoisonReason()));
  EXPECT_EQ(completions_.PoisonReason().message().size(), kReasonBytes);
}

TEST_F(CompletionsTest, TellsOkFromFailed) {
  Publish(1, RankPage::kOk);
  Publish(2, RankPage::kFailed);
  EXPECT_EQ(completions_.Look(1), Outcome::kOk);
  EXPECT_EQ(completions_.Look(2), Outcome::kFailed);
  EXPECT_EQ(completions_.Look(3), Outcome::kPending);
}

TEST_F(CompletionsTest, ASlotIsReusedByALaterRequest) {
  Publish(7, RankPage::kFailed);
  EXPECT_EQ(completions_.Look(7 + kMaxPendingRequests), Outcome::kPending);
  Publish(7 + kMaxPendingRequests, RankPage::kOk);
  EXPECT_EQ(completions_.Look(7), Outcome::kPast);
  EXPECT_EQ(completions_.Look(7 + kMaxPendingRequests), Outcome::kOk);
  EXPECT_EQ(completions_.Look(7 + 2 * kMaxPendingRequests), Outcome::kPending);
}

TEST_F(CompletionsTest, AwaitReturnsAtItsDeadlineWhenNothingHappens) {
  const absl::Time start = absl::Now();
  completions_.Await(completions_.ticket(), absl::Milliseconds(10));
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(9));
}

TEST_F(CompletionsTest, AwaitDoesNotMissWhatWasPublishedAfterTheTicket) {
  const uint32_t ticket = completions_.ticket();
  Publish(1, RankPage::kOk);
  const absl::Time start = absl::Now();
  completions_.Await(ticket, absl::Seconds(30));
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
}

TEST_F(CompletionsTest, ManyWaitersSeeEveryCompletion) {
  constexpr uint64_t kRequests = 3 * kMaxPendingRequests;  // the ids wrap around the slots
  constexpr int kWaiters = 3;
  std::atomic<uint64_t> floor[kWaiters] = {};
  std::atomic<int> misses{0};
  std::vector<std::thread> waiters;
  for (int w = 0; w < kWaiters; ++w) {
    waiters.emplace_back([&, w] {
      for (uint64_t id = 1; id <= kRequests; ++id) {
        for (int tries = 0;; ++tries) {
          const uint32_t ticket = completions_.ticket();
          const Outcome outcome = completions_.Look(id);
          if (outcome == Outcome::kFailed || outcome == Outcome::kPast) misses.fetch_add(1);
          if (outcome != Outcome::kPending) break;
          completions_.Await(ticket, absl::Seconds(5));
        }
        floor[w].store(id);
      }
    });
  }
  for (uint64_t id = 1; id <= kRequests; ++id) {
    if (id > kMaxPendingRequests) {
      for (const auto& reached : floor) {  // as a client holds back a request whose slot is in use
        while (reached.load() + kMaxPendingRequests < id) std::this_thread::yield();
      }
    }
    Publish(id, RankPage::kOk);
  }
  for (std::thread& waiter : waiters) waiter.join();
  EXPECT_EQ(misses.load(), 0);
}

TEST_F(CompletionsTest, AStepResultIsReadWhole) {
  std::atomic<bool> stop{false};
  std::thread writer([&] {
    for (uint64_t i = 1; !stop.load(); ++i) {
      page_->result_version.fetch_add(1, std::memory_order_acq_rel);
      auto* words = reinterpret_cast<uint64_t*>(&page_->result);
      std::atomic_thread_fence(std::memory_order_release);
      for (int word = 0; word < 3; ++word) __atomic_store_n(words + word, i, __ATOMIC_RELAXED);
      page_->result_version.fetch_add(1, std::memory_order_release);
    }
  });
  int whole = 0;
  for (int i = 0; i < 20000; ++i) {
    StepResult result;
    if (!completions_.ReadStepResult(result)) continue;
    ++whole;
    ASSERT_EQ(result.step, result.attempt);
    ASSERT_EQ(result.step, result.updates);
  }
  stop.store(true);
  writer.join();
  EXPECT_GT(whole, 0);
}

TEST_F(CompletionsTest, AResultThatIsNeverFinishedIsNotReturned) {
  page_->result_version.store(1);
  StepResult result;
  EXPECT_FALSE(completions_.ReadStepResult(result));
}

}  // namespace
}  // namespace zeroshard
