// ChunkTier: a place beside the partition where images of a worker's chunks can be: files of the
// NVMe tier (worker/state_tier.h), memory of a GPU (worker/device_shard.h).
//
// An image is in at most one tier, else in the partition. Promote and Demote change that between
// two steps; a step updates an image where it is. A death in the middle leaves the image in both
// places, and the tier counts. Loop thread only.
#ifndef ZEROSHARD_WORKER_CHUNK_TIER_H_
#define ZEROSHARD_WORKER_CHUNK_TIER_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace zeroshard {

class ChunkTier {
 public:
  // An image's bytes; its arrays lie at ChunkShape::offset from `image` on. May be called on lanes,
  // for several images at the same time.
  using Reader = absl::FunctionRef<absl::Status(uint32_t image, std::byte* bytes)>;

  virtual ~ChunkTier() = default;

  virtual bool Holds(uint32_t image) const = 0;
  // Whether the image shall rest here.
  virtual bool AtHome(uint32_t image) const = 0;

  // The images' contents are in the partition afterwards; those that are there already stay.
  virtual absl::Status Promote(std::span<const uint32_t> images) = 0;
  // The same without their contents, which will be written anew.
  virtual absl::Status Discard(std::span<const uint32_t> images) = 0;
  // The images' contents, which are in the partition, are here afterwards, and their memory is
  // given back; those that are here already stay.
  virtual absl::Status Demote(std::span<const uint32_t> images) = 0;
  // Calls `reader` with each of the images, all of which are here, in any order.
  virtual absl::Status Read(std::span<const uint32_t> images, Reader reader) = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_CHUNK_TIER_H_
