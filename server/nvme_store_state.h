// NvmeStore::State: what an NvmeStore knows, and the looks at its paths, each on a thread of its
// own.
//
// A part of server/nvme_store.cc; included by nobody else. Shared by the store and its threads,
// which may outlive it.
#ifndef ZEROSHARD_SERVER_NVME_STORE_STATE_H_
#define ZEROSHARD_SERVER_NVME_STORE_STATE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"
#include "server/nvme_store.h"

namespace zeroshard {

struct HeldNvmePath {
  NvmePath path;
  std::shared_ptr<const UniqueFd> lock;  // shared by several names of one directory
  IoBackendChoice choice;
  std::pair<uint64_t, uint64_t> id;  // device and inode of the directory
};

namespace nvme_internal {

// What one look at a path found.
struct Found {
  std::shared_ptr<const HeldNvmePath> held;
  NvmeSpace space;
  std::vector<std::string> warnings;
};

// A look that is under way, and its result. Waited for by any number of callers.
struct Look {
  bool done = false;
  absl::StatusOr<Found> result = absl::UnknownError("not done");
};

// Runs `work` on a thread of its own and waits for it; false when it was not done in time, and
// goes on.
bool RunAside(std::function<void()> work, absl::Duration patience);

using DirectoryId = std::pair<uint64_t, uint64_t>;

struct Promise {
  std::string job;
  std::vector<std::shared_ptr<const HeldNvmePath>> paths;
  std::vector<uint64_t> bytes;  // of each
};

// A path as a caller named it.
struct Wanted {
  NvmePathConfig config;
  std::string root;  // no symbolic link below it; empty: anywhere
};

}  // namespace nvme_internal

struct NvmeStore::State {
  explicit State(const Options& of) : options(of) {}

  // One look at a path, on its own thread: everything here may hang.
  absl::StatusOr<nvme_internal::Found> LookAt(const nvme_internal::Wanted& wanted);
  void Finish(const nvme_internal::Wanted& wanted, absl::StatusOr<nvme_internal::Found> found);
  absl::StatusOr<std::shared_ptr<const HeldNvmePath>> Hold(NvmePath path);
  absl::StatusOr<std::shared_ptr<const UniqueFd>> Lock(const NvmePath& path,
                                                       const nvme_internal::DirectoryId& id);
  NvmeSpace Measure(const HeldNvmePath& held);

  const Options options;

  mutable absl::Mutex mu;
  std::vector<std::string> roots ABSL_GUARDED_BY(mu);  // the daemon's own paths
  std::vector<std::shared_ptr<const HeldNvmePath>> own ABSL_GUARDED_BY(mu);
  std::map<std::string, std::weak_ptr<const HeldNvmePath>> held ABSL_GUARDED_BY(mu);
  std::map<nvme_internal::DirectoryId, std::weak_ptr<const UniqueFd>> locks ABSL_GUARDED_BY(mu);
  std::set<nvme_internal::DirectoryId> locking ABSL_GUARDED_BY(mu);  // being locked now
  std::map<std::string, NvmeSpace> space ABSL_GUARDED_BY(mu);        // as last looked at
  std::map<std::string, std::shared_ptr<nvme_internal::Look>> looks ABSL_GUARDED_BY(mu);
  bool refreshing ABSL_GUARDED_BY(mu) = false;
  std::map<uint64_t, nvme_internal::Promise> promises ABSL_GUARDED_BY(mu);  // by job id
  std::set<uint64_t> kept ABSL_GUARDED_BY(mu);  // jobs of earlier daemons
  int removals ABSL_GUARDED_BY(mu) = 0;         // under way

  bool no_removals() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) { return removals == 0; }
  // Paths that are held, by path.
  std::vector<std::shared_ptr<const HeldNvmePath>> Held() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Starts looks where none is under way, and waits for all.
  static std::vector<absl::StatusOr<nvme_internal::Found>> LookAtAll(
      const std::shared_ptr<State>& state, const std::vector<nvme_internal::Wanted>& wanted,
      absl::Duration patience);
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_NVME_STORE_STATE_H_
