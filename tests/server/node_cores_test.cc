#include "server/node_cores.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

namespace zeroshard {
namespace {

TEST(NodeCoresTest, AWorkersNumberComesBackWithWhatItHeld) {
  const auto cores = NodeCores::Create();
  ASSERT_TRUE(cores.ok()) << cores.status();
  const CoreBudget& budget = (*cores)->budget();
  const int all = static_cast<int>(budget.usage(0).cores);
  uint32_t number = 0;
  {
    absl::StatusOr<CoreHolder> holder = (*cores)->Add("cpu:0");
    ASSERT_TRUE(holder.ok()) << holder.status();
    number = holder->number();
    const internal::v1::WorkerRegion region = (*cores)->Describe(*holder);
    EXPECT_EQ(region.kind(), internal::v1::WorkerRegion::KIND_CORE_BUDGET);
    EXPECT_EQ(region.index(), number);
    EXPECT_EQ(region.bytes(), CoreBudget::Bytes());
    EXPECT_EQ(budget.Acquire(number, 1000), all);  // and dies with it
    CoreHolder moved = *std::move(holder);
    EXPECT_FALSE(holder->valid());
    EXPECT_EQ(moved.number(), number);
    EXPECT_EQ(budget.usage(0).in_use, static_cast<uint32_t>(all));
  }
  EXPECT_EQ(budget.usage(0).in_use, 0u);
  EXPECT_EQ((*cores)->Add("cpu:0")->number(), number);
}

TEST(NodeCoresTest, LanesAreTheCoresOverTheDevicesOfANode) {
  const auto cores = NodeCores::Create();
  ASSERT_TRUE(cores.ok()) << cores.status();
  const uint32_t of_node = (*cores)->budget().usage(0).cores;
  EXPECT_EQ((*cores)->LanesFor({"cpu:0"}), of_node);
  if ((*cores)->budget().nodes() > 1) GTEST_SKIP() << "devices lie on several nodes";
  EXPECT_EQ((*cores)->LanesFor({"cpu:0", "cpu:1"}), std::max(1u, of_node / 2));
  std::vector<std::string> many;
  for (uint32_t i = 0; i < of_node + 1; ++i) many.push_back("cpu:" + std::to_string(i));
  EXPECT_EQ((*cores)->LanesFor(many), 1u);
}

}  // namespace
}  // namespace zeroshard
