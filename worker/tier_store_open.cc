// How a TierStore gets its files and its table: made new, or adopted from a predecessor.
//
// A fresh start writes the files first and the table last, whose magic number says that all is
// there: a process that dies before that leaves files that its successor removes.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/fault_point.h"
#include "base/status.h"
#include "storage/file_io.h"
#include "storage/named_dir.h"
#include "worker/tier_store.h"

namespace zeroshard {
namespace {

absl::Status CheckOptions(const NvmePlan& plan, const NvmeTierOptions& options) {
  const model::v1::NvmeConfig& config = options.config;
  if (config.block_bytes() == 0 || config.block_bytes() % kDirectIoAlignment != 0 ||
      config.block_bytes() > (uint64_t{1} << 30) || config.queue_depth() == 0 ||
      config.queue_depth() > kMaxIoDepth / 2 || config.threads() == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("nvme transfers of ", config.block_bytes(), " bytes, ", config.queue_depth(),
                     " at a time by ", config.threads(), " threads; block_bytes is a multiple of ",
                     kDirectIoAlignment, " up to 1 GiB, queue_depth 1 to ", kMaxIoDepth / 2));
  }
  if (options.paths.size() != plan.extents().paths()) {
    return absl::InvalidArgumentError(
        absl::StrCat(options.paths.size(), " nvme paths, the plan has ", plan.extents().paths()));
  }
  if (options.table.size() < plan.table_bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("a slot-table region of ", options.table.size(),
                                                   " bytes, need ", plan.table_bytes()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<TierStore>> TierStore::Open(const NvmePlan& plan,
                                                           const NvmeTierOptions& options) {
  ZS_RETURN_IF_ERROR(CheckOptions(plan, options));
  std::unique_ptr<TierStore> store(new TierStore(plan, options));
  ZS_RETURN_IF_ERROR(store->AdmitPaths());
  if (options.resume.has_value()) {
    ZS_RETURN_IF_ERROR(store->Resume());
  } else if (options.recover && store->HasTable()) {
    ZS_RETURN_IF_ERROR(store->Recover());
  } else {
    ZS_RETURN_IF_ERROR(store->CreateFresh());
  }
  return store;
}

ExtentIdentity TierStore::IdentityOf(uint32_t path) const {
  return {.job_id = options_.job_id,
          .layout_fingerprint = options_.layout_fingerprint,
          .plan_fingerprint = plan_.extents().fingerprint(),
          .worker = options_.worker,
          .path = path,
          .file_bytes = plan_.extents().file_bytes(path)};
}

ManifestIdentity TierStore::ManifestIdentityOf() const {
  return {.job_id = options_.job_id,
          .layout_fingerprint = options_.layout_fingerprint,
          .plan_fingerprint = plan_.extents().fingerprint(),
          .worker = options_.worker,
          .chunks = static_cast<uint32_t>(plan_.images().size()),
          .max_extra = options_.manifest_extra};
}

// The magic number of a table is written last.
bool TierStore::HasTable() const {
  uint64_t magic = 0;
  std::memcpy(&magic, options_.table.data(), sizeof(magic));
  return magic != 0;
}

absl::Status TierStore::AdmitPaths() {
  for (const NvmeTierPath& wanted : options_.paths) {
    ZS_ASSIGN_OR_RETURN(NvmePath path, AdmitNvmePath(wanted.path, {wanted.allow_network_path}));
    warnings_.insert(warnings_.end(), path.warnings.begin(), path.warnings.end());
    paths_.push_back(std::move(path));
    options_.beat();
  }
  return absl::OkStatus();
}

absl::Status TierStore::CreateFresh() {
  for (uint32_t p = 0; p < paths_.size(); ++p) {
    const ExtentIdentity identity = IdentityOf(p);
    ZS_RETURN_IF_ERROR(ExtentFile::RemoveUnused(paths_[p], identity));
    ZS_RETURN_IF_ERROR(ExtentFile::Create(paths_[p], identity, [this] {
      options_.beat();
      ZS_FAULT_POINT("worker.tier.creating");
    }));
  }
  if (power()) {
    const std::string name = ManifestFileName(options_.job_id, options_.worker);
    const int directory = paths_[0].directory.get();
    ZS_RETURN_IF_ERROR(RemoveTemporariesOf(directory, name).status());
    if (::unlinkat(directory, name.c_str(), 0) != 0 && errno != ENOENT) {
      return ErrnoError(errno, "remove", name);
    }
    ZS_ASSIGN_OR_RETURN(manifest_, ManifestFile::Create(directory, name, ManifestIdentityOf()));
  }
  ZS_FAULT_POINT("worker.tier.before_format");
  const SlotTableShape shape = plan_.table_shape(options_.job_id, options_.layout_fingerprint);
  std::memset(options_.table.data(), 0, plan_.table_bytes());
  ZS_ASSIGN_OR_RETURN(table_, SlotTable::Format(options_.table, shape, 1, options_.committed));
  return AdoptFiles();
}

namespace {

// Longer than a process that was killed takes to be gone, unless a drive hangs.
constexpr absl::Duration kPatience = absl::Seconds(60);
constexpr absl::Duration kPause = absl::Milliseconds(10);
// The table that is lost may have been taken over often since its last manifest.
constexpr uint64_t kGenerationsBetween = 4096;

}  // namespace

absl::StatusOr<TierRemains> TierStore::Inspect(const NvmePlan& plan,
                                               const NvmeTierOptions& options) {
  TierStore store(plan, options);
  ZS_RETURN_IF_ERROR(store.AdmitPaths());
  ZS_RETURN_IF_ERROR(store.AwaitUnused());
  TierRemains remains;
  const absl::Status opened = store.OpenManifest();
  if (absl::IsNotFound(opened)) {
    remains.missing = true;
    remains.problem = std::string(opened.message());
    return remains;
  }
  ZS_RETURN_IF_ERROR(opened);
  remains.unused = store.manifest_->unused();
  remains.problem = std::string(store.manifest_->problem().message());
  for (const NvmeManifest& manifest : store.manifest_->copies()) {
    if (store.IsWhole(manifest)) {
      remains.states.push_back({manifest.step, manifest.attempt, manifest.revision});
    } else {
      absl::StrAppend(&remains.problem, remains.problem.empty() ? "" : "; ", "step ", manifest.step,
                      " is not whole on the nvme tier");
    }
  }
  return remains;
}

bool TierStore::IsWhole(const NvmeManifest& manifest) const {
  for (uint32_t image = 0; image < plan_.images().size(); ++image) {
    const NvmeImage& planned = plan_.images()[image];
    if (planned.home && planned.elements > 0 && manifest.images[image].slot == kNoSlot)
      return false;
  }
  return true;
}

// Until the worker of the lost region is gone, with all that it may write to its manifest.
absl::Status TierStore::AwaitUnused() {
  const absl::Time deadline = absl::Now() + kPatience;
  for (uint32_t p = 0; p < paths_.size(); ++p) {
    const std::string name = ExtentFileName(options_.job_id, options_.worker, p);
    const absl::StatusOr<UniqueFd> fd =
        OpenBeneath(paths_[p].directory.get(), name, O_RDONLY | O_CLOEXEC);
    if (absl::IsNotFound(fd.status())) continue;
    ZS_RETURN_IF_ERROR(fd.status());
    while (true) {
      ZS_ASSIGN_OR_RETURN(const bool used, ExtentInUse(fd->get(), name));
      if (!used) break;
      if (absl::Now() > deadline) {
        return absl::FailedPreconditionError(
            absl::StrCat(DescribeFd(fd->get()), " is still used by another process, after ",
                         absl::FormatDuration(kPatience),
                         "; an earlier worker of the job hangs, or two daemons "
                         "share the path"));
      }
      options_.beat();
      absl::SleepFor(kPause);
    }
  }
  return absl::OkStatus();
}

absl::Status TierStore::AwaitDrained() {
  const absl::Time deadline = absl::Now() + kPatience;
  for (const ExtentFile& file : files_) {
    while (true) {
      ZS_ASSIGN_OR_RETURN(const bool drained, file.Drained());
      if (drained) break;
      if (absl::Now() > deadline) {
        return absl::UnavailableError(
            absl::StrCat(file.name(), " is still being written to by an earlier process, after ",
                         absl::FormatDuration(kPatience), ": its drive hangs"));
      }
      options_.beat();
      absl::SleepFor(kPause);
    }
  }
  return absl::OkStatus();
}

// Nothing on disk is changed: that is for ConfirmResume, when all was read and found right.
absl::Status TierStore::Resume() {
  ZS_RETURN_IF_ERROR(OpenManifest());
  const NvmeManifest* manifest = manifest_->CopyOf(options_.resume->state);
  if (manifest == nullptr) {
    return absl::DataLossError(absl::StrCat(ManifestFileName(options_.job_id, options_.worker),
                                            " does not hold step ", options_.resume->state.step,
                                            " any more"));
  }
  uint64_t generation = 0;
  for (const NvmeManifest& copy : manifest_->copies()) {
    generation = std::max(generation, copy.generation);
  }
  std::memset(options_.table.data(), 0, plan_.table_bytes());
  ZS_ASSIGN_OR_RETURN(
      table_, SlotTable::Format(options_.table,
                                plan_.table_shape(options_.job_id, options_.layout_fingerprint),
                                generation + kGenerationsBetween, options_.resume->committed));
  for (uint32_t image = 0; image < manifest->images.size(); ++image) {
    if (manifest->images[image].slot == kNoSlot) continue;
    ZS_RETURN_IF_ERROR(table_->Restore(image, manifest->images[image]));
  }
  ZS_RETURN_IF_ERROR(AdoptFiles());
  ZS_RETURN_IF_ERROR(AwaitDrained());
  SetDurable(*manifest);
  return absl::OkStatus();
}

absl::Status TierStore::ConfirmResume() {
  ZS_FAULT_POINT("worker.resume.before_manifest");
  absl::StatusOr<NvmeManifest> manifest =
      manifest_->Resume(options_.resume->state, table_->generation());
  ZS_RETURN_IF_ERROR(Final(manifest.status()));
  SetDurable(*std::move(manifest));
  ZS_FAULT_POINT("worker.resume.after_manifest");
  return absl::OkStatus();
}

absl::Status TierStore::Recover() {
  const SlotTableShape shape = plan_.table_shape(options_.job_id, options_.layout_fingerprint);
  ZS_ASSIGN_OR_RETURN(table_, SlotTable::Adopt(options_.table, shape));
  ZS_RETURN_IF_ERROR(table_->Commit(options_.committed));
  quarantined_ = table_->quarantined() > 0;
  ZS_RETURN_IF_ERROR(AdoptFiles());
  if (power()) ZS_RETURN_IF_ERROR(AdoptManifest());
  Tick();
  return absl::OkStatus();
}

absl::Status TierStore::AdoptFiles() {
  for (uint32_t p = 0; p < paths_.size(); ++p) {
    ZS_ASSIGN_OR_RETURN(ExtentFile file,
                        ExtentFile::Adopt(paths_[p], IdentityOf(p), table_->generation()));
    files_.push_back(std::move(file));
  }
  return absl::OkStatus();
}

// The newest manifest of a committed attempt is the committed one: steps are sealed before they are
// committed, and what is committed without a seal changes nothing.
absl::Status TierStore::AdoptManifest() {
  ZS_RETURN_IF_ERROR(OpenManifest());
  std::optional<ManifestState> committed;
  for (const ManifestState& state : manifest_->states()) {
    if (state.attempt > options_.committed) {
      sealed_ = *manifest_->CopyOf(state);
    } else if (!committed.has_value() || *committed < state) {
      committed = state;
    }
  }
  // Nothing was sealed before the predecessor died.
  if (!committed.has_value() && manifest_->problem().ok()) return absl::OkStatus();
  ZS_RETURN_IF_ERROR(
      manifest_->Adopt(committed.value_or(ManifestState{.attempt = options_.committed})));
  SetDurable(*manifest_->CopyOf(*committed));
  return absl::OkStatus();
}

absl::Status TierStore::OpenManifest() {
  const std::string name = ManifestFileName(options_.job_id, options_.worker);
  ZS_ASSIGN_OR_RETURN(manifest_,
                      ManifestFile::Open(paths_[0].directory.get(), name, ManifestIdentityOf()));
  return absl::OkStatus();
}

}  // namespace zeroshard
