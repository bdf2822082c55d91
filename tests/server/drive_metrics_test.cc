// What the daemon exports and logs of drives.
#include "server/drive_metrics.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "tests/storage/fake_drives.h"
#include "tests/storage/io_budget_fixture.h"

namespace zeroshard {
namespace {

constexpr uint64_t kMiB = 1 << 20;

class DriveMetricsTest : public ::testing::Test {
 protected:
  DriveMetricsTest() {
    // The test's directory lies on a drive of the made-up /sys, whatever its real device is.
    struct stat file = {};
    EXPECT_EQ(::stat(path().c_str(), &file), 0);
    drives_.AddDrive("pci0/nvme/nvme0/nvme0n1", "259:0", "pci0/nvme/nvme0", 1'000'000'000'000);
    if (major(file.st_dev) == 0) {
      drives_.Put("dev/nvme0n1", "");
      drives_.Put("proc/self/mountinfo",
                  absl::StrCat("1 2 ", major(file.st_dev), ":", minor(file.st_dev),
                               " / /x rw - btrfs /dev/nvme0n1 rw"));
    } else {
      drives_.Link(absl::StrCat("sys/dev/block/", major(file.st_dev), ":", minor(file.st_dev)),
                   "sys/devices/pci0/nvme/nvme0/nvme0n1");
    }
    device_ = *budget_.AddDevice(path(), {.write_budget = 100 * kMiB});
    holder_ = *budget_.AddHolder("llm", 0);
  }

  const std::string& path() const { return drives_.dir().path(); }
  std::unique_ptr<DriveMetrics> Metrics() {
    return std::make_unique<DriveMetrics>(
        table_, budget_,
        DriveMetricsOptions{.sources = drives_.sources(), .interval = absl::Milliseconds(1)});
  }
  static std::vector<std::byte> Smart(int kelvin, int used, int errors, int warning = 0) {
    std::vector<std::byte> page(kSmartLogBytes);
    page[0] = std::byte(warning);
    page[1] = std::byte(kelvin & 0xff);
    page[2] = std::byte(kelvin >> 8);
    page[5] = std::byte(used);
    page[48] = std::byte{1};
    page[160] = std::byte(errors);
    return page;
  }
  std::vector<DriveNote> UpdateAfterReading(DriveMetrics& metrics) {
    std::vector<DriveNote> notes = metrics.Update();
    metrics.watch().AwaitReading();
    for (DriveNote& note : metrics.Update()) notes.push_back(std::move(note));
    return notes;
  }
  double Value(const std::string& family, const MetricLabels& labels) const {
    for (const MetricFamily& one : table_->Families()) {
      if (one.name != family) continue;
      for (const MetricSeries& series : one.series) {
        if (series.labels != labels) continue;
        return series.counter ? series.counter->value() : series.gauge->value();
      }
    }
    return -1;
  }
  double OfPath(const std::string& family) const { return Value(family, {{"path", path()}}); }
  double OfJob(const std::string& family) const {
    return Value(family, {{"job", "llm"}, {"path", path()}});
  }
  bool Write(uint64_t bytes) {
    return budget_.TryTake(device_, holder_, bytes, IoDirection::kWrite).granted;
  }

