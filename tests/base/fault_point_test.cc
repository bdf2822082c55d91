#include "base/fault_point.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "absl/status/statusor.h"
#include "absl/time/clock.h"

namespace zeroshard {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

absl::StatusOr<int> Guarded() {
  ZS_FAULT_POINT("test.before");
  ZS_FAULT_STATUS("test.guarded");
  return 1;
}

[[maybe_unused]] void NeverCalled() { ZS_FAULT_POINT("test.never_called"); }

class FaultPointTest : public ::testing::Test {
 protected:
  ~FaultPointTest() override { ResetFaultPoints(); }
};

TEST_F(FaultPointTest, MalformedSpecificationsAreRefused) {
  for (const char* bad : {"a", "=kill", "a=", "a=explode", "a=kill:x", "a=kill:0", "a=sleep",
                          "a=sleep:1:2:3", "a=return:1:2", "a=kill:-1"}) {
    EXPECT_EQ(ArmFaultPoints(bad).code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  EXPECT_TRUE(ArmFaultPoints("").ok());
}

#ifdef ZEROSHARD_FAULTS

TEST_F(FaultPointTest, EveryPointIsKnownBeforeItIsReached) {
  EXPECT_THAT(FaultPointNames(), ElementsAre("test.before", "test.guarded", "test.never_called"));
}

TEST_F(FaultPointTest, ReturnFailsTheFunctionAtTheChosenHit) {
  ASSERT_TRUE(ArmFaultPoints("test.guarded=return:2").ok());
  EXPECT_TRUE(Guarded().ok());
  EXPECT_EQ(Guarded().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Guarded().ok());
  EXPECT_EQ(FaultPointHits("test.guarded"), 3u);
}

TEST_F(FaultPointTest, ReturnWithoutANumberFailsEveryHit) {
  ASSERT_TRUE(ArmFaultPoints("elsewhere=kill; test.guarded=return").ok());
  EXPECT_FALSE(Guarded().ok());
  EXPECT_FALSE(Guarded().ok());
  ResetFaultPoints();
  EXPECT_TRUE(Guarded().ok());
}

TEST_F(FaultPointTest, SleepDelays) {
  ASSERT_TRUE(ArmFaultPoints("test.before=sleep:30").ok());
  const absl::Time start = absl::Now();
  EXPECT_TRUE(Guarded().ok());
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(29));
}

TEST_F(FaultPointTest, KillEndsTheProcessAtTheChosenHit) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (!ArmFaultPoints("test.before=kill:3").ok()) ::_exit(9);
    for (int i = 0; i < 2; ++i) {
      if (!Guarded().ok()) ::_exit(8);
    }
    static_cast<void>(Guarded());
    ::_exit(7);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status)) << status;
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
}

#else

TEST_F(FaultPointTest, AReleaseHasNoPointsAndSaysSo) {
  EXPECT_THAT(FaultPointNames(), IsEmpty());
  EXPECT_EQ(ArmFaultPoints("test.guarded=return").code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(Guarded().ok());
  EXPECT_EQ(FaultPointHits("test.guarded"), 0u);
}

#endif  // ZEROSHARD_FAULTS

}  // namespace
}  // namespace zeroshard
