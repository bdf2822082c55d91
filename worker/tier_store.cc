#include "worker/tier_store.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status.h"
#include "storage/layout.h"

namespace zeroshard {

ImageIdentity TierStore::ImageIdentityOf(uint32_t image, const TierPlace& place) const {
  const NvmeImage& planned = plan_.images()[image];
  return {.job_id = options_.job_id,
          .layout_fingerprint = options_.layout_fingerprint,
          .worker = options_.worker,
          .unit = planned.unit,
          .first_grain = planned.begin / kGrainElements,
          .grains = (planned.elements + kGrainElements - 1) / kGrainElements,
          .chunk = image,
          .path = place.path,
          .offset = place.offset,
          .generation = place.image.generation,
          .attempt = place.image.attempt,
          .step = place.image.step};
}

std::vector<int> TierStore::fds() const {
  std::vector<int> fds;
  for (const ExtentFile& file : files_) fds.push_back(file.fd());
  return fds;
}

std::atomic<uint64_t>& TierStore::target(uint32_t image) const {
  std::byte* words = options_.table.data() + plan_.targets_offset();
  return reinterpret_cast<std::atomic<uint64_t>*>(words)[image];
}

bool TierStore::AtHome(uint32_t image) const {
  switch (static_cast<NvmeTarget>(target(image).load(std::memory_order_relaxed))) {
    case NvmeTarget::kHost:
      return false;
    case NvmeTarget::kNvme:
      return plan_.images()[image].elements > 0;
    case NvmeTarget::kAsPlanned:
      break;
  }
  return plan_.images()[image].home;
}

void TierStore::SetTarget(uint32_t image, NvmeTarget wanted) {
  target(image).store(static_cast<uint64_t>(wanted), std::memory_order_relaxed);
}

absl::Status TierStore::Final(absl::Status status) {
  // What was not flushed may be gone, whatever the drive does next.
  if (absl::IsUnavailable(status)) status = absl::DataLossError(status.message());
  if (!status.ok()) KeepFirstError(final_, Annotate(status, "the nvme tier is failed"));
  return status;
}

absl::Status TierStore::Begin(uint64_t attempt, uint64_t step) {
  ZS_RETURN_IF_ERROR(final_);
  if (sealed_.has_value() && sealed_->attempt != attempt) {
    ZS_RETURN_IF_ERROR(Final(manifest_->Revoke()));
    sealed_.reset();
  }
  open_ = false;
  ZS_RETURN_IF_ERROR(table_->Begin(attempt));
  attempt_ = attempt;
  step_ = step;
  open_ = true;
  return absl::OkStatus();
}

absl::StatusOr<TierPlace> TierStore::Locate(uint32_t image) const {
  const std::optional<SlotImage> current = table_->Current(image);
  if (!current.has_value()) {
    return absl::FailedPreconditionError(
        absl::StrCat("image ", image, " of worker ", options_.worker, " is not on the nvme tier"));
  }
  const SlotPlace& slot = plan_.extents().slot(current->slot);
  return TierPlace{slot.path, slot.offset, *current};
}

absl::Status TierStore::Verify(uint32_t image, const TierPlace& place,
                               std::span<const std::byte> bytes) const {
  const ExpectedImage expected{ImageIdentityOf(image, place), place.image.checksum};
  return VerifyChunkImage(bytes, plan_.shape(image), expected, files_[place.path].name());
}

absl::StatusOr<TierPlace> TierStore::Reserve(uint32_t image) {
  ZS_RETURN_IF_ERROR(final_);
  if (!open_) return absl::FailedPreconditionError("no attempt is open on the nvme tier");
  absl::StatusOr<uint32_t> slot = FindSlot(image);
  if (absl::IsUnavailable(slot.status()) && !quarantined_ && !set_aside_.empty()) {
    // What is written there is verified when it is read, as ever.
    for (const uint32_t damaged : std::exchange(set_aside_, {})) table_->Release(damaged);
    slot = FindSlot(image);
  }
  if (!slot.ok()) {
    exhausted_ |= absl::IsUnavailable(slot.status()) && !quarantined_;
    return slot.status();
  }
  const SlotPlace& place = plan_.extents().slot(*slot);
  return TierPlace{place.path, place.offset, {*slot, table_->generation(), attempt_, step_, 0}};
}

absl::StatusOr<uint32_t> TierStore::FindSlot(uint32_t image) {
  std::vector<uint32_t> durable;
  absl::StatusOr<uint32_t> slot = table_->Reserve(image);
  for (; slot.ok(); slot = table_->Reserve(image)) {
    if (damaged_slots_.erase(*slot) > 0) {
      set_aside_.push_back(*slot);
    } else if (*slot < durable_slots_.size() && durable_slots_[*slot]) {
      durable.push_back(*slot);
    } else {
      break;
    }
  }
  for (const uint32_t other : durable) table_->Release(other);
  return slot;
}

SlotImage TierStore::Encode(uint32_t image, const TierPlace& place,
                            std::span<std::byte> bytes) const {
  SlotImage written = place.image;
  written.checksum = EncodeChunkImage(bytes, plan_.shape(image), ImageIdentityOf(image, place));
  return written;
}

absl::Status TierStore::Complete(uint32_t image, const SlotImage& written) {
  return table_->Complete(image, written);
}

void TierStore::ForgiveIfExhausted() {
  if (!std::exchange(exhausted_, false)) return;
  for (const uint32_t slot : std::exchange(failed_slots_, {})) table_->Release(slot);
}

NvmeManifest TierStore::ManifestOfTable(const std::string& extra, uint64_t revision) const {
  NvmeManifest manifest;
  manifest.revision = revision;
  manifest.generation = table_->generation();
  manifest.attempt = attempt_;
  manifest.step = step_;
  manifest.extra = extra;
  for (uint32_t image = 0; image < table_->chunks(); ++image) {
    const std::optional<SlotImage> prepared = table_->Prepared(image);
    const std::optional<SlotImage> held = prepared.has_value() ? prepared : table_->Current(image);
    manifest.images.push_back(held.value_or(SlotImage{.slot = kNoSlot}));
  }
  return manifest;
}

void TierStore::SetDurable(NvmeManifest manifest) {
  durable_slots_.assign(plan_.extents().slots(), false);
  for (const SlotImage& image : manifest.images) {
    if (image.slot < durable_slots_.size()) durable_slots_[image.slot] = true;
  }
  durable_ = std::move(manifest);
}

bool TierStore::NeedsSeal(uint64_t revision) const {
  if (!power()) return false;
  if (!durable_.has_value() || durable_->attempt != table_->committed() ||
      durable_->revision != revision) {
    return true;
  }
  for (uint32_t image = 0; image < table_->chunks(); ++image) {
    const SlotImage none{.slot = kNoSlot};
    if (table_->Current(image).value_or(none) != durable_->images[image]) return true;
  }
  return false;
}

absl::Status TierStore::Seal(absl::FunctionRef<absl::Status()> sync, const std::string& extra,
                             uint64_t revision) {
  ZS_RETURN_IF_ERROR(final_);
  if (!open_) return absl::FailedPreconditionError("no attempt is open on the nvme tier");
  // A manifest of this attempt may be what the job is committing: it stays as it is.
  if (!power() || (sealed_.has_value() && sealed_->attempt == attempt_)) return absl::OkStatus();
  const bool at_once = attempt_ == table_->committed();
  if (!at_once && !durable_.has_value()) {
    return absl::FailedPreconditionError(
        "the states that an attempt begins with have no manifest: seal them first");
  }
  ZS_RETURN_IF_ERROR(Final(sync()));
  ZS_FAULT_POINT("worker.tier.after_flush");
  NvmeManifest manifest = ManifestOfTable(extra, revision);
  ZS_RETURN_IF_ERROR(Final(manifest_->Prepare(manifest)));
  ZS_FAULT_POINT("worker.tier.after_prepare");
  if (at_once) {
    manifest_->Committed();
    SetDurable(std::move(manifest));
  } else {
    sealed_ = std::move(manifest);
  }
  return absl::OkStatus();
}

absl::Status TierStore::Commit(uint64_t attempt) {
  ZS_FAULT_POINT("worker.tier.before_commit");
  ZS_RETURN_IF_ERROR(table_->Commit(attempt));
  if (sealed_.has_value() && sealed_->attempt == attempt) {
    manifest_->Committed();
    SetDurable(*std::exchange(sealed_, std::nullopt));
  }
  open_ = false;
  return absl::OkStatus();
}

absl::Status TierStore::Forget(uint32_t image) {
  ZS_FAULT_POINT("worker.tier.before_forget");
  table_->Forget(image);
  return absl::OkStatus();
}

void TierStore::Tick() {
  if (!quarantined_) return;
  for (const ExtentFile& file : files_) {
    const absl::StatusOr<bool> drained = file.Drained();
    if (!drained.ok() || !*drained) return;
  }
  table_->ReleaseDrained();
  quarantined_ = false;
}

void TierStore::Abandon() {
  for (ExtentFile& file : files_) std::move(file).Abandon();
}

}  // namespace zeroshard
