// The daily write budget: counts, warnings, slowed writes, midnight, and the file of the counts.
#include <map>
#include <string>

#include "storage/io_budget.h"
#include "storage/io_write_counts.h"
#include "tests/storage/io_budget_fixture.h"
#include "tests/storage/temp_dir.h"

namespace zeroshard {
namespace {

constexpr uint64_t kMiB = 1 << 20;
// 1 MiB a second over the day.
constexpr uint64_t kBudget = 86400 * kMiB;
constexpr int64_t kFirstDay = 20000;

class IoWriteBudgetTest : public ::testing::Test {
 protected:
  IoTurn Write(uint64_t bytes) {
    return budget_.TryTake(device_, holder_, bytes, IoDirection::kWrite);
  }
  double ratio() const { return budget_.usage(device_).budget_ratio; }

  ManualClock clock_{absl::UnixEpoch() + kFirstDay * absl::Hours(24)};
  SharedIoBudget shared_{&clock_};
  IoBudget budget_ = shared_.budget();
  const uint32_t device_ = *budget_.AddDevice("/mnt/nvme 0%", {.write_budget = kBudget});
  const uint32_t holder_ = *budget_.AddHolder("a", 0);
};

TEST_F(IoWriteBudgetTest, BelowTheBudgetNothingIsSlowed) {
  for (int i = 0; i < 9; ++i) ASSERT_TRUE(Write(kBudget / 10).granted);
  EXPECT_DOUBLE_EQ(ratio(), 0.9);
  EXPECT_EQ(budget_.usage(device_).waiting, 0u);
}

TEST_F(IoWriteBudgetTest, PastTheBudgetWritesGoAtItsRateAndReadsAsTheyLike) {
  ASSERT_TRUE(Write(kBudget).granted);
  const uint32_t other = *budget_.AddHolder("b", 0);
  IoSimulation simulation(&clock_, budget_, device_);
  simulation.Add({.holder = holder_, .direction = IoDirection::kWrite});
  simulation.Add({.holder = other, .bytes = kMiB / 2, .direction = IoDirection::kWrite});
  simulation.Add({.holder = holder_,
                  .bytes = kMiB,
                  .direction = IoDirection::kRead,
                  .lanes = 1,
                  .service = [] { return absl::Milliseconds(10); }});
  simulation.RunUntil(absl::Seconds(1000));
  const uint64_t written = simulation.moved(0) + simulation.moved(1);
  EXPECT_NEAR(static_cast<double>(written), 1000.0 * kMiB, 10.0 * kMiB);
  EXPECT_NEAR(static_cast<double>(simulation.moved(0)), 500.0 * kMiB, 10.0 * kMiB);
  EXPECT_GE(simulation.moved(2), 99000 * kMiB);
}

TEST_F(IoWriteBudgetTest, WritesThatAreSlowedDoNotHoldUpReadsUnderARate) {
  ASSERT_TRUE(budget_
                  .AddDevice(budget_.path(device_),
                             {.bytes_per_second = 100 * kMiB, .write_budget = kBudget})
                  .ok());
  budget_.AddEarlier(device_, {.day = kFirstDay, .written = kBudget});
  const uint32_t other = *budget_.AddHolder("b", 0);
  IoSimulation simulation(&clock_, budget_, device_);
  simulation.Add({.holder = holder_, .bytes = 4 * kMiB, .direction = IoDirection::kWrite});
  simulation.Add({.holder = other});
  simulation.RunUntil(absl::Seconds(100));
  EXPECT_NEAR(static_cast<double>(simulation.moved(0)), 100.0 * kMiB, 5.0 * kMiB);
  EXPECT_NEAR(static_cast<double>(simulation.total()), 10000.0 * kMiB, 100.0 * kMiB);
}

TEST_F(IoWriteBudgetTest, WarnsOfEachThingOnceADay) {
  EXPECT_EQ(budget_.TakeWarning(device_), std::nullopt);
  ASSERT_TRUE(Write(kBudget - kMiB).granted);
  EXPECT_EQ(budget_.TakeWarning(device_), IoWarning::kWritesNearBudget);
  EXPECT_EQ(budget_.TakeWarning(device_), std::nullopt);
  ASSERT_TRUE(Write(kMiB).granted);
  EXPECT_EQ(budget_.TakeWarning(device_), IoWarning::kWritesSlowed);
  EXPECT_EQ(budget_.TakeWarning(device_), std::nullopt);
  clock_.Advance(absl::Hours(24));
  EXPECT_EQ(budget_.TakeWarning(device_), std::nullopt);
  ASSERT_TRUE(Write(2 * kBudget).granted);
  EXPECT_EQ(budget_.TakeWarning(device_), IoWarning::kWritesSlowed);
  EXPECT_EQ(budget_.TakeWarning(device_), std::nullopt);
}

TEST_F(IoWriteBudgetTest, ANewDayBeginsAtMidnightUtc) {
  clock_.Advance(absl::Hours(24) - absl::Seconds(10));
  ASSERT_TRUE(Write(kBudget).granted);
  ASSERT_TRUE(Write(100 * kMiB).granted);  // paid for by a wait of the next one
  IoTurn turn = Write(kMiB);
  EXPECT_FALSE(turn.granted);
  EXPECT_EQ(turn.wait, IoBudget::kMaxWait);
  clock_.Advance(absl::Seconds(9));
  EXPECT_FALSE(Write(kMiB).granted);
  clock_.Advance(absl::Seconds(1));
  EXPECT_EQ(ratio(), 0);
  EXPECT_EQ(budget_.today(device_).day, kFirstDay + 1);
  EXPECT_TRUE(Write(kMiB).granted);
  EXPECT_TRUE(Write(kMiB).granted);
  EXPECT_EQ(budget_.usage(device_).written_today, 2 * kMiB);
  EXPECT_EQ(budget_.usage(device_).bytes[1], kBudget + 102 * kMiB);
}

TEST_F(IoWriteBudgetTest, AClockThatIsSetBackDoesNotBeginTheDayAnew) {
  ASSERT_TRUE(Write(kMiB).granted);
  ManualClock yesterday(clock_.Now() - absl::Seconds(5));
  const IoBudget late = *IoBudget::Adopt(shared_.memory(), &yesterday);
  ASSERT_TRUE(late.TryTake(device_, holder_, kMiB, IoDirection::kWrite).granted);
  EXPECT_EQ(late.usage(device_).written_today, 2 * kMiB);
  EXPECT_EQ(budget_.usage(device_).written_today, 2 * kMiB);
  // A clock that was far ahead by mistake does not hold the count for years.
  ManualClock past(clock_.Now() - absl::Hours(1000));
  const IoBudget corrected = *IoBudget::Adopt(shared_.memory(), &past);
  ASSERT_TRUE(corrected.TryTake(device_, holder_, kMiB, IoDirection::kWrite).granted);
  EXPECT_EQ(corrected.usage(device_).written_today, kMiB);
}

TEST_F(IoWriteBudgetTest, TheCountSurvivesTheDaemon) {
  const TempDir dir;
  IoWriteCounts counts = *IoWriteCounts::Load(dir.fd());
  ASSERT_TRUE(Write(5 * kMiB).granted);
  ASSERT_TRUE(counts.Save(budget_).ok());
  ASSERT_TRUE(counts.Save(budget_).ok());
  EXPECT_EQ(dir.Count(), 1u);

  SharedIoBudget next(&clock_);
  const IoBudget budget = next.budget();
  IoWriteCounts loaded = *IoWriteCounts::Load(dir.fd());
  const uint32_t other = *budget.AddDevice("/mnt/nvme1", {});
  loaded.Restore(budget, other);
  ASSERT_TRUE(loaded.Save(budget).ok());  // keeps what is not restored yet
  IoWriteCounts again = *IoWriteCounts::Load(dir.fd());
  const uint32_t device = *budget.AddDevice(budget_.path(device_), {.write_budget = kBudget});
  again.Restore(budget, device);
  again.Restore(budget, device);
  EXPECT_EQ(budget.usage(device).written_today, 5 * kMiB);
  EXPECT_EQ(budget.usage(device).bytes[1], 0u);
  EXPECT_EQ(budget.usage(other).written_today, 0u);

  // A count of another day is none of today.
  clock_.Advance(absl::Hours(24));
  SharedIoBudget tomorrow(&clock_);
  const uint32_t fresh = *tomorrow.budget().AddDevice(budget_.path(device_), {});
  IoWriteCounts old = *IoWriteCounts::Load(dir.fd());
  old.Restore(tomorrow.budget(), fresh);
  EXPECT_EQ(tomorrow.budget().usage(fresh).written_today, 0u);
}

TEST_F(IoWriteBudgetTest, ADamagedFileIsReportedWithItsName) {
  const TempDir dir;
  EXPECT_EQ(FormatWriteCounts({{"/mnt/nvme0", {20786, 18253611008}}}),  // as docs/io_budget.md
            "zeroshard-nvme-writes 1\n20786 18253611008 /mnt/nvme0\nxxh3 7744e5c441855ab0\n");
  const std::string text = FormatWriteCounts({{"/a b\n", {kFirstDay, 7}}, {"/c", {1, 0}}});
  EXPECT_EQ(text,
            "zeroshard-nvme-writes 1\n"
            "20000 7 /a%20b%0A\n"
            "1 0 /c\n" +
                text.substr(text.find("xxh3")));
  const auto parsed = ParseWriteCounts(text);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->at("/a b\n").written, 7u);
  for (size_t i = 0; i < text.size(); ++i) {
    std::string damaged = text;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    EXPECT_EQ(ParseWriteCounts(damaged).status().code(), absl::StatusCode::kDataLoss) << i;
    EXPECT_FALSE(ParseWriteCounts(text.substr(0, i)).ok()) << i;
  }
  dir.Write(IoWriteCounts::kFileName, text.substr(1));
  const absl::Status status = IoWriteCounts::Load(dir.fd()).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(status.message().find(IoWriteCounts::kFileName), absl::string_view::npos) << status;
  // A daemon that begins anew replaces it.
  ASSERT_TRUE(IoWriteCounts(dir.fd()).Save(budget_).ok());
  EXPECT_TRUE(IoWriteCounts::Load(dir.fd()).ok());
}

}  // namespace
}  // namespace zeroshard
