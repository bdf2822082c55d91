#include "storage/device_plan.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "base/checksum.h"
#include "base/dtype.h"
#include "base/status.h"
#include "storage/bytes.h"
#include "storage/layout_proto.h"

namespace zeroshard {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kTableHeader = 128;
constexpr uint64_t kPresenceBytes = kMaxUnitParameters / 8;

// Whether the `index`-th of many belongs to a fraction of them, spread evenly.
bool InFraction(uint32_t index, double fraction) {
  return std::floor((index + 1.0) * fraction) > std::floor(index * fraction);
}

// Whether the states of the chunk rest on the device.
bool AtHome(const model::v1::EngineConfig& config, uint32_t chunk) {
  if (config.optimizer_tier() == model::v1::TIER_GPU) return true;
  const double elsewhere = config.optimizer_ratio() == 0 ? 1.0 : config.optimizer_ratio();
  return !InFraction(chunk, elsewhere);
}

absl::Status CheckConfig(const Layout& layout, const PartitionPlan& partition,
                         const model::v1::EngineConfig& config) {
  if (!config.data_plane() || config.stage() == 0 || !config.tiered()) {
    return absl::InvalidArgumentError(
        "device memory is of jobs with a data plane: tiered, stage 1, 2 or 3");
  }
  for (uint32_t u = 0; u < layout.units().size(); ++u) {
    if (partition.unit(u).resident && HasDeviceParameters(config)) {
      return absl::InvalidArgumentError("a unit rests in a window of the host");
    }
  }
  return absl::OkStatus();
}

// Of the ring; it is larger where lanes need it.
constexpr uint64_t kRingBytes = uint64_t{256} << 20;
constexpr uint64_t kLeastParcelsOfLane = 3;
constexpr uint64_t kMostParcelsOfLane = 12;
constexpr uint64_t kRingAlignment = 4096;

}  // namespace

DeviceRing DeviceRingOf(const Layout& layout, const PartitionPlan& partition,
                        const model::v1::EngineConfig& config, uint32_t lanes) {
  const auto accumulator = DTypeFromProto(config.accumulator_dtype());
  const uint64_t element_bytes = accumulator.ok() ? SizeOf(*accumulator) : sizeof(float);
  DeviceRing ring;
  uint64_t parameters = 0;
  for (const ChunkPlan& chunk : partition.chunks()) {
    ring.gradient_bytes = std::max(ring.gradient_bytes, chunk.elements * element_bytes);
    if (HasHostParameters(config)) continue;
    parameters = std::max(parameters, chunk.elements * SizeOf(layout.units()[chunk.unit].dtype));
  }
  ring.gradient_bytes = RoundUpTo(ring.gradient_bytes, kRingAlignment);
  ring.parcel_bytes = ring.gradient_bytes + RoundUpTo(parameters, kRingAlignment);
  if (ring.parcel_bytes == 0) return ring;
  const uint64_t wanted = std::max<uint64_t>(
      kLeastParcelsOfLane * lanes,
      std::min<uint64_t>(kMostParcelsOfLane * lanes, kRingBytes / ring.parcel_bytes));
  ring.parcels = std::min<uint64_t>(partition.chunks().size(), wanted);
  return ring;
}

absl::StatusOr<DevicePlan> DevicePlan::Create(const Layout& layout, const PartitionPlan& partition,
                                              const model::v1::EngineConfig& config) {
  ZS_RETURN_IF_ERROR(CheckConfig(layout, partition, config));
  ZS_ASSIGN_OR_RETURN(const DType accumulator, DTypeFromProto(config.accumulator_dtype()));
  DevicePlan plan;
  plan.PlaceShared(layout, partition, SizeOf(accumulator), HasDeviceParameters(config));
  ZS_RETURN_IF_ERROR(plan.PlanImages(layout, partition, config));
  plan.PlaceStates(layout);
  std::string all;
  for (const uint64_t number : {plan.shared_bytes_, plan.states_bytes_, plan.squares_}) {
    AppendInteger(all, number);
  }
  for (const DeviceSlotClass& slots : plan.classes_) {
    AppendInteger(all, slots.bytes);
    AppendInteger(all, slots.slots);
  }
  for (const DeviceImage& image : plan.images_) {
    AppendInteger(all, image.elements);
    AppendInteger(all, image.slot_class);
  }
  plan.fingerprint_ = Xxh3_64(all);
  return plan;
}

