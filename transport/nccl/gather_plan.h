// GatherPlan: who sends what in a gather over nodes of several GPUs, the node first. Pure.
//
// Of the two ways between GPUs, NVLink within a node has many times the bandwidth of the network
// between nodes. So each piece crosses the network once for each other node, to one rank there, and
// the ranks of a node give each other what they have:
//
//   1. between nodes, over all ranks: the rank at place p of its node sends its piece to the rank
//   at
//      place p modulo n of each other node, n its number of ranks;
//   2. within each node: every piece is broadcast by the rank that has it.
//
// Nodes of different sizes are fine; a small node's ranks receive more pieces each.
#ifndef ZEROSHARD_TRANSPORT_NCCL_GATHER_PLAN_H_
#define ZEROSHARD_TRANSPORT_NCCL_GATHER_PLAN_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

namespace zeroshard {

// What one rank does.
struct GatherPlan {
  // Step 1. Own piece to these ranks.
  std::vector<uint32_t> send_to;
  // Step 1. Pieces of these ranks, from themselves.
  std::vector<uint32_t> receive_from;
  // Step 2. For each rank of the world, the rank within this rank's node that has its piece after
  // step 1: the root of its broadcast in the node's communicator, whose ranks are ordered as here.
  std::vector<uint32_t> root_of_piece;
};

// `node_of_rank`: any numbers that are equal for ranks of one node. InvalidArgument for a rank that
// is not in it.
absl::StatusOr<GatherPlan> MakeGatherPlan(std::span<const uint32_t> node_of_rank, uint32_t rank);

// Whether the two steps do better than one gather over all: more than one node, and one of them
// with more than one rank.
bool GatherHasLevels(std::span<const uint32_t> node_of_rank);

}  // namespace zeroshard

#endif  // ZEROSHARD_TRANSPORT_NCCL_GATHER_PLAN_H_
