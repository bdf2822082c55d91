#include "server/node_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <string>

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uint64_t kGiB = uint64_t{1} << 30;

// A root directory with the files that describe a machine.
class FakeRoot {
 public:
  explicit FakeRoot(const std::string& name) : root_(testing::TempDir() + "/" + name + "/") {
    for (const char* dir :
         {"", "proc", "proc/self", "sys", "sys/fs", "sys/fs/cgroup", "sys/fs/cgroup/job"}) {
      mkdir((root_ + dir).c_str(), 0755);
    }
    Write("proc/meminfo", "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n");
    Write("proc/self/cgroup", "0::/job\n");
  }
  void Write(const std::string& path, const std::string& text) {
    std::ofstream(root_ + path) << text;
  }
  const std::string& path() const { return root_; }

 private:
  const std::string root_;
};

JobPlan PlanOf(uint64_t bytes) {
  JobPlan plan;
  RegionPlan region;
  region.memory = bytes;
  plan.regions.push_back(region);
  model::v1::LedgerLine line;
  line.set_state("master");
  line.set_bytes(bytes);
  plan.ledger.push_back(line);
  return plan;
}

TEST(NodeMemory, ReadsWhatTheMachineHas) {
  FakeRoot root("plain");
  const auto memory = ReadNodeMemory(root.path());
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->total, 16 * kGiB);
  EXPECT_EQ(memory->available, 8 * kGiB);
  EXPECT_EQ(memory->source, "MemAvailable");
}

TEST(NodeMemory, AControlGroupsLimitCountsWhenItIsTheLower) {
  FakeRoot root("grouped");
  root.Write("sys/fs/cgroup/job/memory.max", "4294967296\n");
  root.Write("sys/fs/cgroup/job/memory.current", "1073741824\n");
  const auto memory = ReadNodeMemory(root.path());
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->available, 3 * kGiB);
  EXPECT_THAT(memory->source, HasSubstr("memory.max"));
  root.Write("sys/fs/cgroup/job/memory.max", "max\n");
  EXPECT_EQ(ReadNodeMemory(root.path())->available, 8 * kGiB);
}

TEST(NodeMemory, WhatDoesNotFitIsRefusedWithTheSum) {
  const NodeMemory node{16 * kGiB, 8 * kGiB, "MemAvailable"};
  EXPECT_TRUE(CheckMemory("gpt", PlanOf(7 * kGiB), node, 0, {}).ok());
  const absl::Status refused = CheckMemory("gpt", PlanOf(9 * kGiB), node, 0, {});
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("needs 9.00 GiB"), HasSubstr("8.00 GiB left"),
                    HasSubstr("the sum is master 9.00 GiB")));
}

TEST(NodeMemory, PromisesToOtherJobsCount) {
  const NodeMemory node{16 * kGiB, 8 * kGiB, "MemAvailable"};
  EXPECT_FALSE(CheckMemory("gpt", PlanOf(7 * kGiB), node, 0, {2 * kGiB, 2 * kGiB}).ok());
  EXPECT_TRUE(CheckMemory("gpt", PlanOf(7 * kGiB), node, 0, {2 * kGiB, kGiB / 2}).ok());
}

TEST(NodeMemory, TheConfiguredLimitHoldsForAllJobsTogether) {
  const NodeMemory node{16 * kGiB, 16 * kGiB, "MemAvailable"};
  EXPECT_TRUE(CheckMemory("gpt", PlanOf(2 * kGiB), node, 4 * kGiB, {2 * kGiB, 0}).ok());
  const absl::Status refused = CheckMemory("gpt", PlanOf(3 * kGiB), node, 4 * kGiB, {2 * kGiB, 0});
  EXPECT_THAT(std::string(refused.message()), HasSubstr("host_memory_limit is 4.00 GiB"));
}

TEST(NodeMemory, AJobMayGrowByWhatIsLeft) {
  const NodeMemory node{16 * kGiB, 4 * kGiB, "MemAvailable"};
  const JobPlan now = PlanOf(2 * kGiB);
  const auto grow = [&](const JobPlan& next, uint64_t touched, uint64_t limit) {
    return CheckGrowth("gpt", {&now, &next, touched}, node, limit, {kGiB, kGiB});
  };
  EXPECT_TRUE(grow(PlanOf(5 * kGiB), 2 * kGiB, 0).ok());
  EXPECT_TRUE(grow(PlanOf(kGiB), 2 * kGiB, 0).ok());
  const absl::Status refused = grow(PlanOf(5 * kGiB), kGiB, 0);
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("would need 5.00 GiB"), HasSubstr("4.00 GiB more than it uses"),
                    HasSubstr("3.00 GiB left")));
  EXPECT_THAT(std::string(grow(PlanOf(5 * kGiB), 2 * kGiB, 5 * kGiB).message()),
              HasSubstr("host_memory_limit is 5.00 GiB"));
  JobPlan bounded = PlanOf(3 * kGiB);
  bounded.host_limit = 2 * kGiB;
  EXPECT_THAT(std::string(grow(bounded, 2 * kGiB, 0).message()),
              HasSubstr("its host_limit is 2.00 GiB"));
}

TEST(NodeMemory, BytesForPeople) {
  EXPECT_EQ(HumanBytes(1023), "1023 B");
  EXPECT_EQ(HumanBytes(1536), "1.50 KiB");
  EXPECT_EQ(HumanBytes(3 * kGiB), "3.00 GiB");
}

}  // namespace
}  // namespace zeroshard
