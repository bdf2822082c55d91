#include "storage/io_transfer_table.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"

namespace zeroshard {

IoTransferTable::IoTransferTable(size_t depth) : slots_(depth) {
  ZS_CHECK(depth >= 1 && depth <= kMaxIoDepth, "the depth of an I/O queue");
  free_.reserve(depth);
  for (size_t slot = depth; slot > 0; --slot) free_.push_back(static_cast<uint32_t>(slot - 1));
}

absl::StatusOr<uint32_t> IoTransferTable::Admit(const IoTransfer& transfer) {
  if (closed_) return absl::FailedPreconditionError("the I/O queue is closed");
  if (!failure_.ok()) return Annotate(failure_, "the I/O queue has failed");
  ZS_RETURN_IF_ERROR(CheckTransfer(transfer));
  if (free_.empty()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the I/O queue is full: ", slots_.size(), " transfers are in flight"));
  }
  const uint32_t slot = free_.back();
  free_.pop_back();
  slots_[slot] = {TransferProgress(transfer), clock_.Elapsed() + transfer.deadline.Remaining(),
                  true, false};
  ++unreported_;
  return slot;
}

bool IoTransferTable::Advance(uint32_t slot, int64_t result) {
  std::optional<absl::Status> end = slots_[slot].progress.Advance(result);
  if (!end.has_value() && !slots_[slot].reported && !closed_) return true;
  Finish(slot, end.value_or(absl::CancelledError()));
  return false;
}

void IoTransferTable::Finish(uint32_t slot, const absl::Status& status) {
  ZS_CHECK(slots_[slot].used, "a transfer ended twice");
  Report(slots_[slot], status);
  slots_[slot].used = false;
  free_.push_back(slot);
}

void IoTransferTable::Report(Slot& slot, const absl::Status& status) {
  if (std::exchange(slot.reported, true)) return;
  --unreported_;
  if (!closed_) completions_.push_back({slot.progress.transfer().tag, status});
}

std::vector<uint32_t> IoTransferTable::Expire() {
  std::vector<uint32_t> late;
  const absl::Duration now = clock_.Elapsed();
  for (uint32_t slot = 0; slot < slots_.size(); ++slot) {
    Slot& entry = slots_[slot];
    if (!entry.used || entry.reported || entry.expires > now) continue;
    const absl::Status status = TransferTimedOut(entry.progress.transfer());
    KeepFirstError(failure_, status);
    Report(entry, status);
    late.push_back(slot);
  }
  return late;
}

Deadline IoTransferTable::NextDeadline() const {
  absl::Duration next = absl::InfiniteDuration();
  for (const Slot& slot : slots_) {
    if (slot.used && !slot.reported) next = std::min(next, slot.expires);
  }
  return Deadline::After(next - clock_.Elapsed());
}

void IoTransferTable::FailAll(const absl::Status& failure) {
  KeepFirstError(failure_, failure);
  for (Slot& slot : slots_) {
    if (slot.used) Report(slot, failure);
  }
}

void IoTransferTable::CloseForGood() {
  closed_ = true;
  completions_.clear();
}

std::vector<uint32_t> IoTransferTable::SlotsInUse() const {
  std::vector<uint32_t> used;
  for (uint32_t slot = 0; slot < slots_.size(); ++slot) {
    if (slots_[slot].used) used.push_back(slot);
  }
  return used;
}

std::vector<uint64_t> IoTransferTable::TagsInUse() const {
  std::vector<uint64_t> tags;
  for (const uint32_t slot : SlotsInUse()) tags.push_back(slots_[slot].progress.transfer().tag);
  return tags;
}

std::vector<IoCompletion> IoTransferTable::TakeCompletions() {
  return std::exchange(completions_, {});
}

}  // namespace zeroshard
