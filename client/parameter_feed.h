// ParameterFeed: how a rank on a GPU gathers parameters that rest on the NVMe tier.
//
//   drive --worker--> ring (host memory of worker and rank) --copy--> window --all-gather--> window
//
// Gather sends the request, which the home worker completes when its shard is in the ring: so reads
// run ahead of the need, as far as the ring has room. Copy and all-gather are put on the stream
// later, by the call that needs them (Arrange, or a Gather that needs the room): it waits for the
// drive, and for nothing else. They go in the order of the calls of Gather, and at places that
// depend on the trainer's calls alone, not on when a read ends: ranks that make the same calls
// launch the same operations in the same order (docs/nccl.md).
//
// Any thread; calls wait for each other. Only for client/device_side.
#ifndef ZEROSHARD_CLIENT_PARAMETER_FEED_H_
#define ZEROSHARD_CLIENT_PARAMETER_FEED_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/dataplane/data_plane.h"
#include "client/request_channel.h"

namespace zeroshard {

class ParameterFeed {
 public:
  using Submit = std::function<absl::StatusOr<uint64_t>(trainer::v1::SessionRequest)>;

  // The ring: its first byte in the gradient window, a multiple of 256. `shard_bytes`: by unit, of
  // this rank's shard. Both objects must outlive this.
  ParameterFeed(uint64_t ring_offset, uint64_t ring_bytes, std::vector<uint64_t> shard_bytes,
                DataPlane& plane, RequestChannel& channel)
      : offset_(ring_offset),
        bytes_(ring_bytes),
        shard_bytes_(std::move(shard_bytes)),
        plane_(plane),
        channel_(channel),
        current_(shard_bytes_.size(), 0) {}

  // Of one unit that does not stay; returns the request's id.
  absl::StatusOr<uint64_t> Gather(uint32_t unit, bool prefetch, const Submit& submit);
  // Puts a gather of each of these units on the stream, and all before it. Nothing to do for a unit
  // of which one is there that was not released: others that are on their way bring the same
  // values.
  absl::Status Arrange(std::span<const uint32_t> units);
  // A gather of each is undone.
  void Released(std::span<const uint32_t> units);
  // Puts all on the stream: before any other operation of all ranks on the same communicator.
  absl::Status ArrangeAll();
  // The same; later gathers bring other values.
  absl::Status EndStep();

 private:
  struct Shard {
    uint32_t unit = 0;
    uint64_t request = 0;
    uint64_t at = 0;  // in the ring
    uint64_t bytes = 0;
    std::optional<uint64_t> mark;  // once it is on the stream: until when it is copied
  };

  absl::StatusOr<uint64_t> TakeRoom(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status ArrangeFirst(size_t shards) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const uint64_t offset_;
  const uint64_t bytes_;
  const std::vector<uint64_t> shard_bytes_;
  DataPlane& plane_;
  RequestChannel& channel_;

  absl::Mutex mu_;
  std::deque<Shard> shards_ ABSL_GUARDED_BY(mu_);  // in the order of their gathers
  size_t arranged_ ABSL_GUARDED_BY(mu_) = 0;       // so many of the first
  uint64_t end_ ABSL_GUARDED_BY(mu_) = 0;          // of the last one in the ring
  // By unit: gathers of this step that are on the stream and not released.
  std::vector<uint32_t> current_ ABSL_GUARDED_BY(mu_);
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_PARAMETER_FEED_H_
