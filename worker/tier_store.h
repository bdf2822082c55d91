// TierStore: the files of one worker's NVMe tier and which of their slots hold what.
//
// Owns extent files, manifest and (in the server's region) the slot table, and keeps the protocol
// of docs/nvme.md; moves nothing itself. Loop thread only, except for the const methods that say
// otherwise.
#ifndef ZEROSHARD_WORKER_TIER_STORE_H_
#define ZEROSHARD_WORKER_TIER_STORE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/chunk_image.h"
#include "storage/extent_file.h"
#include "storage/nvme_manifest.h"
#include "storage/nvme_path.h"
#include "storage/slot_table.h"
#include "worker/tier_types.h"

namespace zeroshard {

// A slot, and the image that is in it or shall be.
struct TierPlace {
  uint32_t path = 0;
  uint64_t offset = 0;
  SlotImage image;
};

class TierStore {
 public:
  // As NvmeTier::Open. `plan` and `options` outlive this.
  static absl::StatusOr<std::unique_ptr<TierStore>> Open(const NvmePlan& plan,
                                                         const NvmeTierOptions& options);

  // See NvmeTier::Inspect.
  static absl::StatusOr<TierRemains> Inspect(const NvmePlan& plan, const NvmeTierOptions& options);

  const NvmePlan& plan() const { return plan_; }
  std::vector<int> fds() const;
  const std::string& file_name(uint32_t path) const { return files_[path].name(); }
  std::span<const std::string> warnings() const { return warnings_; }

  bool Holds(uint32_t image) const { return table_->Current(image).has_value(); }
  bool AtHome(uint32_t image) const;
  void SetTarget(uint32_t image, NvmeTarget target);

  absl::Status Begin(uint64_t attempt, uint64_t step);
  bool Prepared(uint32_t image) const { return table_->Prepared(image).has_value(); }

  // Where the committed image lies. FailedPrecondition for one that is not on this tier.
  absl::StatusOr<TierPlace> Locate(uint32_t image) const;
  // DataLoss unless `bytes` are the image of the place. Any thread.
  absl::Status Verify(uint32_t image, const TierPlace& place,
                      std::span<const std::byte> bytes) const;

  // A slot for an image of the open attempt: in flight until Complete, Release, Failed, or for
  // good. Unavailable when there is none now; CanWait says whether there may be later.
  absl::StatusOr<TierPlace> Reserve(uint32_t image);
  bool CanWait() const { return quarantined_; }
  // Makes `bytes` the image for the place, and returns what Complete is told. Any thread.
  SlotImage Encode(uint32_t image, const TierPlace& place, std::span<std::byte> bytes) const;
  absl::Status Complete(uint32_t image, const SlotImage& written);
  // Nothing was written to the slot, nor is.
  void Release(uint32_t slot) { table_->Release(slot); }
  // A write of the slot ended with an error: it is not used again, unless there is no other left.
  void Failed(uint32_t slot) { failed_slots_.insert(slot); }
  // What the slot held was not what it should be: it is not reserved again, unless there is no
  // other left.
  void Damaged(uint32_t slot) { damaged_slots_.insert(slot); }
  // Uses slots again whose writes failed; at the begin of a pass when no others are left.
  void ForgiveIfExhausted();

  // Whether the committed state has another manifest than it needs, or none.
  bool NeedsSeal(uint64_t revision) const;
  // `sync`: flushes all files.
  absl::Status Seal(absl::FunctionRef<absl::Status()> sync, const std::string& extra,
                    uint64_t revision);
  // What was committed with the state that was resumed; and that it is the job's from now on, which
  // is written to the manifest.
  const std::string& resumed_extra() const { return durable_->extra; }
  absl::Status ConfirmResume();
  absl::Status Commit(uint64_t attempt);
  absl::Status Forget(uint32_t image);

  void Tick();
  // The files' descriptors stay open until the process ends.
  void Abandon();

 private:
  TierStore(const NvmePlan& plan, const NvmeTierOptions& options)
      : plan_(plan), options_(options) {}

  ExtentIdentity IdentityOf(uint32_t path) const;
  ManifestIdentity ManifestIdentityOf() const;
  ImageIdentity ImageIdentityOf(uint32_t image, const TierPlace& place) const;
  bool power() const { return options_.config.durability() == model::v1::DURABILITY_POWER; }
  bool HasTable() const;
  // Reserves a slot that is neither damaged nor named by what is durable.
  absl::StatusOr<uint32_t> FindSlot(uint32_t image);
  std::atomic<uint64_t>& target(uint32_t image) const;

  absl::Status AdmitPaths();
  absl::Status CreateFresh();
  absl::Status Resume();
  absl::Status OpenManifest();
  absl::Status AwaitDrained();
  absl::Status AwaitUnused();
  bool IsWhole(const NvmeManifest& manifest) const;
  absl::Status Recover();
  absl::Status AdoptFiles();
  absl::Status AdoptManifest();
  NvmeManifest ManifestOfTable(const std::string& extra, uint64_t revision) const;
  // What is on disk for the committed state from now on.
  void SetDurable(NvmeManifest manifest);
  // Keeps an error after which the tier must not be used.
  absl::Status Final(absl::Status status);

  const NvmePlan& plan_;
  const NvmeTierOptions& options_;
  std::vector<NvmePath> paths_;
  std::vector<std::string> warnings_;
  std::vector<ExtentFile> files_;
  std::optional<SlotTable> table_;
  std::optional<ManifestFile> manifest_;
  std::optional<NvmeManifest> sealed_;   // on disk, of an attempt that is not committed
  std::optional<NvmeManifest> durable_;  // on disk, the newest of what was committed
  std::vector<bool> durable_slots_;      // that it names: not written before there is another
  absl::Status final_;
  bool open_ = false;
  uint64_t attempt_ = 0;
  uint64_t step_ = 0;
  bool quarantined_ = false;         // some slots are
  bool exhausted_ = false;           // Reserve found none but failed ones
  std::set<uint32_t> failed_slots_;  // their words are set
  std::set<uint32_t> damaged_slots_;
  std::vector<uint32_t> set_aside_;  // of them: reserved, their words are set
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_TIER_STORE_H_