  FakeDrives drives_;
  ManualClock clock_;
  SharedIoBudget shared_{&clock_};
  const IoBudget budget_ = shared_.budget();
  const std::shared_ptr<MetricsTable> table_ = std::make_shared<MetricsTable>();
  uint32_t device_ = 0;
  uint32_t holder_ = 0;
};

int Count(const std::vector<DriveNote>& notes, LogLevel level, const std::string& text) {
  int count = 0;
  for (const DriveNote& note : notes) {
    count += note.level == level && absl::StrContains(note.text, text);
  }
  return count;
}

TEST_F(DriveMetricsTest, BytesOfJobsGrowWithTheBudgetsCounts) {
  const auto metrics = Metrics();
  ASSERT_TRUE(Write(3 * kMiB));
  ASSERT_TRUE(budget_.TryTake(device_, holder_, kMiB, IoDirection::kRead).granted);
  metrics->Update();
  metrics->Update();
  EXPECT_EQ(OfJob("zeroshard_nvme_written_bytes_total"), 3 * kMiB);
  EXPECT_EQ(OfJob("zeroshard_nvme_read_bytes_total"), kMiB);
  ASSERT_TRUE(Write(kMiB));
  metrics->Update();
  EXPECT_EQ(OfJob("zeroshard_nvme_written_bytes_total"), 4 * kMiB);
  EXPECT_DOUBLE_EQ(OfPath("zeroshard_nvme_write_budget_ratio"), 0.04);
  EXPECT_EQ(OfPath("zeroshard_nvme_wait_seconds_total"), 0);
  EXPECT_EQ(OfPath("zeroshard_nvme_overdrafts_total"), 0);
}

TEST_F(DriveMetricsTest, AJobOfTheSameNameCountsFromZero) {
  const auto metrics = Metrics();
  ASSERT_TRUE(Write(3 * kMiB));
  metrics->Update();
  budget_.RemoveHolder(holder_);
  metrics->Remove("llm");
  table_->RemoveSeries("job", "llm");
  metrics->Update();
  EXPECT_EQ(OfJob("zeroshard_nvme_written_bytes_total"), -1);
  holder_ = *budget_.AddHolder("llm", 0);
  ASSERT_TRUE(Write(5 * kMiB));
  metrics->Update();
  EXPECT_EQ(OfJob("zeroshard_nvme_written_bytes_total"), 5 * kMiB);
}

TEST_F(DriveMetricsTest, BudgetsThatAreUsedUpAreWarnedOfOnceADay) {
  const auto metrics = Metrics();
  ASSERT_TRUE(Write(90 * kMiB));
  std::vector<DriveNote> notes = metrics->Update();
  EXPECT_EQ(Count(notes, LogLevel::kWarn, "90 % of nvme_write_budget (100.00 MiB)"), 1);
  EXPECT_EQ(Count(metrics->Update(), LogLevel::kWarn, ""), 0);
  ASSERT_TRUE(Write(10 * kMiB));
  notes = metrics->Update();
  EXPECT_EQ(Count(notes, LogLevel::kWarn, "until midnight all jobs together write at"), 1);
  EXPECT_EQ(Count(metrics->Update(), LogLevel::kWarn, ""), 0);
}

TEST_F(DriveMetricsTest, TheHealthOfThePathsDrivesIsExported) {
  drives_.smart["nvme0"] = Smart(314, 7, 2);
  const auto metrics = Metrics();
  const std::vector<DriveNote> notes = UpdateAfterReading(*metrics);
  EXPECT_EQ(OfPath("zeroshard_drive_temperature_celsius"), 41);
  EXPECT_EQ(OfPath("zeroshard_drive_used_percent"), 7);
  EXPECT_EQ(OfPath("zeroshard_drive_media_errors_total"), 2);
  EXPECT_EQ(OfPath("zeroshard_drive_written_bytes_total"), 512'000);
  EXPECT_EQ(Count(notes, LogLevel::kInfo, path() + " lies on nvme0n1 (1000.0 GB), 41 C"), 1);
  EXPECT_EQ(Count(notes, LogLevel::kWarn, ""), 0);
  EXPECT_TRUE(UpdateAfterReading(*metrics).empty());
  EXPECT_EQ(OfPath("zeroshard_drive_media_errors_total"), 2);
}

TEST_F(DriveMetricsTest, WhatADriveBeginsToWarnOfIsLoggedOnce) {
  auto changing = std::make_shared<std::atomic<int>>(0);
  DriveMetricsOptions options{.sources = drives_.sources(), .interval = absl::Milliseconds(1)};
  options.sources.smart_log =
      [changing](const std::string&) -> absl::StatusOr<std::vector<std::byte>> {
    switch (changing->load()) {
      case 0:
        return Smart(300, 99, 4);
      case 1:
        return Smart(300, 100, 6, 0x08);
      default:
        return absl::UnavailableError("gone");
    }
  };
  DriveMetrics metrics(table_, budget_, options);
  EXPECT_EQ(Count(UpdateAfterReading(metrics), LogLevel::kWarn, ""), 0);
  *changing = 1;
  metrics.watch().AwaitReading();
  const std::vector<DriveNote> notes = metrics.Update();
  EXPECT_EQ(Count(notes, LogLevel::kWarn, "2 new media errors"), 1);
  EXPECT_EQ(Count(notes, LogLevel::kWarn, "the drive warns: read-only"), 1);
  EXPECT_EQ(Count(notes, LogLevel::kWarn, "is used up"), 1);
  EXPECT_EQ(OfPath("zeroshard_drive_media_errors_total"), 6);
  EXPECT_TRUE(UpdateAfterReading(metrics).empty());
  *changing = 2;
  metrics.watch().AwaitReading();
  EXPECT_TRUE(metrics.Update().empty());
  EXPECT_TRUE(std::isnan(OfPath("zeroshard_drive_used_percent")));
  EXPECT_EQ(OfPath("zeroshard_drive_media_errors_total"), 6);
}

TEST_F(DriveMetricsTest, WhatCannotBeReadIsSaidOnceAndHasNoSeries) {
  ASSERT_TRUE(budget_.AddDevice("/no/such/path", {}).ok());
  const auto metrics = Metrics();
  const std::vector<DriveNote> notes = UpdateAfterReading(*metrics);
  EXPECT_EQ(Count(notes, LogLevel::kInfo, "nvme0n1: no wear and media errors: open /dev/nvme0"), 1);
  EXPECT_EQ(Count(notes, LogLevel::kInfo, "nvme0n1: no temperature"), 1);
  EXPECT_EQ(Count(notes, LogLevel::kInfo, "/no/such/path: the health of its drives is not known"),
            1);
  EXPECT_EQ(OfPath("zeroshard_drive_temperature_celsius"), -1);
  EXPECT_EQ(OfPath("zeroshard_drive_media_errors_total"), -1);
  EXPECT_EQ(Value("zeroshard_nvme_write_budget_ratio", {{"path", "/no/such/path"}}), -1);
  EXPECT_TRUE(UpdateAfterReading(*metrics).empty());
}

}  // namespace
}  // namespace zeroshard
