// Shares, limits and bursts of an I/O budget in simulated time.
#include "storage/io_budget.h"

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "tests/storage/io_budget_fixture.h"

namespace zeroshard {
namespace {

constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kRate = 100 * kMiB;

class IoBudgetTest : public ::testing::Test {
 protected:
  uint32_t Device(const IoLimits& limits) {
    device_ = *budget_.AddDevice("/mnt/nvme0", limits);
    return device_;
  }
  uint32_t Holder(const std::string& job, uint32_t worker = 0) {
    return *budget_.AddHolder(job, worker);
  }
  IoSimulation Simulation() { return IoSimulation(&clock_, budget_, device_); }
  bool Take(uint32_t holder, uint64_t bytes, IoDirection direction = IoDirection::kRead) {
    return budget_.TryTake(device_, holder, bytes, direction).granted;
  }

  ManualClock clock_;
  SharedIoBudget shared_{&clock_};
  IoBudget budget_ = shared_.budget();
  uint32_t device_ = 0;
};

void ExpectShare(uint64_t moved, double share, uint64_t total, double tolerance = 0.02) {
  EXPECT_NEAR(static_cast<double>(moved) / static_cast<double>(total), share, tolerance);
}

std::function<absl::Duration()> Takes(absl::Duration duration) {
  return [duration] { return duration; };
}

// Never more in a window of time than the rate, the burst and one transfer.
void ExpectBounded(const IoSimulation& simulation, uint64_t rate, uint64_t largest) {
  const auto& grants = simulation.grants();
  size_t first = 0;
  double bytes = 0;
  const double burst = absl::ToDoubleSeconds(IoBudget::kBurst) * static_cast<double>(rate);
  for (size_t last = 0; last < grants.size(); ++last) {
    bytes += static_cast<double>(grants[last].second);
    while (grants[last].first - grants[first].first > absl::Milliseconds(200)) {
      bytes -= static_cast<double>(grants[first++].second);
    }
    ASSERT_LE(bytes, 0.2 * static_cast<double>(rate) + burst + static_cast<double>(largest));
  }
}

TEST_F(IoBudgetTest, WithoutLimitsAllIsGrantedAndCounted) {
  Device({});
  const uint32_t a = Holder("a");
  for (int i = 0; i < 1000; ++i) ASSERT_TRUE(Take(a, kMiB, IoDirection::kWrite));
  ASSERT_TRUE(Take(a, 3 * kMiB));
  const IoBudget::Usage usage = budget_.usage(device_);
  EXPECT_EQ(usage.bytes[0], 3 * kMiB);
  EXPECT_EQ(usage.bytes[1], 1000 * kMiB);
  EXPECT_EQ(usage.written_today, 1000 * kMiB);
  EXPECT_EQ(usage.in_flight, 0u);
  EXPECT_EQ(usage.budget_ratio, 0);
}

TEST_F(IoBudgetTest, OneHolderHasTheWholeRateWithinOnePercent) {
  Device({.bytes_per_second = kRate});
  IoSimulation simulation = Simulation();
  simulation.Add({.holder = Holder("a")});
  simulation.RunUntil(absl::Seconds(20));
  ExpectShare(simulation.total(), 1, 20 * kRate, 0.01);
  ExpectBounded(simulation, kRate, kMiB);
}

TEST_F(IoBudgetTest, SmallTransfersDoNotExceedTheRate) {
  Device({.bytes_per_second = 1000 * kMiB});
  IoSimulation simulation = Simulation();
  simulation.Add({.holder = Holder("a"), .bytes = 4096});
  simulation.RunUntil(absl::Seconds(2));
  ExpectShare(simulation.total(), 1, 2000 * kMiB, 0.01);
}

TEST_F(IoBudgetTest, JobsHaveEqualSharesWhateverTheirTransfers) {
  Device({.bytes_per_second = kRate});
  IoSimulation simulation = Simulation();
  simulation.Add({.holder = Holder("a"), .bytes = 8 * kMiB});
  simulation.Add({.holder = Holder("b"), .bytes = 64 << 10});
  simulation.Add({.holder = Holder("c"), .bytes = kMiB, .direction = IoDirection::kWrite});
  simulation.RunUntil(absl::Seconds(20));
  ExpectShare(simulation.total(), 1, 20 * kRate, 0.01);
  for (size_t i = 0; i < 3; ++i) ExpectShare(simulation.moved(i), 1.0 / 3, simulation.total());
  ExpectBounded(simulation, kRate, 8 * kMiB);
}

TEST_F(IoBudgetTest, WorkersOfAJobShareItsShare) {
  Device({.bytes_per_second = kRate});
  IoSimulation simulation = Simulation();
  for (uint32_t worker = 0; worker < 3; ++worker) simulation.Add({.holder = Holder("a", worker)});
  simulation.Add({.holder = Holder("b")});
  simulation.RunUntil(absl::Seconds(20));
  ExpectShare(simulation.total(), 1, 20 * kRate, 0.01);
  for (size_t i = 0; i < 3; ++i) ExpectShare(simulation.moved(i), 1.0 / 6, simulation.total());
  ExpectShare(simulation.moved(3), 0.5, simulation.total());
}

TEST_F(IoBudgetTest, AnUnusedShareGoesToTheOthers) {
  Device({.bytes_per_second = kRate});
  IoSimulation simulation = Simulation();
  // Needs at most 10 MiB/s: one transfer of 1 MiB at a time that takes 100 ms.
  simulation.Add({.holder = Holder("slow"), .lanes = 1, .service = Takes(absl::Milliseconds(100))});
  simulation.Add({.holder = Holder("b")});
  simulation.Add({.holder = Holder("c")});
  simulation.RunUntil(absl::Seconds(20));
  ExpectShare(simulation.total(), 1, 20 * kRate, 0.01);
  EXPECT_GE(simulation.moved(0), 150 * kMiB);  // hardly held up by the others
  ExpectShare(simulation.moved(1), 0.46, simulation.total());
  ExpectShare(simulation.moved(2), 0.46, simulation.total());
}

TEST_F(IoBudgetTest, WhoComesLateNeitherCatchesUpNorStarves) {
  Device({.bytes_per_second = kRate});
  IoSimulation simulation = Simulation();
  simulation.Add({.holder = Holder("a")});
  simulation.Add({.holder = Holder("b"), .begin = absl::Seconds(10)});
  simulation.Add({.holder = Holder("c"), .end = absl::Seconds(5)});
  simulation.RunUntil(absl::Seconds(10));
  const uint64_t before = simulation.moved(0);
  ExpectShare(before, 0.75, 10 * kRate);
  simulation.RunUntil(absl::Seconds(20));
  ExpectShare(simulation.moved(1), 0.5, 10 * kRate);
  ExpectShare(simulation.moved(0) - before, 0.5, 10 * kRate);
}

TEST_F(IoBudgetTest, HoldersThatComeBackLateDoNotCostTheRate) {
  Device({.bytes_per_second = kRate});
  IoSimulation simulation = Simulation();
  std::mt19937 random(7);
  for (const char* job : {"a", "b", "c", "d"}) {
    simulation.Add({.holder = Holder(job), .bytes = kMiB, .late = [&random] {
                      return absl::Microseconds(random() % 8000);
                    }});
  }
  simulation.RunUntil(absl::Seconds(20));
  ExpectShare(simulation.total(), 1, 20 * kRate, 0.01);
  for (size_t i = 0; i < 4; ++i) ExpectShare(simulation.moved(i), 0.25, simulation.total(), 0.03);
}

TEST_F(IoBudgetTest, OwnReadsDoNotStarveOwnWrites) {
  Device({.bytes_per_second = kRate});
  const uint32_t a = Holder("a");
  IoSimulation simulation = Simulation();
  simulation.Add({.holder = a, .direction = IoDirection::kRead});
  simulation.Add({.holder = a, .direction = IoDirection::kWrite});
  simulation.Add({.holder = Holder("b")});
  simulation.RunUntil(absl::Seconds(20));
  ExpectShare(simulation.moved(0), 0.25, simulation.total());
  ExpectShare(simulation.moved(1), 0.25, simulation.total());
}

TEST_F(IoBudgetTest, WhoWaitsAndDoesNotComeBackHoldsTheOthersUpOnlyForTheGrace) {
  Device({.bytes_per_second = kRate});
  const uint32_t gone = Holder("gone");
  const uint32_t a = Holder("a");
  ASSERT_TRUE(Take(a, 10 * kMiB));  // 100 ms
  const IoTurn turn = budget_.TryTake(device_, gone, kMiB, IoDirection::kRead);
  ASSERT_FALSE(turn.granted);
  EXPECT_EQ(budget_.usage(device_).waiting, 1u);
  clock_.Advance(turn.wait);
  EXPECT_FALSE(Take(a, kMiB));  // it is the other's turn
  clock_.Advance(IoBudget::kGrace + absl::Nanoseconds(1));
  EXPECT_TRUE(Take(a, kMiB));
}

TEST_F(IoBudgetTest, AWithdrawnOrReleasedWishHoldsNobodyUp) {
  Device({.bytes_per_second = kRate});
  const uint32_t gone = Holder("gone");
  const uint32_t a = Holder("a");
  for (const bool killed : {false, true}) {
    ASSERT_TRUE(Take(a, 10 * kMiB));
    const IoTurn turn = budget_.TryTake(device_, gone, kMiB, IoDirection::kRead);
    ASSERT_FALSE(turn.granted);
    if (killed) {
      budget_.Release(gone);
    } else {
      budget_.Withdraw(device_, gone, IoDirection::kRead);
    }
    clock_.Advance(turn.wait);
    EXPECT_TRUE(Take(a, kMiB));
    clock_.Advance(absl::Seconds(1));
  }
}

TEST_F(IoBudgetTest, TheDepthIsHeldAndSharedAndNotWasted) {
  Device({.depth = 12});
  IoSimulation simulation = Simulation();
  std::mt19937 random(7);
  const auto service = [&random] { return absl::Microseconds(4000 + random() % 2000); };
  simulation.Add({.holder = Holder("a", 0), .service = service});
  simulation.Add({.holder = Holder("a", 1), .service = service});
  simulation.Add({.holder = Holder("b"), .service = service, .begin = absl::Seconds(1)});
  simulation.RunUntil(absl::Milliseconds(999));
  EXPECT_EQ(simulation.in_flight(0) + simulation.in_flight(1), 12u);
  simulation.RunUntil(absl::Seconds(2));
  EXPECT_EQ(simulation.in_flight(0), 3u);
  EXPECT_EQ(simulation.in_flight(1), 3u);
  EXPECT_EQ(simulation.in_flight(2), 6u);
  EXPECT_EQ(simulation.most_in_flight(), 12u);
  // At least 12 transfers each 5 ms and a poll.
  EXPECT_GE(simulation.total(), 0.88 * 12 * 2000 / 5 * kMiB);
  EXPECT_EQ(budget_.usage(device_).in_flight, 12u);
  EXPECT_EQ(budget_.usage(device_).overdrafts, 0u);
}

TEST_F(IoBudgetTest, DepthAndRateTogether) {
  Device({.bytes_per_second = kRate, .depth = 4});
  IoSimulation simulation = Simulation();
  // Four transfers at a time of 38 ms each are 105 MiB/s: the rate binds.
  for (const char* job : {"a", "b", "c"}) {
    simulation.Add({.holder = Holder(job), .service = Takes(absl::Milliseconds(38))});
  }
  simulation.RunUntil(absl::Seconds(20));
  EXPECT_EQ(simulation.most_in_flight(), 4u);
  ExpectShare(simulation.total(), 1, 20 * kRate, 0.02);
  for (size_t i = 0; i < 3; ++i)
    ExpectShare(simulation.moved(i), 1.0 / 3, simulation.total(), 0.05);
}

TEST_F(IoBudgetTest, TokensOfAStoppedHolderAreNotWaitedForForEver) {
  Device({.depth = 2});
  const uint32_t stopped = Holder("stopped");
  const uint32_t a = Holder("a");
  ASSERT_TRUE(Take(stopped, kMiB));
  ASSERT_TRUE(Take(stopped, kMiB));
  absl::Duration waited;
  IoTurn turn;
  while (!(turn = budget_.TryTake(device_, a, kMiB, IoDirection::kRead)).granted) {
    waited += turn.wait;
    ASSERT_LE(waited, absl::Seconds(3));
    clock_.Advance(turn.wait);
  }
  EXPECT_GE(waited, IoBudget::kPatience);
  EXPECT_EQ(budget_.usage(device_).overdrafts, 1u);
  EXPECT_GE(budget_.usage(device_).wait_seconds, 2.0);
  budget_.Give(device_, a);
  EXPECT_EQ(budget_.usage(device_).in_flight, 2u);
  budget_.Release(stopped);
  EXPECT_EQ(budget_.usage(device_).in_flight, 0u);
}

TEST_F(IoBudgetTest, ALimitCanBeChangedWhileItIsUsed) {
  Device({.bytes_per_second = kRate});
  IoSimulation simulation = Simulation();
  simulation.Add({.holder = Holder("a")});
  simulation.RunUntil(absl::Seconds(10));
  const uint64_t before = simulation.total();
  EXPECT_EQ(Device({.bytes_per_second = kRate / 4}), device_);
  EXPECT_EQ(budget_.limits(device_), (IoLimits{.bytes_per_second = kRate / 4}));
  simulation.RunUntil(absl::Seconds(20));
  ExpectShare(simulation.total() - before, 0.25, 10 * kRate, 0.01);
}

TEST_F(IoBudgetTest, TransfersOfADepthThatWasLoweredAreGivenBack) {
  Device({.depth = 4});
  const uint32_t a = Holder("a");
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Take(a, kMiB));
  Device({.depth = 1});
  EXPECT_FALSE(Take(a, kMiB));
  for (int i = 0; i < 4; ++i) budget_.Give(device_, a);
  EXPECT_EQ(budget_.usage(device_).in_flight, 0u);
  EXPECT_TRUE(Take(a, kMiB));
  EXPECT_FALSE(Take(a, kMiB));
}

TEST_F(IoBudgetTest, CountsStayWithTheWorkerOverItsRestartsAndGoWithTheJob) {
  Device({});
  const uint32_t other = *budget_.AddDevice("/mnt/nvme1", {});
  const uint32_t a0 = Holder("a", 0);
  const uint32_t a1 = Holder("a", 1);
  ASSERT_TRUE(Take(a0, 10));
  budget_.Release(a0);
  ASSERT_TRUE(Take(a0, 5));
  ASSERT_TRUE(Take(a1, 7, IoDirection::kWrite));
  ASSERT_TRUE(budget_.TryTake(other, a1, 1, IoDirection::kRead).granted);
  auto jobs = budget_.job_bytes();
  ASSERT_EQ(jobs.size(), 2u);
  EXPECT_EQ(jobs[0].job, "a");
  EXPECT_EQ(jobs[0].device, device_);
  EXPECT_EQ(jobs[0].bytes[0], 15u);
  EXPECT_EQ(jobs[0].bytes[1], 7u);
  EXPECT_EQ(jobs[1].device, other);
  budget_.RemoveHolder(a0);
  budget_.RemoveHolder(a1);
  EXPECT_TRUE(budget_.job_bytes().empty());
  EXPECT_EQ(budget_.usage(device_).bytes[0], 15u);
  EXPECT_EQ(Holder("b"), a0);
  EXPECT_TRUE(budget_.job_bytes().empty());
}

TEST_F(IoBudgetTest, RefusesWhatItHasNoRoomFor) {
  EXPECT_EQ(budget_.AddDevice("", {}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(budget_.AddDevice(std::string(5000, 'x'), {}).ok());
  EXPECT_FALSE(budget_.AddDevice("/a", {.depth = IoBudget::kMaxDepth + 1}).ok());
  for (uint32_t d = 0; d < IoBudget::kMaxDevices; ++d) {
    EXPECT_EQ(*budget_.AddDevice("/mnt/" + std::to_string(d), {}), d);
  }
  EXPECT_EQ(budget_.AddDevice("/a", {}).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(*budget_.AddDevice("/mnt/3", {}), 3u);
  EXPECT_EQ(budget_.FindDevice("/mnt/31"), 31u);
  EXPECT_EQ(budget_.FindDevice("/mnt"), std::nullopt);
  EXPECT_EQ(budget_.path(31), "/mnt/31");
  for (uint32_t h = 0; h < IoBudget::kMaxHolders; ++h) EXPECT_EQ(Holder("a", h), h);
  EXPECT_EQ(budget_.AddHolder("b", 0).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(budget_.AddHolder("", 0).ok());
  EXPECT_FALSE(budget_.AddHolder(std::string(300, 'j'), 0).ok());
}

TEST(IoBudgetPageTest, RefusesForeignMemory) {
  ManualClock clock;
  alignas(64) std::byte few[128] = {};
  EXPECT_FALSE(IoBudget::Format(few, &clock).ok());
  EXPECT_EQ(IoBudget::Adopt(few, &clock).status().code(), absl::StatusCode::kDataLoss);
  SharedIoBudget shared(&clock);
  shared.memory()[0] = std::byte{1};
  EXPECT_EQ(IoBudget::Adopt(shared.memory(), &clock).status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace zeroshard
