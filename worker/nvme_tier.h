// NvmeTier: one worker's states in files, moved in passes over a bounded ring
// of staging buffers.
//
// Owns the worker's extent files, its I/O queue, its staging memory and (in the
// server's region) the slot table. A pass (Run) reads images ahead, has the
// lanes verify and change them, and writes them behind, all at the same time.
// What a step wrote is not the state until the job has committed it:
//   Begin(attempt, step);  Run(items, work);  Seal();  ... the job commits ...
//   Commit(attempt)
// Errors leave the committed state as it is, and a pass may be run again:
// images that it completed are skipped. Format, protocol and what a death
// leaves: docs/nvme.md.
//
// Loop thread only; `work` is called on lanes, for several items at the same
// time.
#ifndef ZEROSHARD_WORKER_NVME_TIER_H_
#define ZEROSHARD_WORKER_NVME_TIER_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/nvme_plan.h"
#include "worker/tier_types.h"

namespace zeroshard {

class NvmeTier {
 public:
  using Work = TierWork;

  // Creates the files of a fresh tier (which reserves and writes them whole),
  // or adopts a predecessor's. `plan` must outlive this. Errors name the path:
  // those of AdmitNvmePath and ExtentFile; ResourceExhausted; DataLoss for a
  // table that is not this job's.
  static absl::StatusOr<std::unique_ptr<NvmeTier>> Open(const NvmePlan& plan,
                                                        NvmeTierOptions options);
  // What is there of a job whose region is lost, for NvmeTierOptions::resume; waits until its last
  // worker is gone. Changes nothing.
  static absl::StatusOr<TierRemains> Inspect(const NvmePlan& plan, const NvmeTierOptions& options);
  // Waits for what is in flight, at most a few seconds; memory that is then
  // still in use stays.
  ~NvmeTier();

  const NvmePlan& plan() const { return plan_; }

  // Staging memory of a tier with these options (config, pool).
  static uint64_t StagingBytes(const NvmePlan& plan, const NvmeTierOptions& options);

  // Whether the committed contents of the image are on this tier.
  bool Holds(uint32_t image) const;
  // Where it shall rest, as the job was told last; survives this process.
  bool AtHome(uint32_t image) const;
  void SetTarget(uint32_t image, NvmeTarget target);

  // Opens an attempt for writing. With the committed attempt, images are
  // current as soon as they are complete: for states that move to this tier.
  // `step` is that of the contents.
  absl::Status Begin(uint64_t attempt, uint64_t step);
  // Whether the open attempt has completed the image already.
  bool Prepared(uint32_t image) const;

  // Runs `work` over the items, in any order and each once, unless all that it
  // writes is prepared. Items name each image at most once. Returns the first
  // error, after everything in flight has ended or timed out: of an I/O
  // operation that was tried again in vain (with file and offset), DataLoss for
  // an image that is not what it should be, or that of `work` or `feed`, which may be null.
  absl::Status Run(std::span<const TierItem> items, Work work, TierFeed* feed = nullptr);

  // What the open attempt has prepared survives the loss of power afterwards
  // (durability power; nothing to do otherwise). `extra` is stored with it.
  // See ManifestState::revision.
  absl::Status Seal(const std::string& extra, uint64_t revision = 0);
  // Whether a step would begin with states of which there is no manifest: the committed attempt
  // must be opened and sealed first. Never without durability power.
  bool NeedsSeal(uint64_t revision) const;
  // Makes it the state.
  absl::Status Commit(uint64_t attempt);

  // The image is on the host now; its slots are free.
  absl::Status Forget(uint32_t image);

  // After Open with `resume`: what was sealed with the state; and that all was found right, so that
  // the job goes on from it. Before that nothing is written.
  const std::string& resumed_extra() const;
  absl::Status ConfirmResume();

  // Now and then: frees what a dead predecessor can no longer write to.
  void Tick();

  TierCounters counters() const;
  // "uring depth 32 ..., 24 buffers of 790528 bytes"; for logs.
  std::string description() const;

 private:
  class Impl;
  NvmeTier(const NvmePlan& plan, std::unique_ptr<Impl> impl);

  const NvmePlan& plan_;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_NVME_TIER_H_
