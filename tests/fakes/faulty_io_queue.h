// FaultyIoQueue: an IoQueue over a real one that does something wrong at chosen operations.
//
// Operations are counted from 0 in the order of accepted Submits, so that a sweep can put a fault
// at operation 0, 1, 2 ... until injected() stays 0. Without faults it behaves as the queue below
// it. With a PowerLossLog it also records what reaches the device, faults included.
#ifndef ZEROSHARD_TESTS_FAKES_FAULTY_IO_QUEUE_H_
#define ZEROSHARD_TESTS_FAKES_FAULTY_IO_QUEUE_H_

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "storage/aligned_buffer.h"
#include "storage/io_queue.h"
#include "storage/io_transfer_table.h"
#include "tests/fakes/power_loss_log.h"

namespace zeroshard {

enum class IoFaultKind : uint8_t {
  // Told to the caller.
  kError,  // `error`; the device sees nothing
  kNever,  // does not complete
  // Not to be noticed by the caller.
  kShort,    // the device takes it in two pieces
  kDelay,    // reported some Waits later than it could be
  kReorder,  // handed to the device after the next operation
  // Not told to the caller: the operation is reported as done.
  kFlip,       // one bit is wrong: of what is written, or of what is read
  kTorn,       // only the first sectors of a write reach the file
  kMisdirect,  // done kDirectIoAlignment bytes beside the place
  kLost,       // a write or sync that is not done at all
};

struct IoFault {
  uint64_t at = 0;
  IoFaultKind kind = IoFaultKind::kError;
  int error = EIO;
};

class FaultyIoQueue final : public IoQueue {
 public:
  // `seed` chooses bits, sectors and delays. `log` may be null, and must outlive the queue.
  FaultyIoQueue(std::unique_ptr<IoQueue> inner, std::vector<IoFault> faults, uint64_t seed,
                PowerLossLog* log = nullptr);
  ~FaultyIoQueue() override;

  absl::Status Submit(const IoTransfer& transfer) override;
  std::vector<IoCompletion> Wait(size_t min, const Deadline& deadline) override;
  std::vector<uint64_t> Close(const Deadline& deadline) override;
  size_t depth() const override { return table_.depth(); }
  size_t in_flight() const override { return table_.in_flight(); }
  std::string description() const override;

  uint64_t operations() const { return operations_; }
  // Faults that were injected. One for an operation that it means nothing to is not (a torn read).
  uint64_t injected() const { return injected_; }

 private:
  enum class Phase : uint8_t { kFirstPiece, kOldContents, kLast, kHeld };
  struct Operation {
    std::optional<IoFault> fault;
    Phase phase = Phase::kLast;
    IoTransfer below;  // what the inner queue is, or will be, asked for
    std::optional<AlignedBuffer> copy;
    std::optional<uint64_t> logged;
    absl::Status status;  // while held
    int waits = 0;        // while held
  };

  static bool Applies(const IoFault& fault, const IoTransfer& transfer);
  void Inject(uint32_t slot);
  void Begin(uint32_t slot);
  void CopyOf(uint32_t slot);
  void OnInner(uint32_t slot, const absl::Status& status);
  void OnFirstPiece(uint32_t slot);
  void OnOldContents(uint32_t slot, const absl::Status& status);
  void OnLast(uint32_t slot, const absl::Status& status);
  void End(uint32_t slot, const absl::Status& status);
  void FlipBit(std::byte* memory, size_t bytes);
  void Pump(size_t min, const Deadline& deadline);
  bool ReleaseHeld(bool all);

  IoTransferTable table_;
  std::vector<Operation> operations_by_slot_;
  const std::vector<IoFault> faults_;
  std::mt19937_64 random_;
  PowerLossLog* const log_;
  std::optional<uint32_t> kept_back_;  // reordered, not begun
  std::vector<uint32_t> held_;         // done, not reported
  std::vector<uint32_t> never_;
  uint64_t operations_ = 0;
  uint64_t injected_ = 0;
  bool closed_ = false;
  std::unique_ptr<IoQueue> inner_;  // destroyed first: it writes from the copies
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_FAKES_FAULTY_IO_QUEUE_H_
