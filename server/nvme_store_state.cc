#include "server/nvme_store_state.h"

#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "server/node_memory.h"
#include "server/nvme_upkeep.h"

namespace zeroshard {

using nvme_internal::DirectoryId;
using nvme_internal::Found;
using nvme_internal::Look;
using nvme_internal::Wanted;

bool nvme_internal::RunAside(std::function<void()> work, absl::Duration patience) {
  auto done = std::make_shared<absl::Notification>();
  std::thread([work = std::move(work), done] {
    work();
    done->Notify();
  }).detach();
  return done->WaitForNotificationWithTimeout(patience);
}

std::vector<std::shared_ptr<const HeldNvmePath>> NvmeStore::State::Held() const {
  std::vector<std::shared_ptr<const HeldNvmePath>> all;
  for (const auto& [path, weak] : held) {
    if (auto one = weak.lock()) all.push_back(std::move(one));
  }
  return all;
}

// The lock of the path's directory, which this daemon may have under another name.
absl::StatusOr<std::shared_ptr<const UniqueFd>> NvmeStore::State::Lock(const NvmePath& path,
                                                                       const DirectoryId& id) {
  {
    absl::MutexLock locked(&mu);
    const auto free = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) { return !locking.contains(id); };
    mu.Await(absl::Condition(&free));
    if (auto lock = locks[id].lock()) return lock;
    locking.insert(id);
  }
  absl::StatusOr<UniqueFd> taken = LockNvmePath(path);
  absl::MutexLock locked(&mu);
  locking.erase(id);
  if (!taken.ok()) return taken.status();
  auto lock = std::make_shared<const UniqueFd>(*std::move(taken));
  locks[id] = lock;
  return lock;
}

absl::StatusOr<std::shared_ptr<const HeldNvmePath>> NvmeStore::State::Hold(NvmePath path) {
  struct stat info = {};
  if (::fstat(path.directory.get(), &info) != 0) return ErrnoError(errno, "stat", path.path);
  const DirectoryId id = {info.st_dev, info.st_ino};
  {
    absl::MutexLock locked(&mu);
    // A path that was mounted elsewhere since is another one.
    auto before = held[path.path].lock();
    if (before != nullptr && before->id == id) return before;
  }
  auto made = std::make_shared<HeldNvmePath>();
  made->id = id;
  ZS_ASSIGN_OR_RETURN(made->lock, Lock(path, id));
  ZS_ASSIGN_OR_RETURN(made->choice,
                      ChooseIoBackend(options.backend, absl::StrCat(path.path, "/zeroshard")));
  const std::string text =
      absl::StrCat("nvme_path ", path.path, " (", path.filesystem, ") uses ",
                   std::string(NameOf(made->choice.backend)), ": ", made->choice.reason);
  const bool second_best =
      options.backend == IoBackend::kAuto && made->choice.backend == IoBackend::kThreads;
  second_best ? LogWarn(text) : LogInfo(text);
  made->path = std::move(path);
  absl::MutexLock locked(&mu);
  std::erase_if(held, [](const auto& one) { return one.second.expired(); });
  std::erase_if(locks, [](const auto& one) { return one.second.expired(); });
  held[made->path.path] = made;
  return made;
}

// Nothing of the path is referred to afterwards but by those who wait.
void NvmeStore::State::Finish(const Wanted& wanted, absl::StatusOr<Found> found) {
  absl::MutexLock locked(&mu);
  if (found.ok()) space[wanted.config.path] = found->space;
  const auto look = looks.find(wanted.config.path);
  look->second->result = std::move(found);
  look->second->done = true;
  looks.erase(look);
}

NvmeSpace NvmeStore::State::Measure(const HeldNvmePath& one) {
  std::set<uint64_t> jobs;
  std::vector<std::shared_ptr<const HeldNvmePath>> paths;
  {
    absl::MutexLock locked(&mu);
    for (const auto& [job_id, promise] : promises) jobs.insert(job_id);
    paths = Held();
  }
  NvmeSpace measured;
  measured.device = one.id.first;
  struct statvfs volume = {};
  if (::fstatvfs(one.path.directory.get(), &volume) == 0) {
    measured.capacity = uint64_t{volume.f_blocks} * volume.f_frsize;
    measured.free = uint64_t{volume.f_bavail} * volume.f_frsize;
  }
  std::set<uint64_t> seen;
  for (const auto& other : paths) {
    if (other->id.first != one.id.first || !seen.insert(other->id.second).second) continue;
    measured.occupied += OccupiedBytes(other->path, jobs);
  }
  return measured;
}

absl::StatusOr<Found> NvmeStore::State::LookAt(const Wanted& wanted) {
  const std::string& path = wanted.config.path;
  ZS_RETURN_IF_ERROR(CheckNoLinks(path, wanted.root));
  NvmePathOptions how;
  how.allow_network_path = wanted.config.allow_network_path;
  ZS_ASSIGN_OR_RETURN(NvmePath admitted, options.admit(path, how));
  Found found;
  found.warnings = admitted.warnings;
  ZS_ASSIGN_OR_RETURN(found.held, Hold(std::move(admitted)));
  found.space = Measure(*found.held);
  return found;
}

std::vector<absl::StatusOr<Found>> NvmeStore::State::LookAtAll(const std::shared_ptr<State>& state,
                                                               const std::vector<Wanted>& wanted,
                                                               absl::Duration patience) {
  std::vector<std::shared_ptr<Look>> looks;
  const absl::Time deadline = absl::Now() + patience;
  absl::MutexLock locked(&state->mu);
  for (const Wanted& one : wanted) {
    std::shared_ptr<Look>& look = state->looks[one.config.path];
    if (look == nullptr) {
      look = std::make_shared<Look>();
      std::thread([state, one] { state->Finish(one, state->LookAt(one)); }).detach();
    }
    looks.push_back(look);
  }
  std::vector<absl::StatusOr<Found>> results;
  for (size_t i = 0; i < looks.size(); ++i) {
    if (state->mu.AwaitWithDeadline(absl::Condition(&looks[i]->done), deadline)) {
      results.push_back(looks[i]->result);
      continue;
    }
    results.push_back(absl::UnavailableError(
        absl::StrCat("nvme_path \"", wanted[i].config.path, "\" has not answered for ",
                     absl::FormatDuration(patience), ": its drive or file system hangs")));
  }
  return results;
}

}  // namespace zeroshard
