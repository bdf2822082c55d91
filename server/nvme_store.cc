#include "server/nvme_store.h"

#include <sys/stat.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "server/node_memory.h"
#include "server/nvme_upkeep.h"

namespace zeroshard {

struct HeldNvmePath {
  NvmePath path;
  std::shared_ptr<const UniqueFd> lock;  // shared by several names of one directory
  IoBackendChoice choice;
  std::pair<uint64_t, uint64_t> id;  // device and inode of the directory
};

namespace {

// How long the daemon's end waits for files to go. What is left is removed at its next start.
constexpr absl::Duration kRemovalGrace = absl::Seconds(10);

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
bool RunAside(std::function<void()> work, absl::Duration patience) {
  auto done = std::make_shared<absl::Notification>();
  std::thread([work = std::move(work), done] {
    work();
    done->Notify();
  }).detach();
  return done->WaitForNotificationWithTimeout(patience);
}

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

}  // namespace

struct NvmeStore::State {
  explicit State(const Options& of) : options(of) {}

  // One look at a path, on its own thread: everything here may hang.
  absl::StatusOr<Found> LookAt(const Wanted& wanted);
  void Finish(const Wanted& wanted, absl::StatusOr<Found> found);
  absl::StatusOr<std::shared_ptr<const HeldNvmePath>> Hold(NvmePath path);
  absl::StatusOr<std::shared_ptr<const UniqueFd>> Lock(const NvmePath& path, const DirectoryId& id);
  NvmeSpace Measure(const HeldNvmePath& held);

  const Options options;

  mutable absl::Mutex mu;
  std::vector<std::string> roots ABSL_GUARDED_BY(mu);  // the daemon's own paths
  std::vector<std::shared_ptr<const HeldNvmePath>> own ABSL_GUARDED_BY(mu);
  std::map<std::string, std::weak_ptr<const HeldNvmePath>> held ABSL_GUARDED_BY(mu);
  std::map<DirectoryId, std::weak_ptr<const UniqueFd>> locks ABSL_GUARDED_BY(mu);
  std::set<DirectoryId> locking ABSL_GUARDED_BY(mu);           // being locked now
  std::map<std::string, NvmeSpace> space ABSL_GUARDED_BY(mu);  // as last looked at
  std::map<std::string, std::shared_ptr<Look>> looks ABSL_GUARDED_BY(mu);
  bool refreshing ABSL_GUARDED_BY(mu) = false;
  std::map<uint64_t, Promise> promises ABSL_GUARDED_BY(mu);  // by job id
  std::set<uint64_t> kept ABSL_GUARDED_BY(mu);               // jobs of earlier daemons
  int removals ABSL_GUARDED_BY(mu) = 0;                      // under way

  bool no_removals() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) { return removals == 0; }
  // Paths that are held, by path.
  std::vector<std::shared_ptr<const HeldNvmePath>> Held() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu);
  // Starts looks where none is under way, and waits for all.
  static std::vector<absl::StatusOr<Found>> LookAtAll(const std::shared_ptr<State>& state,
                                                      const std::vector<Wanted>& wanted,
                                                      absl::Duration patience);
};

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

namespace {

// On a thread of its own: files of a job on the paths that are promised to it, and on `others`.
void RemoveSoon(const std::shared_ptr<NvmeStore::State>& state, uint64_t job_id,
                const std::string& job, std::vector<Wanted> others) {
  absl::MutexLock locked(&state->mu);
  ++state->removals;
  std::thread([state, job_id, job, others = std::move(others)] {
    Promise promise;
    {
      absl::MutexLock relocked(&state->mu);
      promise = state->promises[job_id];
    }
    std::set<std::shared_ptr<const HeldNvmePath>> paths(promise.paths.begin(), promise.paths.end());
    for (auto& found : NvmeStore::State::LookAtAll(state, others, state->options.patience)) {
      if (found.ok()) {
        paths.insert(found->held);
      } else {
        LogWarn(absl::StrCat("job ", job, ": its files are left: ", found.status().message()));
      }
    }
    const std::string& name = promise.job.empty() ? job : promise.job;
    for (const auto& one : paths) RemoveFilesOfJob(name, job_id, one->path);
    // Only now: as long as the files are there, so is the promise.
    absl::MutexLock relocked(&state->mu);
    state->promises.erase(job_id);
    --state->removals;
  }).detach();
}

class Lease final : public NvmeLease {
 public:
  Lease(std::shared_ptr<NvmeStore::State> state, uint64_t job_id, IoBackend backend)
      : state_(std::move(state)), job_id_(job_id), backend_(backend) {}
  ~Lease() override {
    if (!keep_files_) RemoveSoon(state_, job_id_, "", {});
  }
  IoBackend backend() const override { return backend_; }
  void KeepFiles() const override { keep_files_ = true; }

 private:
  const std::shared_ptr<NvmeStore::State> state_;
  const uint64_t job_id_;
  const IoBackend backend_;
  mutable std::atomic<bool> keep_files_ = false;
};

}  // namespace

