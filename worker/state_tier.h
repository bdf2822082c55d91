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

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "worker/chunk_tier.h"
#include "worker/job_memory.h"
#include "worker/nvme_tier.h"
#include "worker/partition_pages.h"

namespace zeroshard {

class StateTier final : public ChunkTier {
 public:
  // `memory` must outlive this.
  StateTier(const JobMemory& memory, std::unique_ptr<NvmeTier> tier);

  const NvmePlan& plan() const { return tier_->plan(); }
  bool Holds(uint32_t image) const override { return image != kNoImage && tier_->Holds(image); }
  bool AtHome(uint32_t image) const override { return image != kNoImage && tier_->AtHome(image); }
  void SetTarget(uint32_t image, NvmeTarget target) { tier_->SetTarget(image, target); }

  // Gives back memory of what is on the tier, which a predecessor may have left.
  absl::Status Recover();

  // What the board's committed attempt prepared is the state from now on; nothing to do when it is
  // already. All below do this first.
  absl::Status FollowCommit();
  // Opens an attempt for writing; when it is committed, `step` steps are. Nothing to do for the one
  // that is open.
  absl::Status Open(uint64_t attempt, uint64_t step);
  absl::Status Run(std::span<const TierItem> items, NvmeTier::Work work, TierFeed* feed = nullptr);
  // Durability `power`, see NvmeTier. Whether the committed state needs a manifest before a step
  // may begin: there is none yet, or something was put or restored since.
  bool NeedsSeal(uint64_t revision) const { return tier_->NeedsSeal(revision); }
  absl::Status SealCommitted(const std::string& extra, uint64_t revision);
  absl::Status Seal(const std::string& extra, uint64_t revision);
  const std::string& resumed_extra() const { return tier_->resumed_extra(); }
  absl::Status ConfirmResume() { return tier_->ConfirmResume(); }

  // Between two steps.
  absl::Status Promote(std::span<const uint32_t> images) override;
  absl::Status Discard(std::span<const uint32_t> images) override;
  absl::Status Demote(std::span<const uint32_t> images) override;
  absl::Status Read(std::span<const uint32_t> images, Reader reader) override;

  // An image that is damaged here gets contents anew: `fill` makes them in the partition, from
  // where they come here again. Not while a step is under way (FailedPrecondition).
  absl::Status Rebuild(uint32_t image, absl::FunctionRef<absl::Status()> fill);

  void Tick() { tier_->Tick(); }
  TierCounters counters() const {
    TierCounters counters = tier_->counters();
    counters.rebuilt_images = rebuilt_images_;
    return counters;
  }

 private:
  static constexpr uint64_t kNothing = ~uint64_t{0};

  // Opens the committed attempt, for what moves between two steps.
  absl::Status BeginCommitted();
  void Punch(uint32_t image) const;

  const JobMemory& memory_;
  std::unique_ptr<NvmeTier> tier_;
  const PartitionPages pages_;
  uint64_t committed_ = kNothing;  // the last attempt that the tier was told of
  uint64_t open_ = kNothing;
  uint64_t rebuilt_images_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_STATE_TIER_H_
