// NvmeStore: the directories of the NVMe tier that this daemon uses: whether they will do, what of
// their room is promised to whom, and removal of the files that nobody needs any more.
//
// Drives may hang. Whatever touches one runs on a thread of its own, at most one a path at a time,
// and callers wait `patience` at most; a thread that hangs outlives the store. All methods may be
// called from any thread; Admit, Refresh and Open wait, the others do not.
//
// A path's lock is held while anything here refers to it: the daemon's own paths always, others
// while a job uses them. Format of what lies there: docs/nvme.md.
#ifndef ZEROSHARD_SERVER_NVME_STORE_H_
#define ZEROSHARD_SERVER_NVME_STORE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/nvme_paths.h"
#include "storage/io_backend.h"
#include "storage/nvme_files.h"
#include "storage/nvme_path.h"

namespace zeroshard {

struct HeldNvmePath;

// How full a path's file system was at one moment.
struct NvmeSpace {
  uint64_t device = 0;    // its st_dev
  uint64_t capacity = 0;  // of the file system
  uint64_t free = 0;      // for this user
  uint64_t occupied = 0;  // by files of this daemon's jobs, on all paths of the device
};

// What an Attach found out about the paths of its job. Keeps their locks.
struct NvmeAdmission {
  std::vector<std::shared_ptr<const HeldNvmePath>> paths;
  std::vector<NvmeSpace> space;  // of each
  IoBackend backend = IoBackend::kThreads;
  std::vector<std::string> warnings;
};

// The room of one job. Its files are removed when this goes, which must be after the last of its
// processes has.
class NvmeLease {
 public:
  virtual ~NvmeLease() = default;
  virtual IoBackend backend() const = 0;
  // The files stay, and their room stays promised: the job can be resumed.
  virtual void KeepFiles() const = 0;
};

class NvmeStore {
 public:
  struct Options {
    IoBackend backend = IoBackend::kAuto;
    uint64_t limit = 0;  // bytes of all jobs together; 0 for none
    absl::Duration patience = absl::Seconds(30);
    // Replaced in tests.
    std::function<absl::StatusOr<NvmePath>(const std::string&, const NvmePathOptions&)> admit =
        AdmitNvmePath;
  };
  explicit NvmeStore(const Options& options);
  // Waits for removals that are under way, a few seconds at most.
  ~NvmeStore();
  NvmeStore(const NvmeStore&) = delete;
  NvmeStore& operator=(const NvmeStore&) = delete;

  // At the start of the daemon, before there are jobs: holds its own paths, and removes what jobs
  // of an earlier daemon left there, with a line of the log for each file. Those of jobs with
  // durability power are kept, unless they are of `ended`. A path that will not do is a warning:
  // jobs that do not use it can run.
  void Open(std::span<const NvmePathConfig> paths, const std::set<uint64_t>& ended = {});
  // Jobs whose files Open kept.
  std::set<uint64_t> kept() const;
  // Removes the files of a job that has no processes, soon: on the paths that are held for it, and
  // on `paths`.
  void RemoveKept(const std::string& job, uint64_t job_id, std::span<const NvmePathConfig> paths);

  // Tries each path with a small write, read and removal; the first one's error. Also Unavailable
  // for a path that did not answer, and PermissionDenied for one that a symbolic link leads out of
  // the daemon's. `trusted`: the caller may name any path, links too.
  enum class Caller : uint8_t { kTrusted, kOther };
  absl::StatusOr<std::shared_ptr<const NvmeAdmission>> Admit(std::span<const NvmePathConfig> paths,
                                                             Caller caller);

  // Promises `bytes` on each path of the admission to a job. ResourceExhausted with what is needed,
  // free and promised to others.
  absl::StatusOr<std::shared_ptr<const NvmeLease>> Reserve(
      const std::string& job, uint64_t job_id, std::shared_ptr<const NvmeAdmission> admission,
      std::span<const uint64_t> bytes);

  // What is known of each path that is held, in order of paths.
  struct PathView {
    std::string path;
    std::string filesystem;
    bool direct = false;
    std::string backend;
    NvmeSpace space;        // as last looked at
    uint64_t promised = 0;  // to jobs, on this path
  };
  std::vector<PathView> Paths() const;
  // Bytes promised to all jobs.
  uint64_t promised() const;
  // Looks at the space of all paths again, waiting no longer than `patience`.
  void Refresh(absl::Duration patience);

  // What lies in the paths that are held. With kRemove files of jobs that do not exist are removed.
  // Unavailable when a drive does not answer. Waits.
  struct FileView {
    std::string path;
    NvmeFile file;
    bool removed = false;
  };
  enum class Stale : uint8_t { kKeep, kRemove };
  absl::StatusOr<std::vector<FileView>> Files(Stale stale);

  struct State;

 private:
  const std::shared_ptr<State> state_;  // shared with threads that may hang
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_NVME_STORE_H_
