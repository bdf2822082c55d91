#include "client/dataplane/slots.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace zeroshard {
namespace {

// An offset is the number of the ring and the place in it.
constexpr uint32_t kRingShift = 48;
constexpr uint64_t kSlotGranule = 512;

uint64_t RoundUp(uint64_t bytes) {
  return std::max<uint64_t>((bytes + kSlotGranule - 1) / kSlotGranule, 1) * kSlotGranule;
}

}  // namespace

DeviceSlots::DeviceSlots(PlaneCore& core, OwnMemory& memory,
                         std::function<absl::StatusOr<bool>(uint64_t)> complete,
                         std::function<bool()> advances,
                         std::function<absl::Status(const DeviceMemory&)> added)
    : core_(core),
      memory_(memory),
      complete_(std::move(complete)),
      advances_(std::move(advances)),
      added_(std::move(added)) {
  memory_.ClearSlots();
}

std::optional<DeviceSlot> DeviceSlots::TryAcquire(uint64_t bytes) {
  for (size_t i = 0; i < memory_.rings().size(); ++i) {
    OwnMemory::Ring& ring = memory_.rings()[i];
    const std::optional<uint64_t> offset = ring.slots.Acquire(RoundUp(bytes));
    if (offset) return DeviceSlot{i << kRingShift | *offset, ring.memory.address() + *offset};
  }
  return std::nullopt;
}

absl::Status DeviceSlots::Reclaim() {
  absl::Status failed;
  for (OwnMemory::Ring& ring : memory_.rings()) {
    ring.slots.Reclaim([&](uint64_t id) {
      const absl::StatusOr<bool> complete = complete_(id);
      KeepFirstError(failed, complete.status());
      return complete.ok() && *complete;
    });
  }
  return failed;
}

absl::StatusOr<DeviceSlot> DeviceSlots::Acquire(uint64_t bytes) {
  std::optional<DeviceSlot> slot = TryAcquire(bytes);
  if (slot) return *slot;
  ZS_RETURN_IF_ERROR(Reclaim());
  slot = TryAcquire(bytes);
  if (slot) return *slot;
  if (!memory_.rings().empty() && advances_()) {
    ZS_RETURN_IF_ERROR(core_.Await(
        [&]() -> absl::StatusOr<bool> {
          ZS_RETURN_IF_ERROR(Reclaim());
          slot = TryAcquire(bytes);
          return slot.has_value() || !advances_();
        },
        absl::StrCat("a slot of ", bytes, " bytes for a gradient")));
    if (slot) return *slot;
  }
  overflows_ += memory_.rings().empty() ? 0 : 1;
  ZS_RETURN_IF_ERROR(Annotate(memory_.AddRing(std::max(core_.config().slot_bytes, RoundUp(bytes))),
                              "memory for gradients"));
  ZS_RETURN_IF_ERROR(added_(memory_.rings().back().memory));
  slot = TryAcquire(bytes);
  if (!slot) return absl::InternalError("a new ring has no room for the slot it was made for");
  return *slot;
}

absl::StatusOr<OwnMemory::Ring*> DeviceSlots::RingOf(uint64_t offset) const {
  const uint64_t ring = offset >> kRingShift;
  if (ring < memory_.rings().size()) return &memory_.rings()[ring];
  return absl::InvalidArgumentError(
      absl::StrCat("offset ", offset, " is not a slot that AcquireSlot returned"));
}

absl::Status DeviceSlots::Abandon(uint64_t offset) {
  ZS_ASSIGN_OR_RETURN(OwnMemory::Ring * ring, RingOf(offset));
  return ring->slots.Abandon(offset & ((uint64_t{1} << kRingShift) - 1));
}

absl::StatusOr<DeviceAddress> DeviceSlots::Bind(uint64_t offset, uint64_t bytes, uint64_t id) {
  ZS_ASSIGN_OR_RETURN(OwnMemory::Ring * ring, RingOf(offset));
  const uint64_t place = offset & ((uint64_t{1} << kRingShift) - 1);
  ZS_RETURN_IF_ERROR(ring->slots.Bind(place, bytes, id));
  return ring->memory.address() + place;
}

uint64_t DeviceSlots::bytes() const {
  uint64_t bytes = 0;
  for (const OwnMemory::Ring& ring : memory_.rings()) bytes += ring.memory.bytes();
  return bytes;
}

}  // namespace zeroshard
