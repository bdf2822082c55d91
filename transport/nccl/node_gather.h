// NodeGather: all-gathers over nodes of several GPUs in two operations, by
// transport/nccl/gather_plan.h.
//
// Used as the communicator that it is made of: same threads, same order on all ranks, dead with it.
// The caller interrupts, aborts and closes both: this one first, as it must not outlive the other.
#ifndef ZEROSHARD_TRANSPORT_NCCL_NODE_GATHER_H_
#define ZEROSHARD_TRANSPORT_NCCL_NODE_GATHER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "transport/nccl/communicator.h"
#include "transport/nccl/gather_plan.h"

namespace zeroshard {

class NodeGather {
 public:
  // All ranks of `world` call this with the same list. FailedPrecondition where NCCL cannot split:
  // gather over `world` alone.
  static absl::StatusOr<std::unique_ptr<NodeGather>> Create(NcclCommunicator& world,
                                                            std::span<const uint32_t> node_of_rank);

  // As NcclCommunicator::AllGather, bit for bit.
  absl::Status AllGather(CUstream_st* stream, std::span<const NcclGather> gathers);

  // The ranks of this node.
  NcclCommunicator& node() { return *node_; }

  void Interrupt(const absl::Status& reason) { node_->Interrupt(reason); }
  // Begins the abort of both communicators, and waits for the node's.
  bool Abort(absl::Duration timeout) {
    world_.BeginAbort();
    return node_->Abort(timeout);
  }
  absl::Status Close() { return node_->Close(); }

 private:
  NodeGather(NcclCommunicator& world, std::unique_ptr<NcclCommunicator> node, GatherPlan plan)
      : world_(world), node_(std::move(node)), plan_(std::move(plan)) {}

  NcclCommunicator& world_;
  const std::unique_ptr<NcclCommunicator> node_;
  const GatherPlan plan_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TRANSPORT_NCCL_NODE_GATHER_H_
