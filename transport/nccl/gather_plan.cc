#include "transport/nccl/gather_plan.h"

#include <map>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

// By node: its ranks, in order.
std::map<uint32_t, std::vector<uint32_t>> Nodes(std::span<const uint32_t> node_of_rank) {
  std::map<uint32_t, std::vector<uint32_t>> nodes;
  for (uint32_t rank = 0; rank < node_of_rank.size(); ++rank) {
    nodes[node_of_rank[rank]].push_back(rank);
  }
  return nodes;
}

// By rank: its place among the ranks of its node.
std::vector<uint32_t> Places(const std::map<uint32_t, std::vector<uint32_t>>& nodes, size_t ranks) {
  std::vector<uint32_t> places(ranks);
  for (const auto& [node, members] : nodes) {
    for (uint32_t place = 0; place < members.size(); ++place) places[members[place]] = place;
  }
  return places;
}

}  // namespace

absl::StatusOr<GatherPlan> MakeGatherPlan(std::span<const uint32_t> node_of_rank, uint32_t rank) {
  if (rank >= node_of_rank.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", rank, " is none of ", node_of_rank.size()));
  }
  const std::map<uint32_t, std::vector<uint32_t>> nodes = Nodes(node_of_rank);
  const std::vector<uint32_t> places = Places(nodes, node_of_rank.size());
  const uint32_t own_node = node_of_rank[rank];
  const auto own_size = static_cast<uint32_t>(nodes.at(own_node).size());

  GatherPlan plan;
  for (const auto& [node, members] : nodes) {
    if (node != own_node) plan.send_to.push_back(members[places[rank] % members.size()]);
  }
  plan.root_of_piece.resize(node_of_rank.size());
  for (uint32_t piece = 0; piece < node_of_rank.size(); ++piece) {
    const uint32_t root = places[piece] % own_size;
    plan.root_of_piece[piece] = root;
    if (node_of_rank[piece] != own_node && root == places[rank]) plan.receive_from.push_back(piece);
  }
  return plan;
}

bool GatherHasLevels(std::span<const uint32_t> node_of_rank) {
  const auto nodes = Nodes(node_of_rank);
  return nodes.size() > 1 && nodes.size() < node_of_rank.size();
}

}  // namespace zeroshard
