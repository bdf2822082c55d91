// The canonical order in which the gradients of the ranks are summed.
//
// fp32 addition is not associative, so one order is fixed for the life of a job, from the number of
// ranks R and the group size g (stored when the job is created) alone:
//   - ranks 0..R-1 are cut into consecutive groups of g (the last may be shorter);
//   - inside a group: adjacent pairs are added, left + right, level by level;
//     an odd last one passes up unchanged;
//   - the groups' sums are added by the same rule.
// Example, R = 5, g = 3: ((r0 + r1) + r2) + (r3 + r4).
// An absent input passes through: its sibling's value moves up unchanged. It is never added as 0,
// for x + 0 is not x when x is -0.
//
// A node of the tree is named by its interval of ranks [begin, end). A process that holds some of
// the ranks sums the nodes of Cover(those ranks) by itself; whoever combines such partial sums
// makes a plan over them and gets the bits of the whole tree. All types are immutable values; any
// thread.
#ifndef ZEROSHARD_WORKER_REDUCTION_TREE_H_
#define ZEROSHARD_WORKER_REDUCTION_TREE_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace zeroshard {

// The ranks [begin, end) under one node of the tree.
struct TreeNode {
  uint32_t begin = 0;
  uint32_t end = 0;
  friend bool operator==(const TreeNode&, const TreeNode&) = default;
};

// One step of a stack machine over blocks of numbers. kPush puts input `input` on the stack;
// kAddInput adds input `input` to the top; kAddTop pops the top and adds it to the one below. Left
// operands are always the lower ones.
struct ReductionStep {
  enum class Kind : uint32_t { kPush, kAddInput, kAddTop };
  Kind kind = Kind::kPush;
  uint32_t input = 0;
  friend bool operator==(const ReductionStep&, const ReductionStep&) = default;
};

// The steps that leave the sum of the present inputs on the stack. Empty when no input is present.
struct ReductionProgram {
  std::vector<ReductionStep> steps;
  uint32_t stack_depth = 0;  // most blocks on the stack at one time
  uint32_t inputs = 0;       // number of inputs that the steps index, absent ones included
};

// How to combine given inputs (ranks or partial sums) into one node. Keep one per communication
// pattern and ask it for a program per set of present inputs.
class ReductionPlan {
 public:
  uint32_t inputs() const { return inputs_; }

  // `present[i]`: whether input i takes part; size must equal inputs().
  ReductionProgram Program(absl::Span<const bool> present) const;

  // All inputs present.
  ReductionProgram Program() const;

 private:
  friend class ReductionTree;
  // Post-order over the inputs: an index, or kCombine for "add the two last results".
  static constexpr uint32_t kCombine = UINT32_MAX;
  std::vector<uint32_t> post_order_;
  uint32_t inputs_ = 0;
};

class ReductionTree {
 public:
  // InvalidArgument when ranks or group is 0.
  static absl::StatusOr<ReductionTree> Create(uint32_t ranks, uint32_t group);

  uint32_t ranks() const { return ranks_; }
  uint32_t group() const { return group_; }
  TreeNode root() const { return {0, ranks_}; }

  // The fewest nodes whose ranks are exactly `ranks` (any order, duplicates ignored), in increasing
  // order. InvalidArgument for a rank outside the tree.
  absl::StatusOr<std::vector<TreeNode>> Cover(absl::Span<const uint32_t> ranks) const;

  // A plan that computes `target` from `inputs`, which are nodes of the tree, disjoint, and
  // together make up exactly `target`; InvalidArgument otherwise. Input i of the plan is inputs[i];
  // their order does not change the result.
  absl::StatusOr<ReductionPlan> Plan(TreeNode target, absl::Span<const TreeNode> inputs) const;

  // The plan for root() from the single ranks 0..R-1.
  ReductionPlan RankPlan() const;

 private:
  struct Node {
    TreeNode span;
    int32_t left = -1;  // indices into nodes_; -1 for a rank
    int32_t right = -1;
  };

  ReductionTree(uint32_t ranks, uint32_t group);
  std::vector<int32_t> PairUp(std::vector<int32_t> level);
  int32_t Find(TreeNode span) const;

  uint32_t ranks_;
  uint32_t group_;
  std::vector<Node> nodes_;  // the R ranks first, the root last; children before parents
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_REDUCTION_TREE_H_
