#include "base/clock.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "base/deadline.h"

namespace zeroshard {
namespace {

TEST(ClockTest, SystemClockMovesForward) {
  SystemClock clock;
  const absl::Duration start = clock.Elapsed();
  clock.SleepFor(absl::Milliseconds(2));
  EXPECT_GE(clock.Elapsed() - start, absl::Milliseconds(2));
  EXPECT_GT(clock.Now(), absl::FromUnixSeconds(1'600'000'000));
}

TEST(ClockTest, ManualClockStandsStill) {
  ManualClock clock(absl::FromUnixSeconds(100));
  EXPECT_EQ(clock.Now(), absl::FromUnixSeconds(100));
  EXPECT_EQ(clock.Elapsed(), absl::ZeroDuration());
  clock.Advance(absl::Seconds(5));
  EXPECT_EQ(clock.Now(), absl::FromUnixSeconds(105));
  EXPECT_EQ(clock.Elapsed(), absl::Seconds(5));
}

TEST(ClockTest, SleepersWakeWhenTheirTimeHasCome) {
  ManualClock clock;
  std::atomic<bool> woke = false;
  std::thread sleeper([&] {
    clock.SleepFor(absl::Seconds(10));
    woke = true;
  });
  clock.AwaitSleepers(1);
  clock.Advance(absl::Seconds(9));
  EXPECT_FALSE(woke);
  EXPECT_EQ(clock.sleepers(), 1);
  clock.Advance(absl::Seconds(1));
  sleeper.join();
  EXPECT_TRUE(woke);
  clock.SleepFor(-absl::Seconds(1));
}

TEST(DeadlineTest, PassesInTime) {
  EXPECT_TRUE(Deadline::After(-absl::Seconds(1)).Passed());
  EXPECT_FALSE(Deadline::After(absl::Hours(1)).Passed());
  EXPECT_EQ(Deadline::After(absl::InfiniteDuration()).Remaining(), absl::InfiniteDuration());
  EXPECT_LE(Deadline::After(absl::Seconds(1)).Remaining(), absl::Seconds(1));
}

}  // namespace
}  // namespace zeroshard
