#include "client/dataplane/rank_links.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/config.h"
#include "base/deadline.h"
#include "base/log.h"
#include "base/status.h"
#include "transport/nccl/gather_plan.h"
#include "transport/nccl/library.h"
#include "transport/nccl/rank_meeting.h"

namespace zeroshard {

absl::StatusOr<std::unique_ptr<RankLinks>> RankLinks::Connect(const DataPlaneOptions& options,
                                                              const CudaDevice& device,
                                                              const std::string& name) {
  ZS_ASSIGN_OR_RETURN(const NcclLibrary library, NcclLibrary::Load());
  if (options.rank == 0) LogInfo(absl::StrCat(name, ": ", library.description()));
  if (Env("CUDA_DEVICE_MAX_CONNECTIONS").value_or("") == "1") {
    LogWarn(absl::StrCat(name,
                         ": CUDA_DEVICE_MAX_CONNECTIONS is 1: ranks that gather parameters and ",
                         "sum gradients in different orders hang; leave it unset (docs/nccl.md)"));
  }
  const uint32_t ranks = options.layout.workers();
  MeetingOptions meeting_options = {.rank = options.rank, .ranks = ranks};
  meeting_options.communicators = options.config.forward_only ? 1 : 2;
  meeting_options.node = options.node;
  meeting_options.timeout = options.timeout;
  ZS_ASSIGN_OR_RETURN(const Meeting meeting,
                      MeetRanks(library, options.rendezvous, meeting_options));

  const CurrentDevice current(device);
  ZS_RETURN_IF_ERROR(current.status());
  NcclOptions nccl = {.timeout = options.timeout, .alive = options.alive};
  nccl.name = absl::StrCat(name, ", parameters");
  std::unique_ptr<RankLinks> links(new RankLinks);
  ZS_ASSIGN_OR_RETURN(links->parameters_,
                      NcclCommunicator::Create(library, meeting.ids[0], options.rank, ranks, nccl));
  links->node_of_rank_ = meeting.node_of_rank;
  ZS_RETURN_IF_ERROR(links->ConnectNodes(library));
  if (options.config.forward_only) return links;
  nccl.name = absl::StrCat(name, ", gradients");
  ZS_ASSIGN_OR_RETURN(links->gradients_,
                      NcclCommunicator::Create(library, meeting.ids[1], options.rank, ranks, nccl));
  return links;
}

absl::Status RankLinks::ConnectNodes(const NcclLibrary& library) {
  if (!GatherHasLevels(node_of_rank_)) return absl::OkStatus();
  if (!library.can_split()) {
    LogWarn(absl::StrCat(library.description(),
                         ": parameters cross the network once for each rank, as NCCL before 2.18 "
                         "cannot split communicators"));
    return absl::OkStatus();
  }
  ZS_ASSIGN_OR_RETURN(nodes_, NodeGather::Create(*parameters_, node_of_rank_));
  return absl::OkStatus();
}

absl::Status RankLinks::AllGather(CUstream_st* stream, std::span<const NcclGather> gathers) {
  return nodes_ != nullptr ? nodes_->AllGather(stream, gathers)
                           : parameters_->AllGather(stream, gathers);
}

absl::Status RankLinks::Register(const NcclBuffer& buffer) {
  ZS_RETURN_IF_ERROR(parameters_->Register(buffer));
  return nodes_ == nullptr ? absl::OkStatus() : nodes_->node().Register(buffer);
}

std::vector<NcclCommunicator*> RankLinks::communicators() {
  std::vector<NcclCommunicator*> all = {parameters_.get()};
  if (nodes_ != nullptr) all.push_back(&nodes_->node());
  if (gradients_ != nullptr) all.push_back(gradients_.get());
  return all;
}

bool RankLinks::Abort(absl::Duration timeout) {
  const Deadline deadline = Deadline::After(timeout);
  for (NcclCommunicator* communicator : communicators()) communicator->BeginAbort();
  bool ended = true;
  for (NcclCommunicator* communicator : communicators()) {
    if (!communicator->Abort(deadline.Remaining())) ended = false;
  }
  return ended;
}

}  // namespace zeroshard
