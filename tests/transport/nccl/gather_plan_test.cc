#include "transport/nccl/gather_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace zeroshard {
namespace {

using Map = std::vector<uint32_t>;

std::vector<GatherPlan> PlansOf(const Map& node_of_rank) {
  std::vector<GatherPlan> plans;
  for (uint32_t rank = 0; rank < node_of_rank.size(); ++rank) {
    plans.push_back(*MakeGatherPlan(node_of_rank, rank));
  }
  return plans;
}

// Runs the plans of all ranks: who has which piece after step 1, and what crossed.
void CheckPlans(const Map& node_of_rank) {
  const std::vector<GatherPlan> plans = PlansOf(node_of_rank);
  const auto ranks = static_cast<uint32_t>(node_of_rank.size());
  std::map<uint32_t, std::vector<uint32_t>> nodes;
  for (uint32_t rank = 0; rank < ranks; ++rank) nodes[node_of_rank[rank]].push_back(rank);

  std::set<std::pair<uint32_t, uint32_t>> sent;            // from, to
  std::set<std::pair<uint32_t, uint32_t>> received;        // from, to
  std::map<std::pair<uint32_t, uint32_t>, int> crossings;  // piece, node
  std::vector<std::set<uint32_t>> has(ranks);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    has[rank].insert(rank);
    for (const uint32_t to : plans[rank].send_to) {
      EXPECT_NE(node_of_rank[to], node_of_rank[rank]);
      EXPECT_TRUE(sent.insert({rank, to}).second);
      ++crossings[{rank, node_of_rank[to]}];
    }
    for (const uint32_t from : plans[rank].receive_from) {
      EXPECT_TRUE(received.insert({from, rank}).second);
      has[rank].insert(from);
    }
  }
  EXPECT_EQ(sent, received);
  for (const auto& [where, count] : crossings) EXPECT_EQ(count, 1) << "piece " << where.first;
  EXPECT_EQ(crossings.size(), ranks * (nodes.size() - 1));

  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const std::vector<uint32_t>& members = nodes[node_of_rank[rank]];
    ASSERT_EQ(plans[rank].root_of_piece.size(), ranks);
    for (uint32_t piece = 0; piece < ranks; ++piece) {
      const uint32_t root = plans[rank].root_of_piece[piece];
      ASSERT_LT(root, members.size());
      EXPECT_EQ(has[members[root]].count(piece), 1u) << "rank " << rank << " piece " << piece;
      // All ranks of a node name the same root.
      EXPECT_EQ(plans[members[0]].root_of_piece[piece], root);
    }
  }
}

TEST(GatherPlan, EveryPieceReachesEveryRankAndCrossesOnce) {
  for (const Map& map : std::vector<Map>{{0},
                                         {0, 0, 0, 0},
                                         {0, 1},
                                         {0, 0, 1, 1},
                                         {0, 1, 0, 1},
                                         {5, 5, 5, 2},
                                         {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1},
                                         {2, 0, 1, 1, 0, 1, 9}}) {
    SCOPED_TRACE(testing::PrintToString(map));
    CheckPlans(map);
  }
}

TEST(GatherPlan, RandomNodes) {
  std::mt19937 random(7);
  for (int round = 0; round < 200; ++round) {
    Map map(1 + random() % 24);
    const uint32_t nodes = 1 + random() % 5;
    for (uint32_t& node : map) node = random() % nodes;
    SCOPED_TRACE(testing::PrintToString(map));
    CheckPlans(map);
  }
}

TEST(GatherPlan, RanksOfASmallNodeShareThePiecesOfALargeOne) {
  const Map map = {0, 0, 0, 0, 0, 0, 1, 1};
  EXPECT_EQ(MakeGatherPlan(map, 6)->receive_from, (Map{0, 2, 4}));
  EXPECT_EQ(MakeGatherPlan(map, 7)->receive_from, (Map{1, 3, 5}));
  EXPECT_EQ(MakeGatherPlan(map, 0)->receive_from, (Map{6}));
  EXPECT_EQ(MakeGatherPlan(map, 5)->receive_from, (Map{}));
}

TEST(GatherPlan, LevelsNeedNodesWithSeveralRanks) {
  EXPECT_FALSE(GatherHasLevels(Map{0, 0, 0}));
  EXPECT_FALSE(GatherHasLevels(Map{0, 1, 2}));
  EXPECT_TRUE(GatherHasLevels(Map{0, 1, 1}));
}

TEST(GatherPlan, UnknownRank) {
  EXPECT_EQ(MakeGatherPlan(Map{0, 0}, 2).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace zeroshard
