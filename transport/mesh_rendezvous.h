// MeshRendezvous: which workers take part in which set-up of a mesh.
//
// Set-ups are numbered: epochs. Keys of the store, all below "mesh/<epoch>/":
//   joined_<worker>  the worker takes part; its value is the worker's fingerprint
//   over             somebody has gone on to the next epoch: this one will not stand (again)
// A worker goes on when its mesh failed, and a worker that starts takes the first epoch that its
// predecessors have not joined; whoever waits in an epoch that is over goes on too. So all meet.
//
// Used by one thread; `stopping` may be set by any, and ends every wait.
#ifndef ZEROSHARD_TRANSPORT_MESH_RENDEZVOUS_H_
#define ZEROSHARD_TRANSPORT_MESH_RENDEZVOUS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "transport/mesh.h"

namespace zeroshard {

struct RendezvousOptions {
  uint32_t worker = 0;
  uint32_t workers = 1;
  // What all workers must have in common, as text that tells a reader what differs.
  std::string fingerprint = "none";
  // By worker, for messages: "worker 2 of node 1 (10.0.0.2:7401)"; empty: by number.
  std::vector<std::string> names = {};
  // How long one set-up may take, other workers' starts included.
  absl::Duration timeout = absl::Seconds(60);

  std::string NameOf(uint32_t peer) const;
};

class MeshRendezvous {
 public:
  using Report = std::function<void(const absl::Status&)>;

  // All arguments must outlive this. `report` hears who is waited for.
  MeshRendezvous(RendezvousStore& store, const RendezvousOptions& options,
                 const std::atomic<bool>& stopping, Report report)
      : store_(store), options_(options), stopping_(stopping), report_(std::move(report)) {}

  // The first epoch that no predecessor of this worker has joined. Waits for the store.
  uint64_t FirstUnusedEpoch();

  // Takes part in the epoch and waits until all others do. Aborted: it is over, or somebody did not
  // come in time. FailedPrecondition: a fingerprint differs, or the store says that the job is
  // gone. Unavailable: the store does not answer; join again.
  absl::Status Join(uint64_t epoch);

  // A value that a worker sets after it has joined. Aborted as above.
  absl::StatusOr<std::string> Await(uint64_t epoch, const std::string& key);

 private:
  absl::StatusOr<std::string> AwaitFor(uint64_t epoch, const std::string& key,
                                       const std::string& whom);
  bool IsOver(uint64_t epoch);

  RendezvousStore& store_;
  const RendezvousOptions& options_;
  const std::atomic<bool>& stopping_;
  const Report report_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TRANSPORT_MESH_RENDEZVOUS_H_
