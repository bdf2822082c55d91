#include "server/nvme_upkeep.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "server/node_memory.h"
#include "storage/named_dir.h"
#include "storage/nvme_files.h"

namespace zeroshard {
namespace {

// The files of a process that was just reaped may still be locked by its last transfers.
constexpr int kRemovalTries = 20;
constexpr absl::Duration kRemovalPause = absl::Milliseconds(500);

// "job-00000000000004d2", with which the names of a job's files begin.
std::string FilePrefix(uint64_t job_id) {
  return absl::StrCat("job-", absl::Hex(job_id, absl::kZeroPad16));
}

constexpr size_t kPrefixBytes = 20;
constexpr const char kTemporary[] = ".tmp-";

// What a worker of the job was creating when it died.
void RemoveTemporariesOfJob(uint64_t job_id, const NvmePath& path) {
  const absl::StatusOr<std::vector<std::string>> names = ListNames(path.directory.get());
  if (!names.ok()) return;
  const std::string prefix = FilePrefix(job_id);
  for (const std::string& name : *names) {
    if (!name.starts_with(kTemporary) || name.find(prefix) == std::string::npos) continue;
    unlinkat(path.directory.get(), name.c_str(), 0);
  }
}

}  // namespace

absl::Status CheckNoLinks(const std::string& path, const std::string& root) {
  if (root.empty()) return absl::OkStatus();
  for (size_t end = root.size(); end < path.size();) {
    end = std::min(path.find('/', end + 1), path.size());
    const std::string part = path.substr(0, end);
    struct stat info = {};
    // Whoever opens it says what is wrong.
    if (::lstat(part.c_str(), &info) != 0) return absl::OkStatus();
    if (S_ISLNK(info.st_mode)) {
      return absl::PermissionDeniedError(absl::StrCat(
          "nvme_path \"", path, "\": \"", part,
          "\" is a symbolic link; below the daemon's nvme_paths only its own user and root may "
          "name paths with such"));
    }
  }
  return absl::OkStatus();
}

uint64_t OccupiedBytes(const NvmePath& path, const std::set<uint64_t>& jobs,
                       Temporaries temporaries) {
  std::set<std::string> prefixes;
  for (const uint64_t job_id : jobs) prefixes.insert(FilePrefix(job_id));
  const absl::StatusOr<std::vector<std::string>> names = ListNames(path.directory.get());
  if (!names.ok()) return 0;
  uint64_t bytes = 0;
  for (const std::string& name : *names) {
    const bool counts = (temporaries == Temporaries::kCounted && name.starts_with(kTemporary)) ||
                        prefixes.contains(name.substr(0, kPrefixBytes));
    struct stat info = {};
    // Files come and go while this looks.
    if (!counts || ::fstatat(path.directory.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
      continue;
    }
    bytes += static_cast<uint64_t>(info.st_blocks) * 512;
  }
  return bytes;
}

std::set<uint64_t> JobsWithManifest(const NvmePath& path) {
  std::set<uint64_t> jobs;
  const absl::StatusOr<std::vector<NvmeFile>> files =
      ListNvmeFiles(path, [](uint64_t) { return false; });
  for (size_t i = 0; files.ok() && i < files->size(); ++i) {
    if ((*files)[i].name.ends_with(".manifest")) jobs.insert((*files)[i].job_id);
  }
  return jobs;
}

void RemoveLeftovers(const NvmePath& path, const std::set<uint64_t>& durable,
                     absl::FunctionRef<bool(uint64_t job)> exists) {
  const absl::StatusOr<std::vector<NvmeFile>> files = ListNvmeFiles(path, exists);
  if (!files.ok()) {
    LogWarn(absl::StrCat("nvme_path ", path.path, ": ", files.status().message()));
    return;
  }
  for (const NvmeFile& file : *files) {
    const std::string name =
        absl::StrCat("nvme_path ", path.path, ": ", file.name, " (", HumanBytes(file.bytes), ")");
    if (file.kind != NvmeFileKind::kForeign && durable.contains(file.job_id)) {
      LogInfo(absl::StrCat(name, " is kept: its job had durability power"));
    } else if (file.kind == NvmeFileKind::kForeign || file.kind == NvmeFileKind::kLive) {
      LogWarn(absl::StrCat(name, " is left alone: ", file.reason));
    } else if (const absl::Status removed = RemoveNvmeFile(path, file); removed.ok()) {
      LogInfo(absl::StrCat(name, " was removed: ", file.reason));
    } else {
      LogWarn(absl::StrCat(name, " could not be removed: ", removed.message()));
    }
  }
}

void RemoveFilesOfJob(const std::string& job, uint64_t job_id, const NvmePath& path) {
  absl::StatusOr<uint64_t> freed = uint64_t{0};
  for (int i = 0; i < kRemovalTries; ++i) {
    if (i > 0) absl::SleepFor(kRemovalPause);
    freed = RemoveNvmeFilesOfJob(path, job_id);
    if (!absl::IsFailedPrecondition(freed.status())) break;
  }
  RemoveTemporariesOfJob(job_id, path);
  if (!freed.ok()) {
    LogWarn(absl::StrCat("job ", job, ": its files on ", path.path,
                         " are left until the daemon starts again: ", freed.status().message()));
  } else if (*freed > 0) {
    LogInfo(absl::StrCat("job ", job, ": removed its files of ", HumanBytes(*freed), " on ",
                         path.path));
  }
}

}  // namespace zeroshard
