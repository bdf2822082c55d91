// Requests of a channel, and how they end.
#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/synchronization/notification.h"
#include "base/fd_passing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/request_channel_fixture.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

TEST_F(RequestChannelTest, HelloCarriesTheIdentityAndBringsTheState) {
  trainer::v1::HelloReply hello;
  hello.set_step(17);
  hello.set_user_state("mine");
  fake_.SetHello(hello);
  auto channel = Open();
  EXPECT_EQ(channel->hello().step(), 17u);
  EXPECT_EQ(channel->hello().user_state(), "mine");
  const auto requests = fake_.requests();
  ASSERT_EQ(requests.size(), 1u);
  EXPECT_EQ(requests[0].hello().token(), "secret");
  EXPECT_EQ(requests[0].hello().rank(), 3u);
  EXPECT_EQ(requests[0].hello().generation(), 5u);
  EXPECT_FALSE(requests[0].hello().reconnect());
}

TEST_F(RequestChannelTest, ARefusedHelloIsTheAnswerOfOpen) {
  fake_.RefuseHellos(1, absl::PermissionDeniedError("the token is of another generation"));
  const auto channel = RequestChannel::Open(fake_.page(), {.socket = fake_.socket()}, kLong);
  EXPECT_TRUE(absl::IsPermissionDenied(channel.status())) << channel.status();
  EXPECT_THAT(std::string(channel.status().message()), HasSubstr("another generation"));
}

// As when a worker died for good before it got to the Hello: its socket is the server's.
TEST_F(RequestChannelTest, AReasonInThePageEndsAHelloThatNobodyAnswers) {
  fake_.Stop();
  const auto listener = ListenUnix(fake_.socket(), 0600, UnixSocketType::kStream);
  ASSERT_TRUE(listener.ok()) << listener.status();
  for (const absl::StatusCode code :
       {absl::StatusCode::kUnavailable, absl::StatusCode::kDeadlineExceeded}) {
    fake_.page().reason_code = 0;
    fake_.PoisonPage(absl::Status(code, "device lost: cuda:0"));
    const absl::Time start = absl::Now();
    const auto channel = RequestChannel::Open(fake_.page(), {.socket = fake_.socket()}, kLong);
    EXPECT_EQ(channel.status().code(), code) << channel.status();
    EXPECT_THAT(std::string(channel.status().message()), HasSubstr("device lost: cuda:0"));
    EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  }
}

TEST_F(RequestChannelTest, NoServerIsAnErrorThatNamesTheSocket) {
  const auto channel = RequestChannel::Open(fake_.page(), {.socket = "/tmp/zs-nobody"}, kLong);
  EXPECT_TRUE(absl::IsNotFound(channel.status())) << channel.status();
  EXPECT_THAT(std::string(channel.status().message()), HasSubstr("/tmp/zs-nobody"));
}

TEST_F(RequestChannelTest, APageWithAPredecessorsCompletionsIsRefused) {
  fake_.Complete(1);
  const auto channel = RequestChannel::Open(fake_.page(), {.socket = fake_.socket()}, kLong);
  EXPECT_TRUE(absl::IsFailedPrecondition(channel.status())) << channel.status();
}

TEST_F(RequestChannelTest, RequestsArePipelinedAndCompleteInAnyOrder) {
  auto channel = Open();
  std::vector<uint64_t> ids;
  for (uint32_t unit = 0; unit < 100; ++unit) ids.push_back(*channel->Submit(Release(unit)));
  EXPECT_EQ(ids.front(), 1u);
  EXPECT_EQ(ids.back(), 100u);
  ASSERT_TRUE(fake_.AwaitRequests(101));
  EXPECT_EQ(fake_.ids(), ids);
  EXPECT_FALSE(channel->Done(50));
  fake_.Complete(50);
  EXPECT_TRUE(channel->Done(50));
  EXPECT_FALSE(channel->Done(49));
  EXPECT_TRUE(channel->Wait(50, kLong).ok());
  for (const uint64_t id : ids) fake_.Complete(id);
  for (const uint64_t id : ids) EXPECT_TRUE(channel->Wait(id, kLong).ok());
}

TEST_F(RequestChannelTest, IdsWrapAroundTheSlotsOfThePage) {
  auto channel = Open();
  fake_.AutoComplete();
  uint64_t id = 0;
  for (uint32_t i = 0; i < 2 * kMaxPendingRequests + 5; ++i) id = *channel->Submit(Release(0));
  EXPECT_EQ(id, 2 * kMaxPendingRequests + 5);
  EXPECT_TRUE(channel->Wait(id, kLong).ok());
  EXPECT_TRUE(channel->Wait(1, kLong).ok())
      << "a request of long ago is still known to be complete";
}

TEST_F(RequestChannelTest, ARequestWaitsForAFreeSlot) {
  auto channel = Open(absl::Milliseconds(30));
  for (uint32_t i = 0; i < kMaxPendingRequests; ++i) {
    ASSERT_TRUE(channel->Submit(Release(0)).ok());
  }
  const auto refused = channel->Submit(Release(0));
  EXPECT_TRUE(absl::IsDeadlineExceeded(refused.status())) << refused.status();
  fake_.Complete(2);
  EXPECT_FALSE(channel->Submit(Release(0)).ok()) << "request 1 still occupies the slot";
  fake_.Complete(1);
  EXPECT_EQ(*channel->Submit(Release(0)), kMaxPendingRequests + 1);
}

TEST_F(RequestChannelTest, ADeadlineNamesTheRequest) {
  auto channel = Open();
  SessionRequest gather;
  gather.mutable_gather()->add_units(4);
  gather.mutable_gather()->add_units(9);
  const uint64_t id = *channel->Submit(gather);
  const absl::Status status = channel->Wait(id, absl::Milliseconds(20));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("gather of units 4, 9 (request 1)"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("connected"));
  EXPECT_TRUE(absl::IsInvalidArgument(channel->Wait(2, kLong)));
  EXPECT_TRUE(absl::IsInvalidArgument(channel->Wait(0, kLong)));
}

