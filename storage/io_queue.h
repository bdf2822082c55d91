// IoQueue: whole asynchronous transfers between memory of the caller and files.
//
// Implementations: io_uring (storage/io_uring_queue.h) and a pool of threads
// (storage/io_thread_queue.h), chosen by storage/io_backend.h. Nothing survives the process.
//
// Threads: a queue is made, used and destroyed by one thread. That thread alone learns of
// completions and of deadlines, in Wait; transfers themselves go on while it does other things,
// except that what is left of a short transfer is only begun inside Wait.
//
// Ownership: the memory of a transfer belongs to the queue from a successful Submit until Wait has
// reported the transfer; if it was reported with DeadlineExceeded, or as lost with the queue, until
// Close has returned without its tag or the destructor has returned. A write's memory must not
// change in that time, and a read's means nothing. Descriptors are the caller's and stay open as
// long.
//
// Order: transfers are done in any order. A sync makes durable the writes of its file that Wait had
// reported before the sync was submitted, and promises nothing for others: count completions first.
//
// Failure: a transfer is reported exactly once, after all of its bytes have moved or with an error
// that names operation, file and offset: DataLoss for the end of the file inside a read, else by
// errno (base/status.h); how many of its bytes moved is then unknown. Errors of transfers leave the
// queue as it is. A transfer that passes its deadline, or a kernel that refuses the queue's own
// system calls, fails the queue for good: Submit then returns that first failure, transfers in
// flight are still reported.
#ifndef ZEROSHARD_STORAGE_IO_QUEUE_H_
#define ZEROSHARD_STORAGE_IO_QUEUE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/deadline.h"

namespace zeroshard {

// What memory, offset and length of transfers on a descriptor opened with O_DIRECT are multiples
// of. Other descriptors take any.
inline constexpr size_t kDirectIoAlignment = 4096;

inline constexpr size_t kMaxIoDepth = 4096;

enum class IoOperation : uint8_t { kRead, kWrite, kSync };

struct IoTransfer {
  IoOperation operation = IoOperation::kRead;
  int fd = -1;
  std::byte* memory = nullptr;  // of a sync: null
  size_t bytes = 0;             // of a sync: 0
  uint64_t offset = 0;          // of a sync: 0
  uint64_t tag = 0;             // comes back in the completion; need not be unique
  Deadline deadline = Deadline::After(absl::InfiniteDuration());
  // Others follow at once: it may be begun with them, at the latest in the next Wait.
  bool more = false;
};

struct IoCompletion {
  uint64_t tag = 0;
  absl::Status status;
};

class IoQueue {
 public:
  // Cancels what can be cancelled and returns when nothing is in flight any more, however long that
  // takes: no memory is touched afterwards. After a Close that returned tags it does not wait
  // again. What has not been reported is not. Aborts the process when the kernel no longer lets the
  // queue wait, unless Close was called.
  virtual ~IoQueue() = default;

  // Takes a transfer on; does not wait for other transfers or for the device. ResourceExhausted
  // when `depth()` transfers are in flight; InvalidArgument for one that cannot be (a negative
  // descriptor, no memory, no bytes, an end beyond 2^63 - 1); the first failure when the queue has
  // failed; FailedPrecondition after Close. Then nothing is kept and nothing will be reported.
  virtual absl::Status Submit(const IoTransfer& transfer) = 0;

  // Returns the completions there are, in the order in which they were learned of, once there are
  // `min`, or as many as can still come, or at `deadline`. Transfers past their own deadline are
  // cancelled, and reported with DeadlineExceeded. Nothing after Close.
  virtual std::vector<IoCompletion> Wait(size_t min, const Deadline& deadline) = 0;

  // Ends the queue within a time: cancels what can be cancelled, waits until nothing is in flight
  // or `deadline` passes, drops what was not reported. Returns the tags of the transfers that the
  // kernel still holds. Their memory may be read or written at any later time, also after the
  // queue is destroyed: never free or use it again in this process, nor close their descriptors.
  // Empty when called again.
  [[nodiscard]] virtual std::vector<uint64_t> Close(const Deadline& deadline) = 0;

  // How many transfers may be in flight.
  virtual size_t depth() const = 0;

  // How many transfers' memory the queue owns now, besides those in completions not yet collected.
  virtual size_t in_flight() const = 0;

  // Which implementation, with its settings and what it had to do without; for logs.
  virtual std::string description() const = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_IO_QUEUE_H_
