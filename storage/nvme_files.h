// What lies in the directory of an nvme_path: files of jobs that live, files that nobody needs any
// more, and files of others, each with the reason. The daemon looks at its start and when it is
// asked to, while it holds the path's lock. Format page: docs/nvme.md.
#ifndef ZEROSHARD_STORAGE_NVME_FILES_H_
#define ZEROSHARD_STORAGE_NVME_FILES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/nvme_path.h"

namespace zeroshard {

enum class NvmeFileKind {
  kLive,       // of a job that exists, or in use
  kStale,      // of this format, of a job that does not exist: may be removed
  kTemporary,  // was being created when its process died: may be removed
  kForeign,    // not of this format, damaged, or of another version: never touched
};

struct NvmeFile {
  std::string name;
  uint64_t bytes = 0;  // that it occupies
  NvmeFileKind kind = NvmeFileKind::kForeign;
  uint64_t job_id = 0;  // of kLive and kStale
  std::string reason;
};

// All entries but the path's lock, in order of names. `exists` tells whether a job does.
absl::StatusOr<std::vector<NvmeFile>> ListNvmeFiles(const NvmePath& path,
                                                    absl::FunctionRef<bool(uint64_t job)> exists);

// Removes a stale or temporary file; FailedPrecondition for others, or when it is not that any
// more.
absl::Status RemoveNvmeFile(const NvmePath& path, const NvmeFile& file);

// Removes all files of a job that has ended. Returns the bytes that are free by that.
// FailedPrecondition, with those before it removed, at a file that is in use.
absl::StatusOr<uint64_t> RemoveNvmeFilesOfJob(const NvmePath& path, uint64_t job_id);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_NVME_FILES_H_
