#include "tests/fakes/faulty_io_queue.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/status.h"

namespace zeroshard {

FaultyIoQueue::FaultyIoQueue(std::unique_ptr<IoQueue> inner, std::vector<IoFault> faults,
                             uint64_t seed, PowerLossLog* log)
    : table_(inner->depth()),
      operations_by_slot_(inner->depth()),
      faults_(std::move(faults)),
      random_(seed),
      log_(log),
      inner_(std::move(inner)) {}

FaultyIoQueue::~FaultyIoQueue() = default;

std::string FaultyIoQueue::description() const {
  return absl::StrCat(inner_->description(), ", ", faults_.size(), " faults");
}

bool FaultyIoQueue::Applies(const IoFault& fault, const IoTransfer& transfer) {
  const bool is_sync = transfer.operation == IoOperation::kSync;
  const bool is_write = transfer.operation == IoOperation::kWrite;
  switch (fault.kind) {
    case IoFaultKind::kShort:
      return !is_sync && transfer.bytes > kSectorBytes;
    case IoFaultKind::kFlip:
    case IoFaultKind::kMisdirect:
      return !is_sync;
    case IoFaultKind::kTorn:
      return is_write && transfer.bytes > kSectorBytes;
    case IoFaultKind::kLost:
      return is_write || is_sync;
    case IoFaultKind::kError:
    case IoFaultKind::kNever:
    case IoFaultKind::kDelay:
    case IoFaultKind::kReorder:
      return true;
  }
  return false;
}

absl::Status FaultyIoQueue::Submit(const IoTransfer& transfer) {
  const absl::StatusOr<uint32_t> slot = table_.Admit(transfer);
  if (!slot.ok()) return slot.status();
  const std::optional<uint32_t> before = std::exchange(kept_back_, std::nullopt);
  Operation& operation = operations_by_slot_[*slot] = {};
  operation.below = transfer;
  operation.below.tag = *slot;
  // Deadlines are kept here, so that the slot lasts as long as the transfer below.
  operation.below.deadline = Deadline::After(absl::InfiniteDuration());
  const uint64_t number = operations_++;
  for (const IoFault& fault : faults_) {
    if (fault.at == number && Applies(fault, transfer)) operation.fault = fault;
  }
  operation.fault.has_value() ? Inject(*slot) : Begin(*slot);
  if (before.has_value()) Begin(*before);
  return absl::OkStatus();
}

void FaultyIoQueue::Inject(uint32_t slot) {
  Operation& operation = operations_by_slot_[slot];
  IoTransfer& below = operation.below;
  ++injected_;
  switch (operation.fault->kind) {
    case IoFaultKind::kError:
      return End(slot, TransferError(below, operation.fault->error));
    case IoFaultKind::kLost:
      return End(slot, absl::OkStatus());
    case IoFaultKind::kNever:
      never_.push_back(slot);
      return;
    case IoFaultKind::kReorder:
      kept_back_ = slot;
      return;
    case IoFaultKind::kShort: {
      const size_t unit = below.bytes > kDirectIoAlignment ? kDirectIoAlignment : kSectorBytes;
      below.bytes = unit * (1 + random_() % ((below.bytes - 1) / unit));
      operation.phase = Phase::kFirstPiece;
      break;
    }
    case IoFaultKind::kTorn:
      CopyOf(slot);
      below.operation = IoOperation::kRead;
      operation.phase = Phase::kOldContents;
      break;
    case IoFaultKind::kFlip:
      if (below.operation == IoOperation::kWrite) {
        CopyOf(slot);
        FlipBit(below.memory, below.bytes);
      }
      break;
    case IoFaultKind::kMisdirect:
      below.offset = below.offset >= kDirectIoAlignment ? below.offset - kDirectIoAlignment
                                                        : below.offset + kDirectIoAlignment;
      break;
    case IoFaultKind::kDelay:
      break;
  }
  Begin(slot);
}

// The transfer below now uses a copy of the caller's memory.
void FaultyIoQueue::CopyOf(uint32_t slot) {
  Operation& operation = operations_by_slot_[slot];
  absl::StatusOr<AlignedBuffer> copy = AlignedBuffer::Make(operation.below.bytes);
  ZS_CHECK(copy.ok(), "memory for a copy");
  operation.copy.emplace(*std::move(copy));
  std::memcpy(operation.copy->data(), operation.below.memory, operation.below.bytes);
  operation.below.memory = operation.copy->data();
}

void FaultyIoQueue::FlipBit(std::byte* memory, size_t bytes) {
  memory[random_() % bytes] ^= static_cast<std::byte>(1u << (random_() % 8));
}

void FaultyIoQueue::Begin(uint32_t slot) {
  Operation& operation = operations_by_slot_[slot];
  const IoTransfer& below = operation.below;
  if (log_ != nullptr && below.operation == IoOperation::kWrite) {
    operation.logged = log_->BeginWrite(below.fd, below.offset, {below.memory, below.bytes});
  } else if (log_ != nullptr && below.operation == IoOperation::kSync) {
    operation.logged = log_->BeginSync(below.fd);
  }
  const absl::Status status = inner_->Submit(below);
  if (!status.ok()) End(slot, status);
}

void FaultyIoQueue::OnInner(uint32_t slot, const absl::Status& status) {
  Operation& operation = operations_by_slot_[slot];
  if (status.ok() && operation.logged.has_value()) {
    log_->End(*operation.logged);
    operation.logged.reset();
  }
  if (operation.phase == Phase::kFirstPiece && status.ok()) return OnFirstPiece(slot);
  if (operation.phase == Phase::kOldContents) return OnOldContents(slot, status);
  OnLast(slot, status);
}

void FaultyIoQueue::OnFirstPiece(uint32_t slot) {
  Operation& operation = operations_by_slot_[slot];
  const IoTransfer& whole = table_.progress(slot).transfer();
  const size_t done = operation.below.bytes;
  operation.below.memory = whole.memory + done;
  operation.below.bytes = whole.bytes - done;
  operation.below.offset = whole.offset + done;
  operation.phase = Phase::kLast;
  Begin(slot);
}

// Sectors that a torn write does not reach keep what the file held, or zeros beyond its end.
void FaultyIoQueue::OnOldContents(uint32_t slot, const absl::Status& status) {
  Operation& operation = operations_by_slot_[slot];
  IoTransfer& below = operation.below;
  if (!status.ok()) std::memset(below.memory, 0, below.bytes);
  const size_t sectors = random_() % ((below.bytes - 1) / kSectorBytes + 1);
  std::memcpy(below.memory, table_.progress(slot).transfer().memory, sectors * kSectorBytes);
  below.operation = IoOperation::kWrite;
  operation.phase = Phase::kLast;
  Begin(slot);
}

void FaultyIoQueue::OnLast(uint32_t slot, const absl::Status& status) {
  Operation& operation = operations_by_slot_[slot];
  const IoTransfer& whole = table_.progress(slot).transfer();
  const std::optional<IoFault>& fault = operation.fault;
  if (fault.has_value() && fault->kind == IoFaultKind::kFlip && status.ok() &&
      whole.operation == IoOperation::kRead) {
    FlipBit(whole.memory, whole.bytes);
  }
  if (fault.has_value() && fault->kind == IoFaultKind::kDelay) {
    operation.phase = Phase::kHeld;
    operation.status = status;
    operation.waits = 1 + static_cast<int>(random_() % 4);
    held_.push_back(slot);
    return;
  }
  End(slot, status);
}

void FaultyIoQueue::End(uint32_t slot, const absl::Status& status) {
  operations_by_slot_[slot].copy.reset();
  table_.Finish(slot, status);
}

std::vector<IoCompletion> FaultyIoQueue::Wait(size_t min, const Deadline& deadline) {
  if (closed_) return {};
  const size_t want = std::min(min, table_.completions() + table_.unreported());
  ReleaseHeld(/*all=*/false);
  Pump(0, Deadline::After(absl::ZeroDuration()));
  table_.Expire();
  while (table_.completions() < want && !deadline.Passed()) {
    const bool idle = inner_->in_flight() == 0;
    if (!idle || !ReleaseHeld(/*all=*/true)) {
      const absl::Duration left = std::min(deadline.Remaining(), table_.NextDeadline().Remaining());
      if (idle) {
        absl::SleepFor(left);  // only operations that never complete are left
      } else {
        Pump(1, Deadline::After(left));
      }
    }
    table_.Expire();
  }
  return table_.TakeCompletions();
}

void FaultyIoQueue::Pump(size_t min, const Deadline& deadline) {
  for (const IoCompletion& completion : inner_->Wait(min, deadline)) {
    OnInner(static_cast<uint32_t>(completion.tag), completion.status);
  }
}

// Lets go of what is kept back: all of it, or what has been held long enough. False if there is
// nothing.
bool FaultyIoQueue::ReleaseHeld(bool all) {
  bool released = false;
  if (all && kept_back_.has_value()) {
    Begin(*std::exchange(kept_back_, std::nullopt));
    released = true;
  }
  for (const uint32_t slot : std::exchange(held_, {})) {
    Operation& operation = operations_by_slot_[slot];
    if (!all && --operation.waits > 0) {
      held_.push_back(slot);
      continue;
    }
    End(slot, operation.status);
    released = true;
  }
  return released;
}

std::vector<uint64_t> FaultyIoQueue::Close(const Deadline& deadline) {
  if (std::exchange(closed_, true)) return {};
  kept_back_.reset();
  const std::vector<uint64_t> below = inner_->Close(deadline);
  for (const uint32_t slot : table_.SlotsInUse()) {
    const bool stuck = std::find(below.begin(), below.end(), slot) != below.end();
    if (stuck && operations_by_slot_[slot].copy.has_value()) {
      std::move(*operations_by_slot_[slot].copy).Abandon();
    }
    const bool never = std::find(never_.begin(), never_.end(), slot) != never_.end();
    if (!stuck && !never) End(slot, absl::CancelledError());
  }
  table_.CloseForGood();
  return table_.TagsInUse();
}

}  // namespace zeroshard
