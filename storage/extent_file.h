// ExtentFile: the slots of one (job, worker, path), one preallocated file.
//
// The server sees to it that there is room when a job attaches; each worker creates its own files
// at its first start, and adopts them under the generation of its slot table. Format and the
// argument for draining: docs/nvme.md. Transfers are the caller's: fd() with memory, offsets and
// lengths aligned to 4096.
//
// One object, one thread; fd() may be shared. Fault points: those of storage/file_io.h.
#ifndef ZEROSHARD_STORAGE_EXTENT_FILE_H_
#define ZEROSHARD_STORAGE_EXTENT_FILE_H_

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "storage/nvme_path.h"

namespace zeroshard {

// What an extent file is; all of it must agree on adoption.
struct ExtentIdentity {
  uint64_t job_id = 0;
  uint64_t layout_fingerprint = 0;
  uint64_t plan_fingerprint = 0;  // of the ExtentPlan
  uint32_t worker = 0;
  uint32_t path = 0;        // index of the path in the plan
  uint64_t file_bytes = 0;  // ExtentPlan::file_bytes(path)
  friend bool operator==(const ExtentIdentity&, const ExtentIdentity&) = default;
};

// "job-00000000000004d2.w3.p0.extent", "job-00000000000004d2.w3.manifest".
std::string ExtentFileName(uint64_t job_id, uint32_t worker, uint32_t path);
std::string ManifestFileName(uint64_t job_id, uint32_t worker);

class ExtentFile {
 public:
  // Reserves the space, writes all of it once, and gives the file its name when that is on disk.
  // ResourceExhausted with the bytes needed and free; AlreadyExists. Nothing is left of a file that
  // failed. `progress` is called now and then while the file is written.
  static absl::Status Create(
      const NvmePath& path, const ExtentIdentity& identity,
      absl::FunctionRef<void()> progress = [] {});
  // Removes what a worker left that died before it used its file: the file, whole or not. For one
  // that its slot table says nothing of. FailedPrecondition when a process uses it.
  static absl::Status RemoveUnused(const NvmePath& path, const ExtentIdentity& identity);

  // Opens the file for transfers of `generation` (above 0), and locks it. NotFound;
  // FailedPrecondition when another process uses it or it belongs to another layout or plan;
  // DataLoss when its superblock or length is damaged.
  static absl::StatusOr<ExtentFile> Adopt(const NvmePath& path, const ExtentIdentity& identity,
                                          uint64_t generation);

  // Gives the descriptor of transfers up for good: it stays open, and its generation undrained,
  // until the process ends. For files with transfers that never completed (IoQueue::Close).
  void Abandon() &&;

  int fd() const { return fd_.get(); }
  const std::string& name() const { return name_; }  // for messages
  bool direct() const { return direct_; }

  // True when nothing that other generations submitted, reads included, is in flight any more. Does
  // not block. SlotTable::ReleaseDrained wants this of all files of the worker.
  absl::StatusOr<bool> Drained() const;

  // What was completed is on disk afterwards. An error is final for the file.
  absl::Status Flush() const;

 private:
  ExtentFile() = default;

  UniqueFd lock_;  // a description of its own: requests in flight do not hold it
  UniqueFd fd_;
  std::string name_;
  uint64_t generation_ = 0;
  bool direct_ = false;
};

// The identity in a file's superblock; DataLoss when it is not a whole one of this format.
absl::StatusOr<ExtentIdentity> ReadExtentIdentity(int fd, const std::string& name);

// Whether some process has the extent file open through Adopt.
absl::StatusOr<bool> ExtentInUse(int fd, const std::string& name);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_EXTENT_FILE_H_
