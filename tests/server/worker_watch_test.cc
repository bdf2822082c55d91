#include "server/worker_watch.h"

#include <gtest/gtest.h>

namespace zeroshard {
namespace {

using Look = WorkerWatch::Look;

// Looks at worker 0 for `time`, always the same way; returns after how long it was found stuck.
absl::Duration StuckAfter(WorkerWatch& watch, const Look& look, absl::Duration time) {
  for (absl::Duration at; at < time; at += watch.interval()) {
    if (watch.IsStuck(0, look)) return at;
  }
  return absl::InfiniteDuration();
}

TEST(WorkerWatch, TheBoundIsAPartOfTheCollectiveTimeout) {
  EXPECT_EQ(WorkerWatch::BoundFor(absl::Seconds(1)), absl::Seconds(2));
  EXPECT_EQ(WorkerWatch::BoundFor(absl::Seconds(60)), absl::Seconds(15));
  EXPECT_EQ(WorkerWatch::BoundFor(absl::Minutes(5)), absl::Seconds(30));
  EXPECT_EQ(WorkerWatch::BoundFor(absl::InfiniteDuration()), absl::Seconds(30));
}

TEST(WorkerWatch, AWorkerThatMakesProgressIsNeverStuck) {
  WorkerWatch watch(absl::Seconds(8), 1);
  for (uint64_t progress = 0; progress < 100; ++progress) {
    EXPECT_EQ(StuckAfter(watch, {.incarnation = 1, .progress = progress}, absl::Seconds(7)),
              absl::InfiniteDuration());
  }
}

TEST(WorkerWatch, AWorkerWithoutProgressIsStuckAfterTheBoundAndAgainAfterAnother) {
  WorkerWatch watch(absl::Seconds(8), 1);
  const Look look{.incarnation = 1, .progress = 5};
  EXPECT_EQ(StuckAfter(watch, look, absl::Minutes(1)), absl::Seconds(8));
  EXPECT_EQ(StuckAfter(watch, look, absl::Minutes(1)), absl::Seconds(7));  // seen before
}

TEST(WorkerWatch, EachWorkerHasItsOwnTime) {
  WorkerWatch watch(absl::Seconds(8), 2);
  for (uint64_t i = 0; i < 8; ++i) {
    EXPECT_FALSE(watch.IsStuck(0, {.incarnation = 1, .progress = 1}));
    EXPECT_FALSE(watch.IsStuck(1, {.incarnation = 1, .progress = i}));
  }
  EXPECT_TRUE(watch.IsStuck(0, {.incarnation = 1, .progress = 1}));
  EXPECT_FALSE(watch.IsStuck(1, {.incarnation = 1, .progress = 9}));
}

TEST(WorkerWatch, ASuccessorStartsAnew) {
  WorkerWatch watch(absl::Seconds(8), 1);
  EXPECT_EQ(StuckAfter(watch, {.incarnation = 1, .progress = 5}, absl::Seconds(7)),
            absl::InfiniteDuration());
  EXPECT_EQ(StuckAfter(watch, {.incarnation = 2, .progress = 5}, absl::Minutes(1)),
            absl::Seconds(8));
}

TEST(WorkerWatch, WhoStartsHasAMinute) {
  WorkerWatch watch(absl::Seconds(8), 1);
  EXPECT_EQ(StuckAfter(watch, {.incarnation = 1, .starting = true}, absl::Hours(1)),
            absl::Minutes(1));
}

TEST(WorkerWatch, WhoIsExcusedHasAllTime) {
  WorkerWatch watch(absl::Seconds(8), 1);
  EXPECT_EQ(StuckAfter(watch, {.incarnation = 1, .excused = true}, absl::Hours(1)),
            absl::InfiniteDuration());
  EXPECT_EQ(StuckAfter(watch, {.incarnation = 1}, absl::Hours(1)), absl::Seconds(7));
}

}  // namespace
}  // namespace zeroshard
