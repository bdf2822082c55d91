#include "worker/reduction_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

using ::testing::ElementsAre;

// Runs a program on texts: the sum as the expression that it is.
std::string Expression(const ReductionProgram& program, const std::vector<std::string>& inputs) {
  std::vector<std::string> stack;
  uint32_t deepest = 0;
  for (const ReductionStep& step : program.steps) {
    if (step.kind == ReductionStep::Kind::kPush) {
      stack.push_back(inputs[step.input]);
    } else if (step.kind == ReductionStep::Kind::kAddInput) {
      stack.back() = absl::StrCat("(", stack.back(), "+", inputs[step.input], ")");
    } else {
      const std::string right = stack.back();
      stack.pop_back();
      stack.back() = absl::StrCat("(", stack.back(), "+", right, ")");
    }
    deepest = std::max(deepest, static_cast<uint32_t>(stack.size()));
  }
  EXPECT_EQ(deepest, program.stack_depth);
  EXPECT_LE(stack.size(), 1u);
  return stack.empty() ? "" : stack[0];
}

std::vector<std::string> RankNames(uint32_t ranks) {
  std::vector<std::string> names;
  for (uint32_t rank = 0; rank < ranks; ++rank) names.push_back(absl::StrCat(rank));
  return names;
}

// The definition, word by word: one level after the other, absent ones passing through.
std::string Pairwise(std::vector<std::string> level) {
  while (level.size() > 1) {
    std::vector<std::string> next;
    for (size_t i = 0; i + 1 < level.size(); i += 2) {
      if (level[i].empty() || level[i + 1].empty()) {
        next.push_back(level[i] + level[i + 1]);
      } else {
        next.push_back(absl::StrCat("(", level[i], "+", level[i + 1], ")"));
      }
    }
    if (level.size() % 2 != 0) next.push_back(level.back());
    level = next;
  }
  return level[0];
}

std::string Definition(const std::vector<std::string>& inputs, uint32_t group) {
  std::vector<std::string> groups;
  for (size_t begin = 0; begin < inputs.size(); begin += group) {
    const size_t end = std::min(begin + group, inputs.size());
    groups.push_back(Pairwise({inputs.begin() + begin, inputs.begin() + end}));
  }
  return Pairwise(groups);
}

std::string Canonical(uint32_t ranks, uint32_t group) {
  return Expression(ReductionTree::Create(ranks, group)->RankPlan().Program(), RankNames(ranks));
}

TEST(ReductionTreeTest, OrderIsFixedByRanksAndGroup) {
  EXPECT_EQ(Canonical(1, 1), "0");
  EXPECT_EQ(Canonical(5, 3), "(((0+1)+2)+(3+4))");
  EXPECT_EQ(Canonical(6, 6), "(((0+1)+(2+3))+(4+5))");
  EXPECT_EQ(Canonical(6, 2), "(((0+1)+(2+3))+(4+5))");
  EXPECT_EQ(Canonical(6, 3), "(((0+1)+2)+((3+4)+5))");
  EXPECT_EQ(Canonical(7, 4), "(((0+1)+(2+3))+((4+5)+6))");
}