TEST_F(RequestChannelTest, AWaiterGetsTheReasonOfAFailure) {
  auto channel = Open();
  const uint64_t id = *channel->Submit(Release(6));
  ASSERT_TRUE(fake_.AwaitRequests(2));
  fake_.Fail(id, absl::FailedPreconditionError("unit 6 was not gathered"));
  const absl::Status status = channel->Wait(id, kLong);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("unit 6 was not gathered"));
  EXPECT_EQ(channel->Wait(id, kLong).code(), status.code());
}

TEST_F(RequestChannelTest, AStepIsRefusedWithAFailureThatNobodyWaitedFor) {
  auto channel = Open();
  const uint64_t lost = *channel->Submit(Release(6));
  ASSERT_TRUE(fake_.AwaitRequests(2));
  fake_.Fail(lost, absl::FailedPreconditionError("unit 6 was not gathered"));
  const auto refused = channel->Submit(StepOf(1));
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status())) << refused.status();
  EXPECT_TRUE(channel->Submit(StepOf(1)).ok()) << "it is reported once";
}

TEST_F(RequestChannelTest, ACommittedStepStillTellsOfAFailureBeforeIt) {
  auto channel = Open();
  const uint64_t scatter = *channel->Submit(Release(6));
  const uint64_t step = *channel->Submit(StepOf(1));
  ASSERT_TRUE(fake_.AwaitRequests(3));
  fake_.Fail(scatter, absl::InvalidArgumentError("the slot lies outside of the window"));
  fake_.Complete(step);
  EXPECT_TRUE(absl::IsInvalidArgument(channel->Wait(step, kLong)));
  EXPECT_TRUE(channel->Wait(step, kLong).ok());
}

TEST_F(RequestChannelTest, APoisonedJobFailsEveryCallWithItsReason) {
  auto channel = Open();
  const uint64_t id = *channel->Submit(Release(1));
  ASSERT_TRUE(fake_.AwaitRequests(2));
  std::thread poisoner([&] {
    fake_.PoisonPage();
    fake_.SendFailure(0, absl::AbortedError("rank 1 gathers unit 2, rank 0 unit 3"));
  });
  const absl::Status status = channel->Wait(id, kLong);
  poisoner.join();
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1 gathers unit 2"));
  EXPECT_TRUE(absl::IsAborted(channel->Submit(Release(1)).status()));
}

TEST_F(RequestChannelTest, AReasonInThePageIsToldWhenTheWorkerIsDead) {
  auto channel = Open();
  const uint64_t id = *channel->Submit(Release(1));
  fake_.PoisonPage(absl::DeadlineExceededError("worker 1 got stuck 3 times"));
  const absl::Status status = channel->Wait(id, kLong);
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("worker 1 got stuck 3 times"));
}

TEST_F(RequestChannelTest, APoisonedPageWithoutAReasonEndsWaitsAllTheSame) {
  auto channel = Open();
  const uint64_t id = *channel->Submit(Release(1));
  fake_.PoisonPage();
  EXPECT_TRUE(absl::IsAborted(channel->Wait(id, kLong)));
}

TEST_F(RequestChannelTest, CallbacksRunOnceWithTheOutcome) {
  auto channel = Open();
  const uint64_t good = *channel->Submit(Release(0));
  const uint64_t bad = *channel->Submit(Release(1));
  const uint64_t never = *channel->Submit(Release(2));
  ASSERT_TRUE(fake_.AwaitRequests(4));
  absl::Notification good_done, bad_done;
  absl::Status good_status, bad_status, never_status;
  channel->OnComplete(good, [&](absl::Status status) {
    good_status = status;
    good_done.Notify();
  });
  channel->OnComplete(bad, [&](absl::Status status) {
    bad_status = status;
    bad_done.Notify();
  });
  channel->OnComplete(never, [&](absl::Status status) { never_status = status; });
  fake_.Complete(good);
  fake_.Fail(bad, absl::OutOfRangeError("no such unit"));
  ASSERT_TRUE(good_done.WaitForNotificationWithTimeout(absl::Seconds(10)));
  ASSERT_TRUE(bad_done.WaitForNotificationWithTimeout(absl::Seconds(10)));
  EXPECT_TRUE(good_status.ok());
  EXPECT_TRUE(absl::IsOutOfRange(bad_status));
  channel.reset();
  EXPECT_FALSE(never_status.ok());
}

TEST_F(RequestChannelTest, ThreadsSubmitAndWaitAtOnce) {
  auto channel = Open();
  fake_.AutoComplete();
  std::atomic<int> failures{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 300; ++i) {
        const auto id = channel->Submit(Release(0));
        if (!id.ok() || !channel->Wait(*id, kLong).ok()) failures.fetch_add(1);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures.load(), 0);
  const std::vector<uint64_t> ids = fake_.ids();
  ASSERT_EQ(ids.size(), 1200u);
  for (size_t i = 0; i < ids.size(); ++i) ASSERT_EQ(ids[i], i + 1);
}

TEST_F(RequestChannelTest, CloseEndsWaitsInOtherThreads) {
  auto channel = Open();
  const uint64_t id = *channel->Submit(Release(0));
  absl::Status status;
  std::thread waiter([&] { status = channel->Wait(id, kLong); });
  channel->Close(absl::FailedPreconditionError("this rank has left the job"));
  waiter.join();
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_TRUE(absl::IsFailedPrecondition(channel->Submit(Release(0)).status()));
}

}  // namespace
}  // namespace zeroshard