void DevicePlan::PlaceShared(const Layout& layout, const PartitionPlan& partition,
                             uint64_t accumulator_bytes, bool parameters) {
  uint64_t offset = 0;
  const auto place = [&](uint64_t bytes) {
    const uint64_t at = offset;
    offset = RoundUpTo(offset + bytes, kDeviceAlignment);
    return at;
  };
  units_.resize(layout.units().size());
  for (uint32_t u = 0; u < units_.size(); ++u) {
    const UnitPlan& unit = partition.unit(u);
    if (!unit.has_optimizer) continue;
    units_[u].accumulator = place(unit.slice.elements() * accumulator_bytes);
  }
  for (uint32_t u = 0; u < units_.size(); ++u) {
    units_[u].presence = offset + u * kPresenceBytes;
  }
  place(units_.size() * kPresenceBytes);
  for (uint32_t u = 0; parameters && u < units_.size(); ++u) {
    units_[u].parameters =
        place(partition.unit(u).shard.elements() * SizeOf(layout.units()[u].dtype));
  }
  shared_bytes_ = RoundUpTo(std::max<uint64_t>(offset, 1), kDevicePage);
}

absl::Status DevicePlan::PlanImages(const Layout& layout, const PartitionPlan& partition,
                                    const model::v1::EngineConfig& config) {
  uint64_t largest = 0;
  for (uint32_t chunk = 0; chunk < partition.chunks().size(); ++chunk) {
    const ChunkPlan& part = partition.chunks()[chunk];
    DeviceImage image{.unit = part.unit, .begin = part.begin, .elements = part.elements};
    image.arrays = ChunkArraysOf(layout, partition, chunk);
    shapes_.emplace_back();
    if (image.arrays.empty()) {
      image.elements = 0;
    } else {
      std::vector<ChunkArray> arrays;
      for (const PartitionArray& array : image.arrays) arrays.push_back(array.array);
      ZS_ASSIGN_OR_RETURN(shapes_.back(), ChunkShape::Create(arrays));
      image.home = AtHome(config, chunk);
      largest = std::max(largest, shapes_.back()->image_bytes() - kImageHeaderBytes);
    }
    images_.push_back(std::move(image));
  }
  for (uint64_t bytes = largest; bytes > 0 && classes_.size() < kMaxDeviceClasses;) {
    classes_.push_back({.bytes = bytes});
    const uint64_t half = RoundUpTo(bytes / 2, kPage);
    if (half == bytes) break;
    bytes = half;
  }
  for (uint32_t image = 0; image < images_.size(); ++image) {
    DeviceImage& planned = images_[image];
    while (planned.elements > 0 && planned.slot_class + 1 < classes_.size() &&
           classes_[planned.slot_class + 1].bytes >= image_bytes(image)) {
      ++planned.slot_class;
    }
    if (planned.home) ++classes_[planned.slot_class].slots;
  }
  return absl::OkStatus();
}

void DevicePlan::PlaceStates(const Layout& layout) {
  uint64_t offset = 0;
  uint32_t first = 0;
  for (DeviceSlotClass& slots : classes_) {
    slots.offset = offset;
    slots.first = first;
    slots.slots += std::min({slots.slots, kDeviceSpares,
                             std::max(1u, static_cast<uint32_t>(kDeviceSpareBytes / slots.bytes))});
    offset += slots.bytes * slots.slots;
    first += slots.slots;
  }
  for (const Unit& unit : layout.units()) {
    parameter_tables_.push_back(offset);
    offset = RoundUpTo(offset + unit.parameters.size() * 2 * sizeof(uint64_t), kDeviceAlignment);
  }
  presence_ = offset;
  offset = RoundUpTo(offset + units_.size() * kPresenceBytes, kDeviceAlignment);
  squares_ = offset;
  offset += 2 * kDeviceSquares * sizeof(double);
  states_bytes_ = RoundUpTo(offset, kDevicePage);
}

uint32_t DevicePlan::slots() const {
  return classes_.empty() ? 0 : classes_.back().first + classes_.back().slots;
}

const DeviceSlotClass& DevicePlan::class_of_slot(uint32_t slot) const {
  return *std::find_if(classes_.begin(), classes_.end(), [&](const DeviceSlotClass& slots) {
    return slot < slots.first + slots.slots;
  });
}

uint64_t DevicePlan::slot_offset(uint32_t slot) const {
  const DeviceSlotClass& slots = class_of_slot(slot);
  return slots.offset + (slot - slots.first) * slots.bytes;
}

uint64_t DevicePlan::presence(uint32_t unit) const { return presence_ + unit * kPresenceBytes; }

uint64_t DevicePlan::table_bytes() const {
  return RoundUpTo(kTableHeader + 2 * images_.size() * sizeof(uint64_t), kPage);
}

uint64_t DevicePlan::home_bytes() const {
  uint64_t bytes = 0;
  for (const DeviceImage& image : images_) {
    if (!image.home) continue;
    for (const PartitionArray& array : image.arrays) bytes += array.array.bytes;
  }
  return bytes;
}

uint64_t DevicePlan::unbacked_bytes() const {
  uint64_t bytes = 0;
  for (const DeviceImage& image : images_) {
    if (!image.home) continue;
    for (const PartitionArray& array : image.arrays) {
      const uint64_t begin = RoundUpTo(array.offset, kPage);
      const uint64_t end = (array.offset + array.array.bytes) / kPage * kPage;
      bytes += end > begin ? end - begin : 0;
    }
  }
  return bytes;
}

}  // namespace zeroshard
