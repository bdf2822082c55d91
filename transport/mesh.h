// Mesh: frames between the workers of a job that share no memory.
//
// Every worker has an ordered channel to every other. Frames are delivered in order while the mesh
// is connected; when any channel fails the whole mesh is torn down, what was under way is lost, and
// it is set up again under the next epoch, with the successor of a worker that died. So a user
// keeps what it sent until it knows by other means that it arrived, and sends it again after
// OnConnected; frames must be idempotent. (Collectives would have to be re-run as a whole; a frame
// can simply be sent again.)
//
// Threads: Send from any thread, never blocks. The observer is called from transport threads, one
// call at a time. One conformance suite, tests/conformance/mesh_conformance.h, is run by every
// implementation.
#ifndef ZEROSHARD_TRANSPORT_MESH_H_
#define ZEROSHARD_TRANSPORT_MESH_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace zeroshard {

// Bound of a payload: the largest slice of a unit with its partial sums.
inline constexpr uint64_t kMaxFramePayload = uint64_t{1} << 34;

// Leaves new elements as they are: a payload is written once, by whoever fills it.
template <class T>
struct UninitializedAllocator : std::allocator<T> {
  template <class U>
  struct rebind {
    using other = UninitializedAllocator<U>;
  };
  template <class U>
  void construct(U* place) noexcept {
    ::new (static_cast<void*>(place)) U;
  }
  template <class U, class... Arguments>
  void construct(U* place, Arguments&&... arguments) {
    std::construct_at(place, std::forward<Arguments>(arguments)...);
  }
};
using FrameBytes = std::vector<std::byte, UninitializedAllocator<std::byte>>;

struct Frame {
  uint32_t kind = 0;  // the user's; 0 is the transport's own
  uint32_t index = 0;
  uint64_t tag = 0;
  uint64_t value = 0;
  FrameBytes payload;
};

class MeshObserver {
 public:
  virtual ~MeshObserver() = default;
  // All channels stand. `epoch` rises with every set-up.
  virtual void OnConnected(uint64_t epoch) = 0;
  virtual void OnFrame(uint32_t peer, Frame frame) = 0;
  // The mesh does not stand: a channel failed, or workers are waited for, whom `reason` names;
  // again when it is others. It is being set up, but for FailedPrecondition: the workers do not
  // agree on what they are, and never will.
  virtual void OnDisconnected(const absl::Status& reason) = 0;
};

class Mesh {
 public:
  virtual ~Mesh() = default;
  // Queues a frame; dropped when the mesh is not connected.
  virtual void Send(uint32_t peer, Frame frame) = 0;
};

// The exchange of addresses that a mesh is set up with. Values never change once set.
class RendezvousStore {
 public:
  virtual ~RendezvousStore() = default;
  virtual absl::Status Set(const std::string& key, const std::string& value) = 0;
  // Waits for the key; DeadlineExceeded when it was not set in time, at once for a zero timeout.
  virtual absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TRANSPORT_MESH_H_
