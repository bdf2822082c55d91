// SlotRing: which parts of a rank's gradient window are in use.
//
//   Acquire -> (the trainer writes values) -> Bind to a request -> Reclaim once that is complete
//
// Slots are handed out around the window in order and become free in order, so a slot behind a
// slower one waits for it: requests of one rank complete nearly in order, and a ring never
// fragments. A pure value; not synchronised.
#ifndef ZEROSHARD_CLIENT_SLOT_RING_H_
#define ZEROSHARD_CLIENT_SLOT_RING_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>

#include "absl/status/status.h"

namespace zeroshard {

inline constexpr uint64_t kSlotAlignment = 64;

class SlotRing {
 public:
  explicit SlotRing(uint64_t capacity) : capacity_(capacity / kSlotAlignment * kSlotAlignment) {}

  // Bytes of the largest slot.
  uint64_t capacity() const { return capacity_; }
  // Slots that are not free, and how many of them wait for a request to name them.
  size_t size() const { return slots_.size(); }
  size_t unbound() const;

  // The offset of a free range, or nothing when none is long enough now. Needs bytes <= capacity().
  std::optional<uint64_t> Acquire(uint64_t bytes);
  // The slot at `offset` now belongs to request `id`, which uses `bytes` of it. InvalidArgument
  // when no unbound slot starts there or it is shorter.
  absl::Status Bind(uint64_t offset, uint64_t bytes, uint64_t id);
  // Gives an unbound slot back.
  absl::Status Abandon(uint64_t offset);
  // Frees the slots whose requests are complete.
  void Reclaim(const std::function<bool(uint64_t id)>& complete);

 private:
  enum class State { kUnbound, kBound, kFree };
  struct Slot {
    uint64_t begin;
    uint64_t end;
    State state;
    uint64_t id;
  };

  Slot* FindUnbound(uint64_t offset);
  void PopFree();

  uint64_t capacity_;
  uint64_t head_ = 0;       // where the next slot begins if it fits
  std::deque<Slot> slots_;  // oldest first; those in the middle may already be kFree
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_SLOT_RING_H_
