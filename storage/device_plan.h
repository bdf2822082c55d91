// DevicePlan: where everything lies in one worker's device memory, in a job with a data plane.
//
// A pure value, computed from layout, partition plan and configuration by the server (which counts
// it), the worker (which makes and fills it) and the rank's data plane (which sums into it) alike;
// immutable, any thread may read it. Format page: docs/device.md.
//
// Images are numbered as the partition's chunks; their arrays lie in a slot as in the payload of an
// image of the NVMe tier.
#ifndef ZEROSHARD_STORAGE_DEVICE_PLAN_H_
#define ZEROSHARD_STORAGE_DEVICE_PLAN_H_

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/model.pb.h"
#include "storage/chunk_arrays.h"
#include "storage/chunk_image.h"
#include "storage/layout.h"
#include "storage/partition.h"

namespace zeroshard {

// Sizes of device memory are multiples of this.
inline constexpr uint64_t kDevicePage = uint64_t{2} << 20;
// Parts of units begin at multiples of this, so that copies and vector loads are aligned.
inline constexpr uint64_t kDeviceAlignment = 256;
// Free slots of a class beside those of its images, for updates in flight: so many, and no more
// than so many bytes but one.
inline constexpr uint32_t kDeviceSpares = 32;
inline constexpr uint64_t kDeviceSpareBytes = uint64_t{64} << 20;
inline constexpr uint32_t kMaxDeviceClasses = 6;
// Grains whose squares are taken at a time.
inline constexpr uint64_t kDeviceSquares = 8 * 1024;

// One unit in DEVICE_SHARED: byte offsets.
struct DeviceUnit {
  // Of the first element of the worker's slice (UnitPlan::slice); kAbsent without an optimizer.
  uint64_t accumulator = kAbsent;
  uint64_t presence = 0;  // kPresenceWords words
  // Of the first element of the worker's shard (UnitPlan::shard); kAbsent where it rests elsewhere.
  uint64_t parameters = kAbsent;
};

// Slots of one size, one after the other.
struct DeviceSlotClass {
  uint64_t bytes = 0;   // of a slot
  uint64_t offset = 0;  // of the first one in DEVICE_STATES
  uint32_t first = 0;   // its number
  uint32_t slots = 0;
};

// The states of one chunk.
struct DeviceImage {
  uint32_t unit = 0;
  uint64_t begin = 0;     // first element within the unit
  uint64_t elements = 0;  // 0: there is nothing to hold
  uint32_t slot_class = 0;
  bool home = false;  // rests on the device unless somebody moves it
  // Where its arrays lie in the partition region while it is on the host.
  std::vector<PartitionArray> arrays = {};
};

// Memory of a worker process on the host, through which gradients and new parameters go of chunks
// that are computed there: three parcels a lane (one that is computed, one that comes, one that
// goes), more where they are small, and no more than there are chunks.
struct DeviceRing {
  uint64_t parcels = 0;
  uint64_t gradient_bytes = 0;  // room in a parcel, before the parameters
  uint64_t parcel_bytes = 0;    // a multiple of 4096
  uint64_t bytes() const { return parcels * parcel_bytes; }
};
DeviceRing DeviceRingOf(const Layout& layout, const PartitionPlan& partition,
                        const model::v1::EngineConfig& config, uint32_t lanes);

class DevicePlan {
 public:
  // Whether a job with this configuration has one.
  static bool Exists(const model::v1::EngineConfig& config) { return config.data_plane(); }

  // InvalidArgument for a configuration that no data plane can work with: stage 0, not tiered,
  // some units that rest in a window.
  static absl::StatusOr<DevicePlan> Create(const Layout& layout, const PartitionPlan& partition,
                                           const model::v1::EngineConfig& config);

  const DeviceUnit& unit(uint32_t unit) const { return units_[unit]; }
  uint64_t shared_bytes() const { return shared_bytes_; }  // a multiple of kDevicePage

  std::span<const DeviceImage> images() const { return images_; }
  std::span<const DeviceSlotClass> classes() const { return classes_; }
  uint32_t slots() const;
  const DeviceSlotClass& class_of_slot(uint32_t slot) const;
  // Of a slot, in DEVICE_STATES.
  uint64_t slot_offset(uint32_t slot) const;
  // Of array `array` of an image with elements, in its slot; a multiple of 64.
  uint64_t array_offset(uint32_t image, size_t array) const {
    return shapes_[image]->offset(array) - kImageHeaderBytes;
  }
  // Bytes of an image in a slot, its arrays and what lies between them.
  uint64_t image_bytes(uint32_t image) const {
    return images_[image].elements == 0 ? 0 : shapes_[image]->image_bytes() - kImageHeaderBytes;
  }
  const ChunkShape& shape(uint32_t image) const { return *shapes_[image]; }
  uint64_t states_bytes() const { return states_bytes_; }  // a multiple of kDevicePage

  // In DEVICE_STATES, of a pass: a table of two u64 a parameter for each unit, presence words of
  // each unit, and twice kDeviceSquares fp64 numbers.
  uint64_t parameter_table(uint32_t unit) const { return parameter_tables_[unit]; }
  uint64_t presence(uint32_t unit) const;
  uint64_t squares() const { return squares_; }

  uint64_t table_bytes() const;  // of DEVICE_TABLE, a multiple of 4096
  uint64_t fingerprint() const { return fingerprint_; }

  // Bytes of the arrays of all images at home on the device.
  uint64_t home_bytes() const;
  // Bytes of partition memory that they do not take: the whole pages of each of their arrays.
  uint64_t unbacked_bytes() const;

 private:
  DevicePlan() = default;
  void PlaceShared(const Layout& layout, const PartitionPlan& partition, uint64_t accumulator_bytes,
                   bool parameters);
  absl::Status PlanImages(const Layout& layout, const PartitionPlan& partition,
                          const model::v1::EngineConfig& config);
  void PlaceStates(const Layout& layout);

  std::vector<DeviceUnit> units_;
  std::vector<DeviceImage> images_;
  std::vector<std::optional<ChunkShape>> shapes_;
  std::vector<DeviceSlotClass> classes_;
  std::vector<uint64_t> parameter_tables_;
  uint64_t presence_ = 0;
  uint64_t squares_ = 0;
  uint64_t shared_bytes_ = 0;
  uint64_t states_bytes_ = 0;
  uint64_t fingerprint_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_DEVICE_PLAN_H_
