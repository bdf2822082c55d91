#include "server/nvme_store.h"

#include <algorithm>
#include <map>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "server/node_memory.h"
#include "server/nvme_store_state.h"
#include "server/nvme_upkeep.h"

namespace zeroshard {

using nvme_internal::Found;
using nvme_internal::Promise;
using nvme_internal::RunAside;
using nvme_internal::Wanted;

namespace {

// How long the daemon's end waits for files to go. What is left is removed at its next start.
constexpr absl::Duration kRemovalGrace = absl::Seconds(10);

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
