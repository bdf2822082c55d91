// How a TierStore gets its files and its table: made new, or adopted from a predecessor.
//
// A fresh start writes the files first and the table last, whose magic number says that all is
// there: a process that dies before that leaves files that its successor removes.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status.h"
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
  if (options.recover && store->HasTable()) {
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
          .max_extra = kTierManifestExtra};
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
  const std::string name = ManifestFileName(options_.job_id, options_.worker);
  ZS_ASSIGN_OR_RETURN(manifest_,
                      ManifestFile::Open(paths_[0].directory.get(), name, ManifestIdentityOf()));
  std::optional<ManifestState> committed;
  for (const ManifestState& state : manifest_->states()) {
    if (state.attempt > options_.committed) {
      sealed_ = state.attempt;
    } else if (!committed.has_value() || *committed < state) {
      committed = state;
    }
  }
  // Nothing was sealed before the predecessor died.
  if (!committed.has_value() && manifest_->problem().ok()) return absl::OkStatus();
  has_manifest_ = true;
  return manifest_->Adopt(committed.value_or(ManifestState{.attempt = options_.committed}));
}

}  // namespace zeroshard
