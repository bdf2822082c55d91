#include "client/dataplane/trainer_memory.h"

#include <algorithm>
#include <utility>

#include "base/status.h"

namespace zeroshard {
namespace {

// Of the window: what pages of the driver hold.
constexpr uint64_t kSegmentBytes = uint64_t{2} << 20;

}  // namespace

OwnMemory::OwnMemory(std::unique_ptr<CudaDevice> device, const Layout& layout, WindowKind kind)
    : device_(std::move(device)),
      fingerprint_(layout.fingerprint()),
      kind_(kind),
      mapped_(layout.units().size(), 0) {
  for (const Unit& unit : layout.units()) {
    offsets_.push_back(unit.window_offset);
    bytes_.push_back(unit.bytes());
  }
}

absl::StatusOr<std::shared_ptr<OwnMemory>> OwnMemory::Create(std::unique_ptr<CudaDevice> device,
                                                             const Layout& layout,
                                                             WindowKind kind) {
  std::shared_ptr<OwnMemory> memory(new OwnMemory(std::move(device), layout, kind));
  const uint64_t granularity = memory->device().granularity();
  const uint64_t least =
      kind == WindowKind::kWhole ? std::max(layout.window_bytes(), kSegmentBytes) : kSegmentBytes;
  const uint64_t segment = (least + granularity - 1) / granularity * granularity;
  const uint64_t largest = memory->bytes_.empty() ? 0 : *std::ranges::max_element(memory->bytes_);
  ZS_ASSIGN_OR_RETURN(
      memory->window_,
      DeviceRange::Reserve(memory->device(), std::max(layout.window_bytes(), segment),
                           // What one unit gives back the next one takes: both of the largest kind.
                           {.segment_bytes = segment, .spare_segments = largest / segment + 2}));
  return memory;
}

absl::Status OwnMemory::Map(uint32_t unit) {
  if (mapped_[unit] != 0 || bytes_[unit] == 0) return absl::OkStatus();
  ZS_RETURN_IF_ERROR(window_.Map(offsets_[unit], bytes_[unit]));
  mapped_[unit] = 1;
  return absl::OkStatus();
}

absl::Status OwnMemory::Unmap(uint32_t unit) {
  if (mapped_[unit] == 0) return absl::OkStatus();
  ZS_RETURN_IF_ERROR(window_.Unmap(offsets_[unit], bytes_[unit]));
  mapped_[unit] = 0;
  return absl::OkStatus();
}

absl::Status OwnMemory::AddRing(uint64_t bytes) {
  ZS_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::Create(*device_, bytes));
  SlotRing slots(memory.bytes());
  rings_.push_back({std::move(slots), std::move(memory)});
  return absl::OkStatus();
}

void OwnMemory::ClearSlots() {
  for (Ring& ring : rings_) ring.slots = SlotRing(ring.memory.bytes());
}

}  // namespace zeroshard
