// When the drives are said to hold a job up, and with which figures.
#include "server/tier_use.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Counters after so many steps of one second, each of which reads 500 MB and writes 250 MB, in 0.5
// s of the drive's time.
internal::v1::Stats After(uint64_t steps, double waiting) {
  internal::v1::Stats stats;
  stats.set_step(steps);
  stats.set_nvme_pass_us(steps * 1000000);
  stats.set_nvme_wait_us(static_cast<uint64_t>(static_cast<double>(steps) * waiting * 1e6));
  stats.set_nvme_compute_us(steps * 400000);
  internal::v1::NvmePathStats& path = *stats.add_nvme_paths();
  path.set_read_bytes(steps * 500000000);
  path.set_written_bytes(steps * 250000000);
  path.set_busy_us(steps * 500000);
  return stats;
}

std::string Describe(const std::vector<TierWindow>& windows) {
  const std::vector<NvmePathConfig> paths = {{.path = "/mnt/nvme0"}};
  return DescribeBottleneck(windows, paths, 2);
}

TEST(TierUse, TheBottleneckHasFigures) {
  TierHistory history;
  for (uint64_t step = 0; step <= 15; ++step) {
    history.Add(After(step, 0.6), absl::Seconds(static_cast<int64_t>(step)));
  }
  const TierWindow window = history.window();
  EXPECT_EQ(window.steps, 15u);
  EXPECT_EQ(window.passes, absl::Seconds(15));
  EXPECT_THAT(Describe({window}),
              AllOf(HasSubstr("the drives are the bottleneck: /mnt/nvme0 read 1000 MB/s and "
                              "written 500 MB/s"),
                    HasSubstr("a step moves 715.26 MiB in 1 s, of which 0.6 s is waiting"),
                    HasSubstr("compute alone would take 0.2 s")));
}

TEST(TierUse, AFifthOfThePassesIsNotWorthAWord) {
  TierHistory history;
  history.Add(After(0, 0.2), absl::ZeroDuration());
  history.Add(After(5, 0.2), absl::Seconds(5));
  EXPECT_EQ(Describe({history.window()}), "");
  EXPECT_EQ(Describe({TierHistory().window()}), "");
}

TEST(TierUse, OnlyTheLastSecondsCount) {
  TierHistory history;
  for (uint64_t step = 0; step <= 100; ++step) {
    history.Add(After(step, step < 50 ? 0.9 : 0.9 * 50 / static_cast<double>(step)),
                absl::Seconds(static_cast<int64_t>(step)));
  }
  EXPECT_LE(history.window().length, absl::Seconds(20));
  EXPECT_EQ(Describe({history.window()}), "") << "nothing has waited since step 50";
}

TEST(TierUse, ASuccessorBeginsAtNothing) {
  TierHistory history;
  history.Add(After(0, 0.9), absl::ZeroDuration());
  history.Add(After(9, 0.9), absl::Seconds(9));
  history.Add(After(1, 0.1), absl::Seconds(11));
  EXPECT_EQ(history.window().steps, 0u);
}

TEST(TierUse, WorkersShareTheirDrives) {
  TierHistory history;
  history.Add(After(0, 0.6), absl::ZeroDuration());
  history.Add(After(4, 0.6), absl::Seconds(4));
  const TierWindow window = history.window();
  EXPECT_THAT(Describe({window, window}),
              AllOf(HasSubstr("read 2000 MB/s"), HasSubstr("in 1 s, of which 0.6 s")));
}

}  // namespace
}  // namespace zeroshard
