#include "client/slot_ring.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace zeroshard {

size_t SlotRing::unbound() const {
  return static_cast<size_t>(std::count_if(slots_.begin(), slots_.end(), [](const Slot& slot) {
    return slot.state == State::kUnbound;
  }));
}

std::optional<uint64_t> SlotRing::Acquire(uint64_t bytes) {
  if (bytes > capacity_) return std::nullopt;
  const uint64_t length =
      std::max<uint64_t>((bytes + kSlotAlignment - 1) / kSlotAlignment, 1) * kSlotAlignment;
  uint64_t begin = 0;
  if (!slots_.empty()) {
    const uint64_t tail = slots_.front().begin;
    begin = head_;
    if (head_ > tail) {
      if (capacity_ - head_ < length) {
        if (tail < length) return std::nullopt;
        begin = 0;
      }
    } else if (tail - head_ < length) {
      return std::nullopt;
    }
  } else if (length > capacity_) {
    return std::nullopt;
  }
  slots_.push_back({begin, begin + length, State::kUnbound, 0});
  head_ = begin + length;
  return begin;
}

SlotRing::Slot* SlotRing::FindUnbound(uint64_t offset) {
  for (auto slot = slots_.rbegin(); slot != slots_.rend(); ++slot) {
    if (slot->begin == offset && slot->state == State::kUnbound) return &*slot;
  }
  return nullptr;
}

absl::Status SlotRing::Bind(uint64_t offset, uint64_t bytes, uint64_t id) {
  Slot* slot = FindUnbound(offset);
  if (slot == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        "offset ", offset, " of the gradient window is not a slot that AcquireSlot returned"));
  }
  if (slot->end - slot->begin < bytes) {
    return absl::InvalidArgumentError(absl::StrCat("the slot at offset ", offset, " has ",
                                                   slot->end - slot->begin,
                                                   " bytes, the request needs ", bytes));
  }
  slot->state = State::kBound;
  slot->id = id;
  return absl::OkStatus();
}

absl::Status SlotRing::Abandon(uint64_t offset) {
  Slot* slot = FindUnbound(offset);
  if (slot == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("no unused slot at offset ", offset, " of the gradient window"));
  }
  slot->state = State::kFree;
  PopFree();
  return absl::OkStatus();
}

void SlotRing::Reclaim(const std::function<bool(uint64_t id)>& complete) {
  for (Slot& slot : slots_) {
    if (slot.state == State::kBound && complete(slot.id)) slot.state = State::kFree;
  }
  PopFree();
}

void SlotRing::PopFree() {
  while (!slots_.empty() && slots_.front().state == State::kFree) slots_.pop_front();
}

}  // namespace zeroshard
