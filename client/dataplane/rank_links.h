// RankLinks: the NCCL communicators of one rank: parameters and gradients have one each, so that
// gathers ahead need not wait for gradients; between nodes of several GPUs parameters go to the
// node first (transport/nccl/gather_plan.h).
//
// As their communicators: operations by one thread at a time with the device current, in the same
// order on all ranks for each of the two; dead with the first failure. Only for client/dataplane.
#ifndef ZEROSHARD_CLIENT_DATAPLANE_RANK_LINKS_H_
#define ZEROSHARD_CLIENT_DATAPLANE_RANK_LINKS_H_

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/dataplane/data_plane.h"
#include "device/cuda/device.h"
#include "transport/nccl/communicator.h"
#include "transport/nccl/node_gather.h"

namespace zeroshard {

class RankLinks {
 public:
  // Makes them, with all other ranks at about the same time. Ends early when options.alive does.
  // `name` is for messages. FailedPrecondition: no NCCL that can be used, or not the same on all
  // ranks.
  static absl::StatusOr<std::unique_ptr<RankLinks>> Connect(const DataPlaneOptions& options,
                                                            const CudaDevice& device,
                                                            const std::string& name);

  // As NcclCommunicator's.
  absl::Status AllGather(CUstream_st* stream, std::span<const NcclGather> gathers);
  // Registers memory that parameters are gathered from and to, one allocation; as
  // NcclCommunicator's.
  bool registers() const { return parameters_->registers(); }
  absl::Status Register(const NcclBuffer& buffer);
  // Numbered from 0 in the order of ranks.
  const std::vector<uint32_t>& node_of_rank() const { return node_of_rank_; }
  // For gradients; null in a job without.
  NcclCommunicator* gradients() { return gradients_.get(); }

  // All of them, to be polled and interrupted.
  std::vector<NcclCommunicator*> communicators();

  // As NcclCommunicator's, for all.
  bool Abort(absl::Duration timeout);

 private:
  RankLinks() = default;
  absl::Status ConnectNodes(const NcclLibrary& library);

  std::vector<uint32_t> node_of_rank_;
  std::unique_ptr<NcclCommunicator> parameters_;
  std::unique_ptr<NodeGather> nodes_;  // of parameters_; null where one level does
  std::unique_ptr<NcclCommunicator> gradients_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_DATAPLANE_RANK_LINKS_H_
