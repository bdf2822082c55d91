// ExtentPlan: where each slot of one worker's NVMe tier lies, in which file and at which offset.
//
// A pure value computed from the sizes of the chunk images and the weights of the paths, the same
// in every process that computes it; processes compare `fingerprint()`. Immutable; any thread may
// read it. Format page: docs/nvme.md.
//
// Slots 2k and 2k + 1 are the home slots of chunk k, next to each other on one path; the rest are
// spares, `spares_per_path` on each path in order of paths, each as large as the largest image.
// Chunks are dealt to paths so that in any run of chunks from the first on, each path has its share
// of the bytes to within one chunk.
#ifndef ZEROSHARD_STORAGE_EXTENT_PLAN_H_
#define ZEROSHARD_STORAGE_EXTENT_PLAN_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

namespace zeroshard {

// The superblock comes before the first slot.
inline constexpr uint64_t kExtentFirstSlot = 4096;
inline constexpr uint32_t kMaxExtentPaths = 64;
inline constexpr uint64_t kMaxPathWeight = uint64_t{1} << 48;
inline constexpr uint32_t kMaxSlotChunks = 1u << 30;
inline constexpr uint64_t kMaxExtentBytes = uint64_t{1} << 60;

struct SlotPlace {
  uint32_t path = 0;
  uint64_t offset = 0;  // in the path's extent file
  uint64_t bytes = 0;   // room
  friend bool operator==(const SlotPlace&, const SlotPlace&) = default;
};

class ExtentPlan {
 public:
  // `image_bytes` of each chunk, multiples of 4096; 0 for one with nothing to store, whose slots
  // have no room. `weights` of each path, bytes/s in any unit.
  // InvalidArgument: no chunk or no path, too many, a weight of 0 or above kMaxPathWeight, sizes
  // that are no multiples or too large together.
  static absl::StatusOr<ExtentPlan> Create(std::span<const uint64_t> image_bytes,
                                           std::span<const uint64_t> weights,
                                           uint32_t spares_per_path);

  uint32_t chunks() const { return chunks_; }
  uint32_t paths() const { return static_cast<uint32_t>(file_bytes_.size()); }
  uint32_t slots() const { return static_cast<uint32_t>(slots_.size()); }
  const SlotPlace& slot(uint32_t slot) const { return slots_[slot]; }
  // Of a chunk's home slots.
  uint32_t path_of(uint32_t chunk) const { return slots_[size_t{2} * chunk].path; }

  // Length of a path's extent file, and of all.
  uint64_t file_bytes(uint32_t path) const { return file_bytes_[path]; }
  uint64_t total_bytes() const;
  // Bytes of one image of each chunk on a path: what a step reads there, and writes.
  uint64_t step_bytes(uint32_t path) const { return step_bytes_[path]; }

  // xxh3 over all that the plan is made of.
  uint64_t fingerprint() const { return fingerprint_; }

 private:
  ExtentPlan() = default;
  // The path that gets the next image of `bytes`.
  uint32_t Deal(uint64_t bytes, std::span<const uint64_t> weights) const;
  void PlaceSlot(uint32_t path, uint64_t bytes);

  uint32_t chunks_ = 0;
  std::vector<SlotPlace> slots_;
  std::vector<uint64_t> file_bytes_;
  std::vector<uint64_t> step_bytes_;
  uint64_t fingerprint_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_EXTENT_PLAN_H_
