// A channel whose worker is replaced, refuses the rank, or stays away.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "base/fd_passing.h"
#include "client/fork_guard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/client/request_channel_fixture.h"

namespace zeroshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

int OpenSockets() {
  int sockets = 0;
  for (int fd = 3; fd < 256; ++fd) {
    char path[64], target[64] = {};
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    if (readlink(path, target, sizeof(target) - 1) > 0 && strncmp(target, "socket:", 7) == 0) {
      ++sockets;
    }
  }
  return sockets;
}

TEST_F(RequestChannelTest, AWorkerThatHasNotHeardOfTheRankYetIsAskedAgain) {
  fake_.RefuseHellos(3, absl::UnauthenticatedError("unknown token"));
  auto channel = Open();
  ASSERT_NE(channel, nullptr);
  EXPECT_EQ(fake_.requests().size(), 4u);
}

TEST_F(RequestChannelTest, AReplacedWorkerThatHasNotHeardOfTheRankYetIsAskedAgain) {
  auto channel = Open();
  const uint64_t id = *channel->Submit(Release(0));
  ASSERT_TRUE(fake_.AwaitRequests(2));
  fake_.RefuseHellos(3, absl::UnauthenticatedError("unknown token"));
  fake_.EndStreams(absl::UnavailableError("cut"));
  ASSERT_TRUE(fake_.AwaitRequests(2 + 4 + 1));
  fake_.Complete(id);
  EXPECT_TRUE(channel->Wait(id, kLong).ok());
}

TEST_F(RequestChannelTest, AReplacedWorkerGetsTheUnfinishedRequestsAgain) {
  auto channel = Open();
  for (uint32_t unit = 0; unit < 5; ++unit) ASSERT_TRUE(channel->Submit(Release(unit)).ok());
  ASSERT_TRUE(fake_.AwaitRequests(6));
  fake_.Complete(1);
  fake_.Complete(3);
  fake_.Stop();
  ASSERT_EQ(*channel->Submit(Release(5)), 6u) << "a request may be made while there is no worker";
  fake_.Start();
  ASSERT_TRUE(fake_.AwaitRequests(6 + 1 + 4));
  const auto requests = fake_.requests();
  EXPECT_TRUE(requests[6].hello().reconnect());
  const std::vector<uint64_t> ids = fake_.ids();
  EXPECT_THAT(std::vector<uint64_t>(ids.begin() + 5, ids.end()), ElementsAre(2, 4, 5, 6));
  for (const uint64_t id : {2, 4, 5, 6}) fake_.Complete(id);
  for (uint64_t id = 1; id <= 6; ++id) EXPECT_TRUE(channel->Wait(id, kLong).ok());
  EXPECT_EQ(channel->reconnects(), 1u);
}

TEST_F(RequestChannelTest, ManyCutsLoseNothingAndKeepTheOrder) {
  auto channel = Open();
  fake_.AutoComplete();
  uint64_t id = 0;
  for (int i = 0; i < 3000; ++i) {
    id = *channel->Submit(Release(0));
    if (i % 50 == 0) fake_.EndStreams(absl::UnavailableError("cut"));
    if (i % 100 == 0) {
      ASSERT_TRUE(channel->Wait(id, kLong).ok());
    }
  }
  for (uint64_t one = 1; one <= id; ++one) ASSERT_TRUE(channel->Wait(one, kLong).ok());
  EXPECT_GE(channel->reconnects(), 10u);
  // Within one connection the ids rise.
  uint64_t last = 0;
  for (const SessionRequest& request : fake_.requests()) {
    if (request.has_hello()) {
      last = 0;
    } else {
      ASSERT_GT(request.id(), last);
      last = request.id();
    }
  }
}

TEST_F(RequestChannelTest, AWorkerThatRefusesTheRankEndsTheChannel) {
  auto channel = Open();
  const uint64_t id = *channel->Submit(Release(0));
  ASSERT_TRUE(fake_.AwaitRequests(2));
  fake_.RefuseHellos(1000, absl::FailedPreconditionError("generation 5 is over"));
  fake_.EndStreams(absl::UnavailableError("cut"));
  const absl::Status status = channel->Wait(id, kLong);
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("generation 5 is over"));
}

TEST_F(RequestChannelTest, AWorkerThatStaysAwayEndsTheChannelAfterThePatience) {
  auto channel = Open(kLong, /*patience=*/absl::Milliseconds(50));
  const uint64_t id = *channel->Submit(Release(0));
  fake_.Stop();
  const absl::Status status = channel->Wait(id, kLong);
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr("is lost to this rank")) << status;
}

TEST_F(RequestChannelTest, WhereNobodyListensAnyMoreTheChannelEndsSoon) {
  auto channel = Open();
  const uint64_t id = *channel->Submit(Release(0));
  fake_.Stop();
  const absl::Time start = absl::Now();
  const absl::Status status = channel->Wait(id, kLong);
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("the daemon or the job is gone"));
  EXPECT_GT(absl::Now() - start, absl::Seconds(1)) << "a reason may be on its way";
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
}

TEST_F(RequestChannelTest, AShorterDeadlineSaysThatTheWorkerIsGone) {
  auto channel = Open();
  const uint64_t id = *channel->Submit(Release(0));
  fake_.Stop();
  const absl::Status status = channel->Wait(id, absl::Milliseconds(200));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("has been gone"));
}

TEST_F(RequestChannelTest, AForkedChildHoldsNoConnectionOpen) {
  const uint64_t before = ForkGeneration();
  auto channel = Open();
  const pid_t child = fork();
  if (child == 0) {
    // The fake server's listener and its end of the stream are left; the client's end is closed.
    _exit(ForkGeneration() != before ? OpenSockets() : 100);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), OpenSockets() - 1);
  EXPECT_EQ(ForkGeneration(), before);
}

}  // namespace
}  // namespace zeroshard
