// StateTier: what of a worker's partition is on the NVMe tier, and how it gets there and back.
//
// A chunk image whose committed contents are on the tier (Holds) has given the pages of its arrays
// in the partition back; every other one is in the partition. Promote and Demote change that, a
// step does not: it updates a chunk where it is. All of it may be done again by a successor of a
// killed process, which first calls Recover. What moves between two steps is part of the committed
// attempt, so nothing may be moved while a step is decided and not committed (docs/nvme.md).
//
// Owned by the engine; loop thread only.
#ifndef ZEROSHARD_WORKER_STATE_TIER_H_
#define ZEROSHARD_WORKER_STATE_TIER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "worker/job_memory.h"
#include "worker/nvme_tier.h"

namespace zeroshard {

class StateTier {
 public:
  // `memory` must outlive this.
  StateTier(const JobMemory& memory, std::unique_ptr<NvmeTier> tier);

  const NvmePlan& plan() const { return tier_->plan(); }
  bool Holds(uint32_t image) const { return image != kNoImage && tier_->Holds(image); }
  // Whether the image shall rest on the tier.
  bool AtHome(uint32_t image) const { return image != kNoImage && tier_->AtHome(image); }
  void SetTarget(uint32_t image, NvmeTarget target) { tier_->SetTarget(image, target); }

  // Gives back memory of what is on the tier, which a predecessor may have left.
  absl::Status Recover();

  // What the board's committed attempt prepared is the state from now on; nothing to do when it is
  // already. All below do this first.
  absl::Status FollowCommit();
  // Opens an attempt for writing; when it is committed, `step` steps are. Nothing to do for the one
  // that is open.
  absl::Status Open(uint64_t attempt, uint64_t step);
  absl::Status Run(std::span<const TierItem> items, NvmeTier::Work work);
  // Durability `power`, see NvmeTier. Whether the committed state needs a manifest before a step
  // may begin: there is none yet, or something was put or restored since.
  bool NeedsSeal(uint64_t revision) const { return tier_->NeedsSeal(revision); }
  absl::Status SealCommitted(const std::string& extra, uint64_t revision);
  absl::Status Seal(const std::string& extra, uint64_t revision);
  const std::string& resumed_extra() const { return tier_->resumed_extra(); }
  absl::Status ConfirmResume() { return tier_->ConfirmResume(); }

  // Between two steps. The images' contents are in the partition afterwards; those that are there
  // already stay.
  absl::Status Promote(std::span<const uint32_t> images);
  // The same without their contents, which will be written anew: no need to read them.
  absl::Status Discard(std::span<const uint32_t> images);
  // The images' contents are on the tier afterwards, and their memory is given back.
  absl::Status Demote(std::span<const uint32_t> images);

  // The state images [first, end) of chunks of `unit` that have elements of [begin, end), or
  // likewise its parameter images; those without room on the tier left out.
  std::vector<uint32_t> StateImages(uint32_t unit, uint64_t begin, uint64_t end) const;
  std::vector<uint32_t> ParameterImages(uint32_t unit, uint64_t begin, uint64_t end) const;

  // Bytes of an image's arrays.
  uint64_t BytesOf(uint32_t image) const { return tier_->plan().shape(image).payload_bytes(); }
  // Of all that are on the tier.
  uint64_t HeldBytes() const;

  void Tick() { tier_->Tick(); }
  TierCounters counters() const { return tier_->counters(); }

 private:
  static constexpr uint64_t kNothing = ~uint64_t{0};

  // Opens the committed attempt, for what moves between two steps.
  absl::Status BeginCommitted();
  void Punch(uint32_t image) const;
  void PunchArray(uint32_t image, size_t array) const;
  absl::Status Reserve(uint32_t image) const;

  const JobMemory& memory_;
  std::unique_ptr<NvmeTier> tier_;
  uint64_t committed_ = kNothing;  // the last attempt that the tier was told of
  uint64_t open_ = kNothing;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_STATE_TIER_H_
