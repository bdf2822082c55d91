// ExchangePlan: the way of one unit's gradient from all ranks to the owners of its slices. Pure.
//
// Of the two ways between GPUs, NVLink within a node has many times the bandwidth of the network
// between nodes. So where it makes fewer bytes of it, ranks of a node are summed before they cross
// the network. The canonical order (worker/reduction_tree.h) says which may be: the ranks of a node
// are covered by nodes of the tree, mostly by one, and the sum of each is a value that the owner's
// sum needs anyway: a part, in fp32. Bits are those of the sum over all ranks.
//
//   1. within a node: to rank m its slice, and, of slices of other machines' ranks, those for which
//      m makes the parts; m sums what has come to parts
//   2. between nodes: parts to the owners; pieces of ranks that no part has
//   3. the owner sums the pieces of its node, parts, and pieces of others
//
// The parts of a node's ranks for the owner at place p of its node are made by the rank at place
// p modulo n of that node, n its number of ranks. A part takes 4 bytes an element, so one of k
// ranks is made where their k pieces take more. With one node, or where no part would be made, all
// pieces go in one step.
#ifndef ZEROSHARD_CLIENT_DATAPLANE_EXCHANGE_PLAN_H_
#define ZEROSHARD_CLIENT_DATAPLANE_EXCHANGE_PLAN_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/reduction_tree.h"

namespace zeroshard {

// One message: a piece, or a part, of the slice that rank `owner` has.
struct ExchangeMessage {
  uint32_t peer = 0;
  uint32_t owner = 0;
  uint32_t slot = 0;  // where it lies: of parts, and of pieces that arrive
};

struct ExchangeInput {
  enum class Kind : uint8_t { kOwn, kPiece, kPart };
  Kind kind = Kind::kPiece;
  TreeNode ranks;     // whose gradients: one rank, or those of the part
  uint32_t slot = 0;  // of its kind
};

// Of the slice of rank `owner`, in the canonical order.
struct ExchangeSum {
  uint32_t owner = 0;
  std::vector<ExchangeInput> inputs = {};
  ReductionProgram program = {};
  uint32_t slot = 0;  // of a part: where it is put
};

// What one rank does. Messages of one step between two ranks match in the order of the lists.
struct ExchangePlan {
  struct Step {
    std::vector<uint32_t> peers;  // ranks that tell each other their headers
    std::vector<ExchangeMessage> pieces_out;
    std::vector<ExchangeMessage> pieces_in;
  };
  Step first;                      // within the node; of all where there is one step
  std::vector<ExchangeSum> parts;  // made between the steps
  Step second;
  std::vector<ExchangeMessage> parts_out;  // with the second step
  std::vector<ExchangeMessage> parts_in;
  ExchangeSum sum;  // the whole, of this rank's slice

  bool two_steps = false;  // the same on all ranks
  uint32_t piece_slots = 0;
  uint32_t part_slots = 0;
};

// `node_of_rank`: any numbers that are equal for ranks of one node. `element_bytes`: of the
// gradient. InvalidArgument where nodes are not those of the tree's ranks.
absl::StatusOr<ExchangePlan> MakeExchangePlan(const ReductionTree& tree,
                                              std::span<const uint32_t> node_of_rank, uint32_t rank,
                                              uint64_t element_bytes);

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_DATAPLANE_EXCHANGE_PLAN_H_
