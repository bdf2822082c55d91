#include "worker/reduction_tree.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/strings.h"

namespace zeroshard {

ReductionProgram ReductionPlan::Program(absl::Span<const bool> present) const {
  ReductionProgram program;
  program.inputs = inputs_;
  // What each subtree evaluated so far left behind: a value on the stack, one input not pushed yet,
  // or nothing.
  enum class Left { kNothing, kInput, kOnStack };
  struct Value {
    Left left;
    uint32_t input;
  };
  std::vector<Value> values;
  uint32_t depth = 0;
  auto push = [&](uint32_t input) {
    program.steps.push_back({ReductionStep::Kind::kPush, input});
    program.stack_depth = std::max(program.stack_depth, ++depth);
  };
  for (size_t i = 0; i < post_order_.size(); ++i) {
    const uint32_t item = post_order_[i];
    if (item != kCombine) {
      const bool is_present = present[item];
      // A left operand is pushed at once, before its sibling's steps; a right one is added straight
      // from memory.
      const bool is_right = i + 1 < post_order_.size() && post_order_[i + 1] == kCombine;
      const bool push_now = is_present && !(is_right && values.back().left != Left::kNothing);
      if (push_now) push(item);
      values.push_back({push_now     ? Left::kOnStack
                        : is_present ? Left::kInput
                                     : Left::kNothing,
                        item});
      continue;
    }
    const Value right = values.back();
    values.pop_back();
    Value& left = values.back();
    if (left.left == Left::kNothing) {
      left = right;
    } else if (right.left == Left::kInput) {
      program.steps.push_back({ReductionStep::Kind::kAddInput, right.input});
    } else if (right.left == Left::kOnStack) {
      program.steps.push_back({ReductionStep::Kind::kAddTop, 0});
      --depth;
    }
  }
  return program;
}

ReductionProgram ReductionPlan::Program() const {
  const auto all = std::make_unique<bool[]>(inputs_);
  std::fill_n(all.get(), inputs_, true);
  return Program(absl::MakeConstSpan(all.get(), inputs_));
}

absl::StatusOr<ReductionTree> ReductionTree::Create(uint32_t ranks, uint32_t group) {
  if (ranks == 0 || group == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a reduction tree needs ranks and group of at least 1, found ranks ", ranks,
                     ", group ", group));
  }
  return ReductionTree(ranks, group);
}

ReductionTree::ReductionTree(uint32_t ranks, uint32_t group) : ranks_(ranks), group_(group) {
  nodes_.reserve(2 * size_t{ranks});
  for (uint32_t rank = 0; rank < ranks; ++rank) nodes_.push_back({.span = {rank, rank + 1}});
  std::vector<int32_t> groups;
  for (uint64_t begin = 0; begin < ranks; begin += group) {
    std::vector<int32_t> level;
    for (uint64_t rank = begin; rank < std::min<uint64_t>(begin + group, ranks); ++rank) {
      level.push_back(static_cast<int32_t>(rank));
    }
    while (level.size() > 1) level = PairUp(std::move(level));
    groups.push_back(level[0]);
  }
  while (groups.size() > 1) groups = PairUp(std::move(groups));
}

// One level: adjacent pairs become new nodes, an odd last one passes up.
std::vector<int32_t> ReductionTree::PairUp(std::vector<int32_t> level) {
  std::vector<int32_t> next;
  for (size_t i = 0; i + 1 < level.size(); i += 2) {
    const int32_t left = level[i];
    const int32_t right = level[i + 1];
    nodes_.push_back(
        {.span = {nodes_[left].span.begin, nodes_[right].span.end}, .left = left, .right = right});
    next.push_back(static_cast<int32_t>(nodes_.size() - 1));
  }
  if (level.size() % 2 != 0) next.push_back(level.back());
  return next;
}

int32_t ReductionTree::Find(TreeNode span) const {
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].span == span) return static_cast<int32_t>(i);
  }
  return -1;
}

absl::StatusOr<std::vector<TreeNode>> ReductionTree::Cover(absl::Span<const uint32_t> ranks) const {
  std::vector<char> complete(nodes_.size(), 0);
  for (uint32_t rank : ranks) {
    if (rank >= ranks_) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", rank, " is outside the world of ", ranks_, " ranks"));
    }
    complete[rank] = 1;
  }
  std::vector<char> inside_larger(nodes_.size(), 0);
  for (size_t i = ranks_; i < nodes_.size(); ++i) {
    complete[i] = complete[nodes_[i].left] != 0 && complete[nodes_[i].right] != 0;
    inside_larger[nodes_[i].left] = complete[i];
    inside_larger[nodes_[i].right] = complete[i];
  }
  std::vector<TreeNode> cover;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (complete[i] != 0 && inside_larger[i] == 0) cover.push_back(nodes_[i].span);
  }
  std::sort(cover.begin(), cover.end(), [](TreeNode a, TreeNode b) { return a.begin < b.begin; });
  return cover;
}

absl::StatusOr<ReductionPlan> ReductionTree::Plan(TreeNode target,
                                                  absl::Span<const TreeNode> inputs) const {
  auto refuse = [&](std::string_view why, TreeNode node) {
    return absl::InvalidArgumentError(absl::StrCat(
        "no plan for ranks [", target.begin, ", ", target.end, ") of a tree of ", ranks_,
        " ranks in groups of ", group_, ": ", Abs(why), " [", node.begin, ", ", node.end, ")"));
  };
  const int32_t root = Find(target);
  if (root < 0) return refuse("not a node of the tree:", target);
  constexpr uint32_t kNone = UINT32_MAX;
  std::vector<uint32_t> input_of(nodes_.size(), kNone);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const int32_t node = Find(inputs[i]);
    if (node < 0) return refuse("an input is not a node:", inputs[i]);
    if (input_of[node] != kNone) return refuse("an input is given twice:", inputs[i]);
    input_of[node] = static_cast<uint32_t>(i);
  }
  ReductionPlan plan;
  plan.inputs_ = static_cast<uint32_t>(inputs.size());
  struct Visit {
    int32_t node;
    bool children_done;
  };
  std::vector<Visit> stack = {{root, false}};
  size_t used = 0;
  while (!stack.empty()) {
    const Visit visit = stack.back();
    stack.pop_back();
    if (visit.children_done) {
      plan.post_order_.push_back(ReductionPlan::kCombine);
    } else if (input_of[visit.node] != kNone) {
      plan.post_order_.push_back(input_of[visit.node]);
      ++used;
    } else if (nodes_[visit.node].left < 0) {
      return refuse("no input holds ranks", nodes_[visit.node].span);
    } else {
      stack.push_back({visit.node, true});
      stack.push_back({nodes_[visit.node].right, false});
      stack.push_back({nodes_[visit.node].left, false});
    }
  }
  if (used != inputs.size()) return refuse("inputs overlap or lie outside", target);
  return plan;
}

ReductionPlan ReductionTree::RankPlan() const {
  std::vector<TreeNode> leaves;
  for (uint32_t rank = 0; rank < ranks_; ++rank) leaves.push_back({rank, rank + 1});
  return *Plan(root(), leaves);
}

}  // namespace zeroshard
