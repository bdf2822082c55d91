#include "transport/nccl/node_gather.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace zeroshard {

absl::StatusOr<std::unique_ptr<NodeGather>> NodeGather::Create(
    NcclCommunicator& world, std::span<const uint32_t> node_of_rank) {
  if (node_of_rank.size() != world.ranks()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "nodes of ", node_of_rank.size(), " ranks are given, the world has ", world.ranks()));
  }
  ZS_ASSIGN_OR_RETURN(GatherPlan plan, MakeGatherPlan(node_of_rank, world.rank()));
  ZS_ASSIGN_OR_RETURN(auto node, world.Split(node_of_rank));
  return std::unique_ptr<NodeGather>(new NodeGather(world, std::move(node), std::move(plan)));
}

absl::Status NodeGather::AllGather(CUstream_st* stream, std::span<const NcclGather> gathers) {
  std::vector<NcclMessage> sends;
  std::vector<NcclMessage> receives;
  std::vector<NcclBroadcast> broadcasts;
  for (const NcclGather& gather : gathers) {
    if (gather.receive.size() != world_.ranks()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "a gather over ", world_.ranks(), " ranks has ", gather.receive.size(), " pieces"));
    }
    for (const uint32_t peer : plan_.send_to) sends.push_back({peer, gather.send});
    for (const uint32_t peer : plan_.receive_from) receives.push_back({peer, gather.receive[peer]});
    for (uint32_t piece = 0; piece < world_.ranks(); ++piece) {
      const NcclBuffer& place = gather.receive[piece];
      broadcasts.push_back(
          {plan_.root_of_piece[piece], piece == world_.rank() ? gather.send : place, place});
    }
  }
  ZS_RETURN_IF_ERROR(world_.Exchange(stream, sends, receives));
  return node_->Broadcast(stream, broadcasts);
}

}  // namespace zeroshard
