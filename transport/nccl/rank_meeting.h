// MeetRanks: what the ranks of a generation tell each other before they make communicators.
//
// By the rendezvous of the control plane (keys below; a value never changes once set, and the store
// ends with the generation, which is why a failure here ends the generation too):
//
//   nccl/rank/<r>   of each rank: version of its NCCL, node, one a line
//   nccl/world      of rank 0, when all are there: the word "ids" or "refused", then for "ids" the
//                   unique ids in hexadecimal, and the nodes' numbers by rank; for "refused" the
//                   reason
//
// Any thread; blocks for at most the timeout.
#ifndef ZEROSHARD_TRANSPORT_NCCL_RANK_MEETING_H_
#define ZEROSHARD_TRANSPORT_NCCL_RANK_MEETING_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "transport/nccl/library.h"

namespace zeroshard {

// As DataPlaneOptions::rendezvous.
using RendezvousFunction = std::function<absl::StatusOr<std::string>(
    const std::string& key, const std::optional<std::string>& value, absl::Duration timeout)>;

struct MeetingOptions {
  uint32_t rank = 0;
  uint32_t ranks = 1;
  // How many communicators are going to be made.
  uint32_t communicators = 1;
  // Equal for ranks whose GPUs are in one node; one line.
  std::string node = {};
  absl::Duration timeout = absl::Minutes(2);
};

struct Meeting {
  std::vector<NcclUniqueId> ids;       // one a communicator
  std::vector<uint32_t> node_of_rank;  // numbered from 0 in the order of ranks
};

// FailedPrecondition on all ranks where they have different versions of NCCL, whose protocol is no
// other's: names two ranks and what they have. DeadlineExceeded for a rank that does not come.
absl::StatusOr<Meeting> MeetRanks(const NcclLibrary& library, const RendezvousFunction& rendezvous,
                                  const MeetingOptions& options);

}  // namespace zeroshard

#endif  // ZEROSHARD_TRANSPORT_NCCL_RANK_MEETING_H_
