// IoTransferTable: the transfers that a queue has taken on, from Submit to their report.
//
// The common part of the implementations of IoQueue: who is in flight, who is late, what is to be
// reported, and the first failure. Owned and used by one queue, in its one thread.
#ifndef ZEROSHARD_STORAGE_IO_TRANSFER_TABLE_H_
#define ZEROSHARD_STORAGE_IO_TRANSFER_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/deadline.h"
#include "storage/io_queue.h"
#include "storage/io_transfer.h"

namespace zeroshard {

class IoTransferTable {
 public:
  // `depth` from 1 to kMaxIoDepth.
  explicit IoTransferTable(size_t depth);

  // Gives a slot to a transfer, or refuses it as IoQueue::Submit does.
  absl::StatusOr<uint32_t> Admit(const IoTransfer& transfer);

  const TransferProgress& progress(uint32_t slot) const { return slots_[slot].progress; }

  // Takes the kernel's answer for a slot. True when there is more to ask for; else the slot is
  // free. A late slot ends with any answer.
  bool Advance(uint32_t slot, int64_t result);

  // Frees a slot and reports its status, unless it was reported as late.
  void Finish(uint32_t slot, const absl::Status& status);

  // Reports transfers past their deadlines, fails, and returns their slots, which stay in use.
  std::vector<uint32_t> Expire();

  // The earliest deadline of those in flight that are not reported yet.
  Deadline NextDeadline() const;

  // Keeps the first failure, and reports all that are in flight with it; the slots stay in use.
  void FailAll(const absl::Status& failure);

  // Refuses transfers from now on and drops what was not reported.
  void CloseForGood();

  std::vector<uint32_t> SlotsInUse() const;
  std::vector<uint64_t> TagsInUse() const;

  // How many of those in flight are still to be reported.
  size_t unreported() const { return unreported_; }
  size_t in_flight() const { return slots_.size() - free_.size(); }
  size_t depth() const { return slots_.size(); }
  const absl::Status& failure() const { return failure_; }

  size_t completions() const { return completions_.size(); }
  std::vector<IoCompletion> TakeCompletions();

 private:
  struct Slot {
    TransferProgress progress{IoTransfer{}};
    absl::Duration expires;  // on clock_
    bool used = false;
    bool reported = false;
  };

  void Report(Slot& slot, const absl::Status& status);

  SystemClock clock_;
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  std::vector<IoCompletion> completions_;
  size_t unreported_ = 0;
  bool closed_ = false;
  absl::Status failure_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_IO_TRANSFER_TABLE_H_