namespace {

// The room of jobs that can be resumed is theirs.
void Keep(NvmeStore::State& state, const std::vector<std::shared_ptr<const HeldNvmePath>>& held,
          const std::set<uint64_t>& jobs) {
  for (const uint64_t job_id : jobs) {
    Promise promise;
    for (const auto& one : held) {
      const uint64_t bytes = OccupiedBytes(one->path, {job_id}, Temporaries::kNotCounted);
      if (bytes == 0) continue;
      promise.paths.push_back(one);
      promise.bytes.push_back(bytes);
    }
    absl::MutexLock locked(&state.mu);
    state.kept.insert(job_id);
    state.promises.emplace(job_id, std::move(promise));
  }
}

}  // namespace

NvmeStore::NvmeStore(const Options& options) : state_(std::make_shared<State>(options)) {}

NvmeStore::~NvmeStore() {
  absl::MutexLock locked(&state_->mu);
  const bool gone = state_->mu.AwaitWithTimeout(
      absl::Condition(
          +[](State* state) { return state->no_removals(); }, state_.get()),
      kRemovalGrace);
  if (!gone) LogWarn("files of the NVMe tier are left for the daemon's next start");
}

void NvmeStore::Open(std::span<const NvmePathConfig> paths, const std::set<uint64_t>& ended) {
  std::vector<Wanted> wanted;
  for (const NvmePathConfig& path : paths) wanted.push_back({path, ""});
  const std::vector<absl::StatusOr<Found>> found =
      State::LookAtAll(state_, wanted, state_->options.patience);
  std::vector<std::shared_ptr<const HeldNvmePath>> held;
  for (size_t i = 0; i < found.size(); ++i) {
    {
      absl::MutexLock locked(&state_->mu);
      state_->roots.push_back(paths[i].path);
      if (found[i].ok()) state_->own.push_back(found[i]->held);
    }
    if (!found[i].ok()) {
      LogWarn(absl::StrCat("jobs cannot use an nvme_path: ", found[i].status().message()));
      continue;
    }
    for (const std::string& warning : found[i]->warnings) LogWarn(warning);
    held.push_back(found[i]->held);
  }
  const bool done = RunAside(
      [state = state_, held, ended] {
        std::set<uint64_t> durable;  // manifests lie on the first path of a worker only
        for (const auto& one : held) durable.merge(JobsWithManifest(one->path));
        for (const uint64_t job_id : ended) durable.erase(job_id);
        Keep(*state, held, durable);
        for (const auto& one : held) {
          RemoveLeftovers(one->path, durable, [&](uint64_t job_id) {
            absl::MutexLock locked(&state->mu);
            return state->promises.contains(job_id);
          });
        }
      },
      state_->options.patience);
  if (!done) LogWarn("nvme_paths are still being searched for files of earlier daemons");
}

std::set<uint64_t> NvmeStore::kept() const {
  absl::MutexLock locked(&state_->mu);
  return state_->kept;
}

void NvmeStore::RemoveKept(const std::string& job, uint64_t job_id,
                           std::span<const NvmePathConfig> paths) {
  std::vector<Wanted> others;
  for (const NvmePathConfig& path : paths) others.push_back({path, ""});
  RemoveSoon(state_, job_id, job, std::move(others));
}

absl::StatusOr<std::shared_ptr<const NvmeAdmission>> NvmeStore::Admit(
    std::span<const NvmePathConfig> paths, Caller caller) {
  std::vector<Wanted> wanted;
  for (const NvmePathConfig& path : paths) {
    wanted.push_back({path, ""});
    absl::MutexLock locked(&state_->mu);
    for (const std::string& root : state_->roots) {
      const bool beneath = path.path.starts_with(root) && root.size() >= wanted.back().root.size();
      if (caller == Caller::kOther && beneath) wanted.back().root = root;
    }
  }
  auto admission = std::make_shared<NvmeAdmission>();
  admission->backend = IoBackend::kUring;
  for (absl::StatusOr<Found>& found : State::LookAtAll(state_, wanted, state_->options.patience)) {
    if (!found.ok()) return found.status();
    if (found->held->choice.backend != IoBackend::kUring) admission->backend = IoBackend::kThreads;
    admission->paths.push_back(found->held);
    admission->space.push_back(found->space);
    for (std::string& warning : found->warnings) admission->warnings.push_back(std::move(warning));
  }
  return admission;
}

