// DeviceSlots: memory for gradients until they are summed, in rings.
//
// There is one ring at first. Where it is full of gradients that wait for others (they came out of
// order) no waiting would help, and another ring is added: counted, and kept. One caller at a time.
// Only for client/dataplane.
#ifndef ZEROSHARD_CLIENT_DATAPLANE_SLOTS_H_
#define ZEROSHARD_CLIENT_DATAPLANE_SLOTS_H_

#include <cstdint>
#include <functional>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/dataplane/plane_core.h"
#include "client/dataplane/trainer_memory.h"

namespace zeroshard {

class DeviceSlots {
 public:
  // `complete(id)`: whether what Bind bound to the id has been read; `advances()`: whether some of
  // that will complete by itself; `added(memory)`: a ring was added.
  DeviceSlots(PlaneCore& core, OwnMemory& memory,
              std::function<absl::StatusOr<bool>(uint64_t)> complete,
              std::function<bool()> advances,
              std::function<absl::Status(const DeviceMemory&)> added);

  absl::StatusOr<DeviceSlot> Acquire(uint64_t bytes);
  absl::Status Abandon(uint64_t offset);
  absl::StatusOr<DeviceAddress> Bind(uint64_t offset, uint64_t bytes, uint64_t id);

  uint64_t bytes() const;
  uint64_t overflows() const { return overflows_; }

 private:
  absl::StatusOr<OwnMemory::Ring*> RingOf(uint64_t offset) const;
  absl::Status Reclaim();
  std::optional<DeviceSlot> TryAcquire(uint64_t bytes);

  PlaneCore& core_;
  OwnMemory& memory_;
  const std::function<absl::StatusOr<bool>(uint64_t)> complete_;
  const std::function<bool()> advances_;
  const std::function<absl::Status(const DeviceMemory&)> added_;
  uint64_t overflows_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_DATAPLANE_SLOTS_H_
