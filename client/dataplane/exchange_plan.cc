#include "client/dataplane/exchange_plan.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace zeroshard {
namespace {

constexpr uint64_t kPartBytes = sizeof(float);  // an element

// One machine's ranks, and what of them crosses the network.
struct Machine {
  std::vector<uint32_t> ranks;
  std::vector<TreeNode> parts;    // made there
  std::vector<uint32_t> singles;  // in no part
};

struct Machines {
  std::vector<Machine> all;
  std::vector<uint32_t> of_rank;
  std::vector<uint32_t> place;  // of a rank in its machine

  // Who makes the parts of `machine` for `owner`.
  uint32_t Maker(const Machine& machine, uint32_t owner) const {
    return machine.ranks[place[owner] % machine.ranks.size()];
  }
  bool AnyParts() const {
    return std::ranges::any_of(all, [](const Machine& machine) { return !machine.parts.empty(); });
  }
};

absl::StatusOr<Machines> MachinesOf(const ReductionTree& tree,
                                    std::span<const uint32_t> node_of_rank,
                                    uint64_t element_bytes) {
  Machines machines;
  std::map<uint32_t, uint32_t> numbers;
  for (uint32_t rank = 0; rank < node_of_rank.size(); ++rank) {
    const auto next = static_cast<uint32_t>(numbers.size());
    const uint32_t number = numbers.emplace(node_of_rank[rank], next).first->second;
    if (number == machines.all.size()) machines.all.emplace_back();
    machines.of_rank.push_back(number);
    machines.place.push_back(static_cast<uint32_t>(machines.all[number].ranks.size()));
    machines.all[number].ranks.push_back(rank);
  }
  for (Machine& machine : machines.all) {
    ZS_ASSIGN_OR_RETURN(const std::vector<TreeNode> cover, tree.Cover(machine.ranks));
    for (const TreeNode node : cover) {
      const bool pays = (node.end - node.begin) * element_bytes > kPartBytes;
      if (pays && machines.all.size() > 1) {
        machine.parts.push_back(node);
      } else {
        for (uint32_t rank = node.begin; rank < node.end; ++rank) machine.singles.push_back(rank);
      }
    }
  }
  return machines;
}

bool Contains(const std::vector<uint32_t>& ranks, uint32_t rank) {
  return std::ranges::find(ranks, rank) != ranks.end();
}

class Planner {
 public:
  Planner(const ReductionTree& tree, const Machines& machines, uint32_t rank)
      : tree_(tree), machines_(machines), rank_(rank), own_(machines.all[machines.of_rank[rank]]) {}

  absl::StatusOr<ExchangePlan> Make() {
    plan_.two_steps = machines_.AnyParts();
    plan_.sum.owner = rank_;
    plan_.sum.inputs.push_back({ExchangeInput::Kind::kOwn, {rank_, rank_ + 1}});
    for (const uint32_t mate : own_.ranks) {
      if (mate != rank_) MeetMate(mate);
    }
    ZS_RETURN_IF_ERROR(MakeParts());
    for (const Machine& machine : machines_.all) {
      if (&machine == &own_) continue;
      for (const uint32_t peer : machine.ranks) MeetOther(machine, peer);
    }
    ZS_RETURN_IF_ERROR(Program(plan_.sum, tree_.root()));
    return std::move(plan_);
  }

 private:
  bool IsOfOthers(uint32_t owner) const {
    return machines_.of_rank[owner] != machines_.of_rank[rank_];
  }

  // A piece of `peer` for the sum of the slice of `owner`.
  uint32_t Receive(ExchangePlan::Step& step, uint32_t peer, uint32_t owner) {
    step.pieces_in.push_back({peer, owner, plan_.piece_slots});
    return plan_.piece_slots++;
  }

  void MeetMate(uint32_t mate) {
    ExchangePlan::Step& step = plan_.first;
    step.peers.push_back(mate);
    step.pieces_out.push_back({mate, mate});
    plan_.sum.inputs.push_back(
        {ExchangeInput::Kind::kPiece, {mate, mate + 1}, Receive(step, mate, rank_)});
    for (uint32_t owner = 0; owner < tree_.ranks(); ++owner) {
      if (!IsOfOthers(owner)) continue;
      const uint32_t maker = machines_.Maker(own_, owner);
      if (maker == mate && !Contains(own_.singles, rank_)) {
        step.pieces_out.push_back({mate, owner});
      }
      if (maker == rank_ && !Contains(own_.singles, mate)) {
        collected_[{owner, mate}] = Receive(step, mate, owner);
      }
    }
  }

  // Of the pieces that have come.
  absl::Status MakeParts() {
    for (uint32_t owner = 0; owner < tree_.ranks(); ++owner) {
      if (!IsOfOthers(owner) || machines_.Maker(own_, owner) != rank_) continue;
      for (const TreeNode part : own_.parts) {
        ExchangeSum sum{.owner = owner, .slot = plan_.part_slots++};
        for (uint32_t rank = part.begin; rank < part.end; ++rank) {
          const TreeNode one = {rank, rank + 1};
          sum.inputs.push_back(rank == rank_ ? ExchangeInput{ExchangeInput::Kind::kOwn, one}
                                             : ExchangeInput{ExchangeInput::Kind::kPiece, one,
                                                             collected_.at({owner, rank})});
        }
        ZS_RETURN_IF_ERROR(Program(sum, part));
        plan_.parts_out.push_back({owner, owner, sum.slot});
        plan_.parts.push_back(std::move(sum));
      }
    }
    return absl::OkStatus();
  }

  void MeetOther(const Machine& machine, uint32_t peer) {
    ExchangePlan::Step& step = plan_.two_steps ? plan_.second : plan_.first;
    step.peers.push_back(peer);
    if (Contains(own_.singles, rank_)) step.pieces_out.push_back({peer, peer});
    if (Contains(machine.singles, peer)) {
      plan_.sum.inputs.push_back(
          {ExchangeInput::Kind::kPiece, {peer, peer + 1}, Receive(step, peer, rank_)});
    }
    if (machines_.Maker(machine, rank_) != peer) return;
    for (const TreeNode part : machine.parts) {
      plan_.sum.inputs.push_back({ExchangeInput::Kind::kPart, part, plan_.part_slots});
      plan_.parts_in.push_back({peer, rank_, plan_.part_slots++});
    }
  }

  absl::Status Program(ExchangeSum& sum, TreeNode target) const {
    std::vector<TreeNode> inputs;
    for (const ExchangeInput& input : sum.inputs) inputs.push_back(input.ranks);
    ZS_ASSIGN_OR_RETURN(const ReductionPlan plan, tree_.Plan(target, inputs));
    sum.program = plan.Program();
    return absl::OkStatus();
  }

  const ReductionTree& tree_;
  const Machines& machines_;
  const uint32_t rank_;
  const Machine& own_;
  ExchangePlan plan_;
  std::map<std::pair<uint32_t, uint32_t>, uint32_t> collected_;  // slot by (owner, rank)
};

}  // namespace

absl::StatusOr<ExchangePlan> MakeExchangePlan(const ReductionTree& tree,
                                              std::span<const uint32_t> node_of_rank, uint32_t rank,
                                              uint64_t element_bytes) {
  if (node_of_rank.size() != tree.ranks() || rank >= tree.ranks()) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " with nodes of ",
                                                   node_of_rank.size(), " ranks, in a tree of ",
                                                   tree.ranks()));
  }
  ZS_ASSIGN_OR_RETURN(const Machines machines, MachinesOf(tree, node_of_rank, element_bytes));
  return Planner(tree, machines, rank).Make();
}

}  // namespace zeroshard