// Room on a device is what is free and what jobs have there; promises count whole, whether they
// are used yet or not.
absl::StatusOr<std::shared_ptr<const NvmeLease>> NvmeStore::Reserve(
    const std::string& job, uint64_t job_id, std::shared_ptr<const NvmeAdmission> admission,
    std::span<const uint64_t> bytes) {
  absl::MutexLock locked(&state_->mu);
  uint64_t total = 0;
  uint64_t total_promised = 0;
  std::map<uint64_t, uint64_t> need;
  std::map<uint64_t, uint64_t> promised;
  for (size_t p = 0; p < bytes.size(); ++p) {
    need[admission->paths[p]->id.first] += bytes[p];
    total += bytes[p];
  }
  for (const auto& [id, promise] : state_->promises) {
    if (id == job_id) continue;  // its files are there already
    for (size_t p = 0; p < promise.paths.size(); ++p) {
      promised[promise.paths[p]->id.first] += promise.bytes[p];
      total_promised += promise.bytes[p];
    }
  }
  if (state_->options.limit > 0 && total + total_promised > state_->options.limit) {
    return absl::ResourceExhaustedError(
        absl::StrCat("job '", job, "' needs ", HumanBytes(total),
                     " on the NVMe tier, but nvme_limit is ", HumanBytes(state_->options.limit),
                     ", of which other jobs hold ", HumanBytes(total_promised)));
  }
  for (size_t p = 0; p < bytes.size(); ++p) {
    const NvmeSpace& space = admission->space[p];
    const uint64_t others = promised[space.device];
    if (need[space.device] + others <= space.free + space.occupied) continue;
    const uint64_t unwritten = others - std::min(others, space.occupied);
    return absl::ResourceExhaustedError(absl::StrCat(
        "job '", job, "' needs ", HumanBytes(need[space.device]), " (", need[space.device],
        " bytes: two images of each chunk, and spares) on the file system of nvme_path \"",
        admission->paths[p]->path.path, "\", which has ", HumanBytes(space.free), " (", space.free,
        " bytes) free, of which other jobs have yet to use ", HumanBytes(unwritten),
        ". Add an nvme_path, or use more nodes or a smaller offload ratio"));
  }
  state_->promises[job_id] = {job, admission->paths, {bytes.begin(), bytes.end()}};
  return std::make_shared<const Lease>(state_, job_id, admission->backend);
}

std::vector<NvmeStore::PathView> NvmeStore::Paths() const {
  absl::MutexLock locked(&state_->mu);
  std::vector<PathView> views;
  for (const auto& one : state_->Held()) {
    PathView view;
    view.path = one->path.path;
    view.filesystem = one->path.filesystem;
    view.direct = one->path.direct;
    view.backend = std::string(NameOf(one->choice.backend));
    if (const auto it = state_->space.find(view.path); it != state_->space.end()) {
      view.space = it->second;
    }
    for (const auto& [id, promise] : state_->promises) {
      for (size_t p = 0; p < promise.paths.size(); ++p) {
        if (promise.paths[p] == one) view.promised += promise.bytes[p];
      }
    }
    views.push_back(std::move(view));
  }
  return views;
}

uint64_t NvmeStore::promised() const {
  absl::MutexLock locked(&state_->mu);
  uint64_t bytes = 0;
  for (const auto& [id, promise] : state_->promises) {
    for (const uint64_t one : promise.bytes) bytes += one;
  }
  return bytes;
}

absl::StatusOr<std::vector<NvmeStore::FileView>> NvmeStore::Files(Stale stale) {
  struct Found {
    absl::Status status;
    std::vector<FileView> files;
  };
  auto found = std::make_shared<Found>();
  const bool done = RunAside(
      [state = state_, found, stale] {
        std::vector<std::shared_ptr<const HeldNvmePath>> paths;
        {
          absl::MutexLock locked(&state->mu);
          paths = state->Held();
        }
        for (const auto& one : paths) {
          const auto files = ListNvmeFiles(one->path, [&](uint64_t job_id) {
            absl::MutexLock locked(&state->mu);
            return state->promises.contains(job_id);
          });
          if (!files.ok()) found->status = files.status();
          for (size_t f = 0; files.ok() && f < files->size(); ++f) {
            FileView view{one->path.path, (*files)[f]};
            const bool remove = stale == Stale::kRemove && view.file.kind == NvmeFileKind::kStale;
            view.removed = remove && RemoveNvmeFile(one->path, view.file).ok();
            found->files.push_back(std::move(view));
          }
        }
      },
      state_->options.patience);
  if (!done) return absl::UnavailableError("a drive of the NVMe tier does not answer");
  if (!found->status.ok()) return found->status;
  return std::move(found->files);
}

void NvmeStore::Refresh(absl::Duration patience) {
  {
    absl::MutexLock locked(&state_->mu);
    if (std::exchange(state_->refreshing, true)) return;  // one hangs, or has just begun
  }
  RunAside(
      [state = state_] {
        std::vector<std::shared_ptr<const HeldNvmePath>> paths;
        {
          absl::MutexLock locked(&state->mu);
          paths = state->Held();
        }
        for (const auto& one : paths) {
          const NvmeSpace measured = state->Measure(*one);
          absl::MutexLock locked(&state->mu);
          state->space[one->path.path] = measured;
        }
        absl::MutexLock locked(&state->mu);
        state->refreshing = false;
      },
      patience);
}

}  // namespace zeroshard
