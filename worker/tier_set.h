// TierSet: the tiers of one worker's partition, and where each image is and shall rest.
//
// Images 0 to chunks - 1 are the states of the partition's chunks, in every tier by the same
// numbers (a tier in which no states can be has no room for these); after them come parameter
// images of the NVMe tier. Where an image shall rest is its one home tier, or the host. Parameters
// at rest on a GPU are no images: all of them are there, always.
//
// Owned by the engine; loop thread only.
#ifndef ZEROSHARD_WORKER_TIER_SET_H_
#define ZEROSHARD_WORKER_TIER_SET_H_

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "proto/model.pb.h"
#include "worker/chunk_tier.h"
#include "worker/device_shard.h"
#include "worker/job_memory.h"
#include "worker/state_tier.h"

namespace zeroshard {

struct TierImage {
  uint32_t unit = 0;
  uint64_t begin = 0;     // first element within the unit
  uint64_t elements = 0;  // 0: it is never in a tier
  bool parameters = false;
};

class TierSet {
 public:
  // Either may be null. `memory` must outlive this.
  TierSet(const JobMemory& memory, std::unique_ptr<StateTier> nvme,
          std::unique_ptr<DeviceShard> device);

  StateTier* nvme() const { return nvme_.get(); }
  DeviceShard* device() const { return device_.get(); }
  bool empty() const { return tiers_.empty(); }

  std::span<const TierImage> images() const { return images_; }
  const ChunkShape& shape(uint32_t image) const;
  // Bytes of an image's arrays.
  uint64_t BytesOf(uint32_t image) const { return shape(image).payload_bytes(); }

  // The tier that holds the image, or shall; null: the partition.
  ChunkTier* HolderOf(uint32_t image) const;
  ChunkTier* HomeOf(uint32_t image) const;
  bool Holds(uint32_t image) const { return HolderOf(image) != nullptr; }
  void SetTarget(uint32_t image, model::v1::Tier target);

  // To the partition, with or without their contents; from wherever they are.
  absl::Status Promote(std::span<const uint32_t> images);
  absl::Status Discard(std::span<const uint32_t> images);
  // Those that are in the partition and have a home tier go there, if there is room.
  absl::Status Settle(std::span<const uint32_t> images);
  // All that are elsewhere go home. ResourceExhausted where there is no room.
  absl::Status Move(std::span<const uint32_t> images);
  // All must be in a tier.
  absl::Status Read(std::span<const uint32_t> images, ChunkTier::Reader reader);

  // The state images, or the parameter images, that have elements of [begin, end) of the unit.
  std::vector<uint32_t> StateImages(uint32_t unit, uint64_t begin, uint64_t end) const;
  std::vector<uint32_t> ParameterImages(uint32_t unit, uint64_t begin, uint64_t end) const;

  // Bytes of the images' arrays that a tier holds.
  uint64_t HeldBytes(const ChunkTier& tier) const;

 private:
  std::vector<uint32_t> HeldBy(const ChunkTier& tier, std::span<const uint32_t> images) const;

  const JobMemory& memory_;
  std::unique_ptr<StateTier> nvme_;
  std::unique_ptr<DeviceShard> device_;
  std::vector<ChunkTier*> tiers_;
  std::vector<TierImage> images_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_TIER_SET_H_
