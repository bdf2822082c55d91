// Placement: which part of a job each daemon hosts.
//
// A pure function of the job's ranks and the cluster, so that every daemon plans the same job
// without asking another: with L ranks and D devices a node, node n hosts ranks [n*L, (n+1)*L) and
// workers [n*D, (n+1)*D).

#ifndef ZEROSHARD_SERVER_PLACEMENT_H_
#define ZEROSHARD_SERVER_PLACEMENT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/cluster_config.h"

namespace zeroshard {

struct Placement {
  uint32_t node = 0;   // this daemon
  uint32_t nodes = 1;  // that the job uses: 0 to nodes - 1
  uint32_t ranks = 1;  // of each node
  uint32_t workers = 1;

  // Whether the job has workers of several daemons.
  bool spans() const { return nodes > 1; }
  uint32_t first_rank() const { return node * ranks; }
  uint32_t first_worker() const { return node * workers; }
  bool has_rank(uint32_t rank) const { return rank / ranks == node; }
  bool has_worker(uint32_t worker) const { return worker / workers == node; }
  uint32_t home_worker(uint32_t rank) const { return rank / ranks * workers + rank % workers; }
};

// `local_ranks` of `world_size` attach to each daemon (0: all of them to this one), each of which
// has `devices`. InvalidArgument or FailedPrecondition, with what is configured, when they cannot
// be placed; when `rank` belongs to another daemon, with that one's address.
absl::StatusOr<Placement> PlaceJob(const ClusterConfig& cluster, uint32_t world_size,
                                   uint32_t local_ranks, uint32_t devices, uint32_t rank);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_PLACEMENT_H_
