// Looking after the files of the NVMe tier in one path, for NvmeStore. Everything here may hang
// with the drive: never on the decision thread. Format of the files: docs/nvme.md.
#ifndef ZEROSHARD_SERVER_NVME_UPKEEP_H_
#define ZEROSHARD_SERVER_NVME_UPKEEP_H_

#include <cstdint>
#include <set>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "storage/nvme_path.h"

namespace zeroshard {

// PermissionDenied when a part of `path` below `root` is a symbolic link. An empty root: any may
// be.
absl::Status CheckNoLinks(const std::string& path, const std::string& root);

// Bytes that files occupy, of these jobs and of those being created.
enum class Temporaries : uint8_t { kCounted, kNotCounted };
uint64_t OccupiedBytes(const NvmePath& path, const std::set<uint64_t>& jobs,
                       Temporaries temporaries = Temporaries::kCounted);

// Jobs that have a manifest in the path: those with `durability: power`.
std::set<uint64_t> JobsWithManifest(const NvmePath& path);

// Removes what jobs that do not exist left, but for the files of jobs in `durable`, which are all
// that is left of their states. A line of the log for each file that is there.
void RemoveLeftovers(const NvmePath& path, const std::set<uint64_t>& durable,
                     absl::FunctionRef<bool(uint64_t job)> exists);

// Removes the files of a job whose processes have ended, and logs what came of it.
void RemoveFilesOfJob(const std::string& job, uint64_t job_id, const NvmePath& path);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_NVME_UPKEEP_H_
