#include "worker/budget_gate.h"

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/clock.h"
#include "base/clock.h"
#include "gtest/gtest.h"
#include "storage/aligned_buffer.h"
#include "tests/worker/tier_fixture.h"

namespace zeroshard {
namespace {

class BudgetGateTest : public ::testing::Test {
 protected:
  // A job on two paths whose first has the limits.
  void Start(const IoLimits& limits) {
    auto budget = IoBudget::Format(page_.bytes(), &clock_);
    ASSERT_TRUE(budget.ok()) << budget.status();
    budget_.emplace(*std::move(budget));
    std::vector<uint32_t> devices;
    for (const NvmeTierPath& path : job_.options().paths) {
      auto device = budget_->AddDevice(path.path, devices.empty() ? limits : IoLimits{});
      ASSERT_TRUE(device.ok()) << device.status();
      devices.push_back(*device);
    }
    const auto holder = budget_->AddHolder("test", 0);
    ASSERT_TRUE(holder.ok()) << holder.status();
    gate_.emplace(IoShare{*budget_, *holder}, devices);
    job_.options().gate = &*gate_;
    ASSERT_EQ(job_.Open(), absl::OkStatus());
    ASSERT_EQ(job_.Fill(), absl::OkStatus());
  }

  SystemClock clock_;
  AlignedBuffer page_ = *AlignedBuffer::Make(IoBudget::Bytes());
  std::optional<IoBudget> budget_;
  std::optional<BudgetGate> gate_;
  TierJob job_{{.elements = {20000, 3000}, .paths = 2, .parent = "/dev/shm"}};
};

TEST_F(BudgetGateTest, WhatATierMovesIsCountedAndGivenBack) {
  Start({.depth = 1});
  for (uint64_t attempt = 1; attempt < 4; ++attempt) {
    ASSERT_EQ(job_.StepAndCommit(attempt), absl::OkStatus());
  }
  ASSERT_EQ(job_.Check(), absl::OkStatus());
  const TierCounters counters = job_.tier().counters();
  for (uint32_t device = 0; device < 2; ++device) {
    const IoBudget::Usage usage = budget_->usage(device);
    EXPECT_EQ(usage.bytes[0], counters.paths[device].read_bytes);
    EXPECT_EQ(usage.bytes[1], counters.paths[device].written_bytes);
    EXPECT_EQ(usage.in_flight, 0u);
    EXPECT_EQ(usage.waiting, 0u);
  }
  EXPECT_GT(budget_->usage(0).wait_seconds, 0.0);
  job_.Close();
}

TEST_F(BudgetGateTest, APassIsAsSlowAsItsBudget) {
  constexpr uint64_t kRate = 2 << 20;
  Start({.bytes_per_second = kRate});
  const uint64_t before = budget_->usage(0).bytes[0] + budget_->usage(0).bytes[1];
  const absl::Time begin = absl::Now();
  for (uint64_t attempt = 1; attempt < 4; ++attempt) {
    ASSERT_EQ(job_.StepAndCommit(attempt), absl::OkStatus());
  }
  const double seconds = absl::ToDoubleSeconds(absl::Now() - begin);
  const uint64_t moved = budget_->usage(0).bytes[0] + budget_->usage(0).bytes[1] - before;
  const double burst = absl::ToDoubleSeconds(IoBudget::kBurst) + 0.02;
  EXPECT_GE(seconds + burst, static_cast<double>(moved) / kRate);
  ASSERT_EQ(job_.Check(), absl::OkStatus());
  job_.Close();
}

}  // namespace
}  // namespace zeroshard
