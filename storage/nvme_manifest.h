// The manifest of one worker's NVMe tier on disk: what the slot table says after a committed step,
// for `durability: power`. Two copies in one small file, so that the committed one is whole at
// every moment. Format and rules: docs/nvme.md.
//
// One step: all images written and their files flushed; Prepare(manifest of the step); the job
// commits; Committed(). The worker died: Open, Adopt. The region is gone: Open; every worker's
// copies() to ChooseState; Resume(choice, new generation), before anything is written to a slot.
#ifndef ZEROSHARD_STORAGE_NVME_MANIFEST_H_
#define ZEROSHARD_STORAGE_NVME_MANIFEST_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "storage/slot_table.h"

namespace zeroshard {

inline constexpr uint64_t kMaxManifestExtra = uint64_t{16} << 20;
// The slot of a chunk that has no image.
inline constexpr uint32_t kNoSlot = ~uint32_t{0};

// What every manifest of a worker agrees on.
struct ManifestIdentity {
  uint64_t job_id = 0;
  uint64_t layout_fingerprint = 0;
  uint64_t plan_fingerprint = 0;
  uint32_t worker = 0;
  uint32_t chunks = 0;
  uint64_t max_extra = 0;  // room for NvmeManifest::extra, at most kMaxManifestExtra
};

struct NvmeManifest {
  uint64_t sequence = 0;  // set by ManifestFile
  uint64_t generation = 0;
  uint64_t attempt = 0;
  uint64_t step = 0;
  uint64_t revision = 0;          // of the state, see ManifestState
  std::vector<SlotImage> images;  // one a chunk
  std::string extra;              // opaque: what is committed with the step
  friend bool operator==(const NvmeManifest&, const NvmeManifest&) = default;
};

// Bytes of one copy, a multiple of 4096.
uint64_t ManifestCopyBytes(const ManifestIdentity& identity);

// Exactly ManifestCopyBytes. InvalidArgument when the manifest does not fit the identity.
absl::StatusOr<std::string> EncodeManifest(const ManifestIdentity& identity,
                                           const NvmeManifest& manifest);
// DataLoss naming `file` and `offset` for a copy that is torn, flipped or of something else.
absl::StatusOr<NvmeManifest> DecodeManifest(std::string_view copy, const ManifestIdentity& identity,
                                            const std::string& file, uint64_t offset);

// A state that a worker can resume at.
struct ManifestState {
  uint64_t step = 0;
  uint64_t attempt = 0;
  // Tells states of one attempt apart that differ by what was put between its step and the next.
  uint64_t revision = 0;
  friend auto operator<=>(const ManifestState&, const ManifestState&) = default;
};

// The newest state that all workers have; DataLoss, with what each has, when there is none.
absl::StatusOr<ManifestState> ChooseState(std::span<const std::vector<ManifestState>> workers);

// Not thread-safe. Errors of writes and flushes are final: use the object no more.
class ManifestFile {
 public:
  // Makes the file beneath the directory, with room for both copies; AlreadyExists when it is
  // there. Nothing is committed: the first manifest needs Prepare and Committed.
  static absl::StatusOr<ManifestFile> Create(int dir_fd, const std::string& name,
                                             const ManifestIdentity& identity);
  // DataLoss when the length is wrong. Copies that are not whole are left out; see problem().
  static absl::StatusOr<ManifestFile> Open(int dir_fd, const std::string& name,
                                           const ManifestIdentity& identity);

  // Whole copies as Open found them, the newer one first; and their states.
  std::span<const NvmeManifest> copies() const { return found_; }
  std::vector<ManifestState> states() const;
  // What was wrong with the copies that were left out; OK when both are there or were never used.
  const absl::Status& problem() const { return problem_; }
  // Neither copy was ever written.
  bool unused() const { return found_.empty() && problem_.ok(); }

  // The copy of that state, null when there is none.
  const NvmeManifest* CopyOf(const ManifestState& state) const;

  // Goes on from the copy of that state: writes it under the new generation to the other copy, and
  // flushes. From then on no other state that Open found can be chosen. NotFound when there is no
  // such copy. Returns the manifest.
  absl::StatusOr<NvmeManifest> Resume(const ManifestState& state, uint64_t generation);

  // Goes on after the death of a process while the region lives: `committed` is the board's state.
  // Flushes what the dead process wrote, and changes nothing; when states() then has that of the
  // attempt in flight, it was prepared, and must not be prepared again: the job may be committing
  // it. DataLoss when the committed copy is not whole.
  absl::Status Adopt(const ManifestState& committed);

  // Writes to the copy that is not the committed one, and flushes. All that the manifest names must
  // be flushed. FailedPrecondition before Resume or Adopt when Open found something.
  absl::Status Prepare(NvmeManifest manifest);
  // The job has dropped the attempt that was prepared: replaces its manifest by the committed one,
  // and flushes. Before that no slot that it names may be written to.
  absl::Status Revoke();
  // The job has committed what Prepare wrote last.
  void Committed() { committed_copy_ = 1 - committed_copy_; }

 private:
  ManifestFile() = default;
  static ManifestState StateOf(const NvmeManifest& manifest) {
    return {manifest.step, manifest.attempt, manifest.revision};
  }
  absl::StatusOr<std::string> ReadCopy(uint32_t copy) const;
  absl::Status WriteCopy(uint32_t copy, const NvmeManifest& manifest);
  // Index into found_ of a state, or nothing.
  std::optional<size_t> Find(const ManifestState& state) const;

  UniqueFd fd_;
  std::string path_;  // for messages
  ManifestIdentity identity_;
  std::vector<NvmeManifest> found_;
  std::vector<uint32_t> found_copy_;
  absl::Status problem_;
  uint64_t sequence_ = 0;
  uint32_t committed_copy_ = 1;
  bool resumed_ = false;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_NVME_MANIFEST_H_
