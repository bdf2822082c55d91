#include "server/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ClusterConfig Cluster(uint32_t node) { return {node, {"10.0.0.1:7401", "10.0.0.2:7401"}, true}; }

std::string Refused(const absl::StatusOr<Placement>& placement) {
  return placement.ok() ? "" : std::string(placement.status().message());
}

TEST(Placement, AJobOfOneDaemonIsWhollyHere) {
  for (const ClusterConfig& cluster : {ClusterConfig(), Cluster(1)}) {
    for (const uint32_t local_ranks : {0u, 3u}) {
      const auto placement = PlaceJob(cluster, 3, local_ranks, 2, 2);
      ASSERT_TRUE(placement.ok()) << placement.status();
      EXPECT_FALSE(placement->spans());
      EXPECT_EQ(placement->first_rank(), 0u);
      EXPECT_TRUE(placement->has_rank(2));
      EXPECT_FALSE(placement->has_worker(2));
      EXPECT_EQ(placement->home_worker(2), 0u);
    }
  }
}

TEST(Placement, EachNodeHasTheNextRanksAndWorkers) {
  const auto placement = PlaceJob(Cluster(1), 6, 3, 2, 4);
  ASSERT_TRUE(placement.ok()) << placement.status();
  EXPECT_TRUE(placement->spans());
  EXPECT_EQ(placement->nodes, 2u);
  EXPECT_EQ(placement->first_rank(), 3u);
  EXPECT_EQ(placement->first_worker(), 2u);
  EXPECT_FALSE(placement->has_rank(2));
  EXPECT_TRUE(placement->has_rank(5));
  EXPECT_EQ(placement->home_worker(1), 1u);
  EXPECT_EQ(placement->home_worker(3), 3u);
  EXPECT_EQ(placement->home_worker(4), 2u);
}

TEST(Placement, SaysWhatIsConfiguredWhenDaemonsAreMissing) {
  EXPECT_THAT(Refused(PlaceJob({}, 4, 2, 1, 0)),
              AllOf(HasSubstr("local_ranks 2"), HasSubstr("2 daemons"), HasSubstr("`cluster`")));
  EXPECT_THAT(Refused(PlaceJob(Cluster(0), 6, 2, 1, 0)),
              AllOf(HasSubstr("3 daemons"), HasSubstr("cluster of 2")));
}

TEST(Placement, RanksMustDivideEvenly) {
  EXPECT_THAT(Refused(PlaceJob(Cluster(0), 5, 2, 1, 0)), HasSubstr("divisor of world_size 5"));
  EXPECT_THAT(Refused(PlaceJob(Cluster(0), 2, 4, 1, 0)), HasSubstr("found 4"));
}

TEST(Placement, ARankAtTheWrongDaemonIsToldTheRightOne) {
  EXPECT_THAT(Refused(PlaceJob(Cluster(0), 4, 2, 1, 3)),
              AllOf(HasSubstr("rank 3 belongs to node 1 (10.0.0.2:7401)"),
                    HasSubstr("this is node 0 (10.0.0.1:7401) with ranks 0 to 1")));
  ClusterConfig third = Cluster(2);
  third.addresses.push_back("10.0.0.3:7401");
  EXPECT_THAT(Refused(PlaceJob(third, 4, 2, 1, 3)),
              AllOf(HasSubstr("nodes 0 to 1"), HasSubstr("rank 3 belongs to node 1")));
}

}  // namespace
}  // namespace zeroshard
