#include "server/placement.h"

#include "absl/strings/str_cat.h"

namespace zeroshard {

absl::StatusOr<Placement> PlaceJob(const ClusterConfig& cluster, uint32_t world_size,
                                   uint32_t local_ranks, uint32_t devices, uint32_t rank) {
  Placement placement;
  placement.ranks = local_ranks == 0 ? world_size : local_ranks;
  placement.workers = devices;
  if (placement.ranks == world_size) return placement;  // node 0 of 1, whatever the daemon's place
  if (placement.ranks > world_size || world_size % placement.ranks != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("local_ranks: expected a divisor of world_size ", world_size,
                     " (every daemon of a job has as many ranks), found ", local_ranks));
  }
  placement.nodes = world_size / placement.ranks;
  if (placement.nodes > cluster.addresses.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "world_size ", world_size, " with local_ranks ", local_ranks, " needs ", placement.nodes,
        " daemons, but this one ",
        cluster.alone() ? "is configured without others: set `cluster` in the configuration of each"
                        : absl::StrCat("is in a cluster of ", cluster.addresses.size())));
  }
  placement.node = cluster.node;
  if (cluster.node >= placement.nodes) {
    return absl::FailedPreconditionError(
        absl::StrCat("the job uses nodes 0 to ", placement.nodes - 1, "; this is ",
                     cluster.NodeName(cluster.node), "; rank ", rank, " belongs to ",
                     cluster.NodeName(rank / placement.ranks)));
  }
  if (!placement.has_rank(rank)) {
    return absl::FailedPreconditionError(
        absl::StrCat("rank ", rank, " belongs to ", cluster.NodeName(rank / placement.ranks),
                     "; this is ", cluster.NodeName(cluster.node), " with ranks ",
                     placement.first_rank(), " to ", placement.first_rank() + placement.ranks - 1));
  }
  return placement;
}

}  // namespace zeroshard