TEST(ReductionTreeTest, RefusesAnEmptyWorldOrGroup) {
  EXPECT_EQ(ReductionTree::Create(0, 1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReductionTree::Create(4, 0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ReductionTreeTest, AbsentInputsPassThrough) {
  const ReductionPlan plan = ReductionTree::Create(5, 2)->RankPlan();
  const auto names = RankNames(5);
  EXPECT_EQ(Expression(plan.Program({false, true, true, false, true}), names), "((1+2)+4)");
  EXPECT_EQ(Expression(plan.Program({false, false, false, false, true}), names), "4");
  EXPECT_TRUE(plan.Program({false, false, false, false, false}).steps.empty());
}

TEST(ReductionTreeTest, EveryTreeAndAbsenceIsTheDefinition) {
  std::mt19937_64 random(1);
  for (uint32_t ranks = 1; ranks <= 19; ++ranks) {
    for (uint32_t group = 1; group <= ranks; ++group) {
      const ReductionPlan plan = ReductionTree::Create(ranks, group)->RankPlan();
      for (int round = 0; round < 20; ++round) {
        auto present = std::make_unique<bool[]>(ranks);
        std::vector<std::string> names = RankNames(ranks);
        std::vector<std::string> left = names;
        for (uint32_t rank = 0; rank < ranks; ++rank) {
          present[rank] = round == 0 || random() % 3 != 0;
          if (!present[rank]) left[rank].clear();
        }
        ASSERT_EQ(Expression(plan.Program(absl::MakeConstSpan(present.get(), ranks)), names),
                  Definition(left, group))
            << ranks << " ranks, group " << group;
      }
    }
  }
}

TEST(ReductionTreeTest, CoverIsTheFewestCompleteSubtrees) {
  const ReductionTree tree = *ReductionTree::Create(8, 4);
  EXPECT_THAT(*tree.Cover({0, 1, 2, 3}), ElementsAre(TreeNode{0, 4}));
  EXPECT_THAT(*tree.Cover({7, 1, 0, 2, 1}),
              ElementsAre(TreeNode{0, 2}, TreeNode{2, 3}, TreeNode{7, 8}));
  EXPECT_THAT(*tree.Cover({1, 2}), ElementsAre(TreeNode{1, 2}, TreeNode{2, 3}));
  EXPECT_THAT(*tree.Cover({0, 1, 2, 3, 4, 5, 6, 7}), ElementsAre(TreeNode{0, 8}));
  EXPECT_THAT(*tree.Cover({}), ElementsAre());
  EXPECT_EQ(tree.Cover({8}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(ReductionTreeTest, PartialSumsOfAnyPlacementGiveTheWholeTree) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 500; ++round) {
    const uint32_t ranks = 1 + random() % 13;
    const uint32_t group = 1 + random() % ranks;
    const uint32_t hosts = 1 + random() % 4;
    const ReductionTree tree = *ReductionTree::Create(ranks, group);
    std::vector<std::vector<uint32_t>> ranks_of(hosts);
    for (uint32_t rank = 0; rank < ranks; ++rank) ranks_of[random() % hosts].push_back(rank);
    std::vector<TreeNode> nodes;
    std::vector<std::string> sums;
    for (const auto& of_host : ranks_of) {
      const std::vector<TreeNode> cover = *tree.Cover(of_host);
      for (const TreeNode node : cover) {
        std::vector<TreeNode> leaves;
        std::vector<std::string> names;
        for (uint32_t rank = node.begin; rank < node.end; ++rank) {
          leaves.push_back({rank, rank + 1});
          names.push_back(absl::StrCat(rank));
        }
        nodes.push_back(node);
        sums.push_back(Expression(tree.Plan(node, leaves)->Program(), names));
      }
    }
    const auto plan = tree.Plan(tree.root(), nodes);
    ASSERT_TRUE(plan.ok()) << plan.status();
    ASSERT_EQ(Expression(plan->Program(), sums), Canonical(ranks, group));
  }
}

TEST(ReductionTreeTest, PlanRefusesWhatDoesNotMakeUpTheTarget) {
  const ReductionTree tree = *ReductionTree::Create(4, 4);
  const TreeNode root = tree.root();
  EXPECT_FALSE(tree.Plan(root, {{0, 2}}).ok());                  // ranks 2, 3 missing
  EXPECT_FALSE(tree.Plan(root, {{0, 2}, {1, 2}, {2, 4}}).ok());  // rank 1 twice
  EXPECT_FALSE(tree.Plan(root, {{0, 1}, {1, 3}, {3, 4}}).ok());  // [1, 3) is no node
  EXPECT_FALSE(tree.Plan(root, {{0, 2}, {0, 2}, {2, 4}}).ok());
  EXPECT_FALSE(tree.Plan({0, 2}, {{0, 2}, {2, 4}}).ok());
  EXPECT_FALSE(tree.Plan({1, 3}, {{1, 2}, {2, 3}}).ok());
  EXPECT_TRUE(tree.Plan({0, 2}, {{1, 2}, {0, 1}}).ok());
}

}  // namespace
}  // namespace zeroshard
