// NcclCommunicator: one rank's end of an NCCL communicator that never blocks its caller for good.
//
// The communicator is of NCCL's non-blocking kind: each call is followed by a look at the
// asynchronous error until the work is on the stream or the deadline has passed, and a wait for a
// stream looks at both. After its first failure (an error of NCCL, a deadline, Interrupt) it is
// dead: that reason is what every later call returns, and what is on the streams may never end
// until Abort. Recovery is a new communicator under a new unique id, never a retry.
//
// Operations move bytes and are put on the caller's stream in the order of the calls, which must be
// the same on all ranks: NCCL does not notice a difference, it hangs, and the deadline of
// Synchronize is what ends it. The order check of the control plane (worker/) names the ranks that
// differ.
//
// Threads: operations by one thread at a time, whose current CUDA context is the communicator's
// device (a second thread inside is refused, FailedPrecondition, nothing is enqueued; several in
// turn are fine); the same for all communicators of a device, PyTorch's own included: NCCL can
// deadlock when ranks launch them in different orders. Poll, Synchronize, Interrupt and Abort from
// any thread. The object must outlive all calls. Buffers must stay mapped until the stream has
// passed the operation, or Abort returned true.
#ifndef ZEROSHARD_TRANSPORT_NCCL_COMMUNICATOR_H_
#define ZEROSHARD_TRANSPORT_NCCL_COMMUNICATOR_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "transport/nccl/library.h"

struct CUstream_st;  // CUstream and cudaStream_t

namespace zeroshard {

class NcclHandle;  // transport/nccl/handle.h

// Device memory. Zero bytes: no transfer, on both ends.
struct NcclBuffer {
  uint64_t address = 0;
  uint64_t bytes = 0;
};

// Rank r's `send` arrives in `receive[r]` of every rank; both have the same size on all ranks.
// In place where send is receive[own rank]; any other overlap is the caller's mistake. Where the
// pieces lie to each other is the same on all ranks.
struct NcclGather {
  NcclBuffer send;
  std::vector<NcclBuffer> receive;  // by rank
};

struct NcclMessage {
  uint32_t peer = 0;
  NcclBuffer buffer;
};

// `send` is read on the root only, `receive` written on every rank.
struct NcclBroadcast {
  uint32_t root = 0;
  NcclBuffer send;
  NcclBuffer receive;
};

struct NcclOptions {
  // Of creation, of a split, of putting one operation on a stream (the first between two ranks also
  // connects them) and of Close.
  absl::Duration timeout = absl::Minutes(2);
  // How long the destructor waits for an abort before it gives the communicator up.
  absl::Duration abort_timeout = absl::Seconds(5);
  // OK, or why waiting is vain: asked during all waits, so that the death of a generation ends
  // them. Any thread that waits calls it.
  std::function<absl::Status()> alive = {};
  // For messages of errors and, from 2.27 on, NCCL's own log and profilers: "gpt generation 3".
  std::string name = "zeroshard";
};

class NcclCommunicator {
 public:
  // All ranks call this with the same id at about the same time, each with its device's context
  // current. DeadlineExceeded when not all came in time; FailedPrecondition for ranks that share a
  // GPU, and where NCCL_COMM_BLOCKING makes NCCL block.
  static absl::StatusOr<std::unique_ptr<NcclCommunicator>> Create(const NcclLibrary& library,
                                                                  const NcclUniqueId& id,
                                                                  uint32_t rank, uint32_t ranks,
                                                                  const NcclOptions& options);
  // Aborts what was neither closed nor aborted, for at most options.abort_timeout.
  ~NcclCommunicator();
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // All ranks call this; those with the same colour get a communicator in which they are ordered by
  // their rank here. It does not outlive this one. FailedPrecondition where NCCL cannot split.
  absl::StatusOr<std::unique_ptr<NcclCommunicator>> Split(std::span<const uint32_t> color_of_rank);

  uint32_t rank() const { return rank_; }
  uint32_t ranks() const { return ranks_; }
  // Operations put on a stream since creation; equal on all ranks that are in step.
  uint64_t operations() const { return operations_.load(std::memory_order_relaxed); }

  // All gathers as one operation. One whose pieces are of one size and lie one after the other is
  // NCCL's all-gather, any other a broadcast from each rank that sends something.
  absl::Status AllGather(CUstream_st* stream, std::span<const NcclGather> gathers);
  absl::Status AllGather(CUstream_st* stream, const NcclGather& gather) {
    return AllGather(stream, std::span(&gather, 1));
  }

  // All-to-all with sizes, as one operation: `sends[r]` goes to rank r and arrives in its
  // `receives[own rank]`, which must have the same size. Both by rank; the own part is copied.
  absl::Status Exchange(CUstream_st* stream, std::span<const NcclBuffer> sends,
                        std::span<const NcclBuffer> receives);

  // The same with any number of messages between two ranks, which match in the order of the lists.
  absl::Status Exchange(CUstream_st* stream, std::span<const NcclMessage> sends,
                        std::span<const NcclMessage> receives);

  // All broadcasts as one operation, in the same order on all ranks.
  absl::Status Broadcast(CUstream_st* stream, std::span<const NcclBroadcast> broadcasts);

  // Makes transfers from and to this memory free of staging copies, where NCCL, the network and the
  // kind of memory allow it. Of a transfer both ends are registered, on all ranks, or none is. The
  // memory is one allocation, is registered before it is used, and stays mapped until it is given
  // back, Close, or Abort returned true. Without the feature: OK, and nothing is done.
  bool registers() const;  // the same on all ranks, as their versions are
  absl::Status Register(const NcclBuffer& buffer);
  absl::Status Unregister(const NcclBuffer& buffer);

  // OK, or why the communicator is dead. Looks at NCCL's asynchronous error.
  absl::Status Poll();

  // Waits until `done` (CudaStream::Query of the stream that operations were put on, or of a later
  // event) says true. Looks at the asynchronous error as it waits, so a dead peer does not hang the
  // caller: DeadlineExceeded after `timeout`, and the communicator is dead. A failure of `done`
  // also ends it.
  absl::Status Synchronize(const std::function<absl::StatusOr<bool>()>& done,
                           absl::Duration timeout);

  // The communicator is dead for this reason (unless it was before); all waits end with it. For the
  // news that a rank died, which come by the control plane long before a deadline passes.
  void Interrupt(const absl::Status& reason);

  // Begins what Abort waits for. With several communicators on a device all are begun before one is
  // waited for: freeing one waits for the device, on which the others' operations hang.
  void BeginAbort();

  // Ends what is on the streams and frees the communicator. NCCL's abort can hang itself, so it
  // runs on a thread of its own: false when that has not ended after `timeout`; thread and
  // communicator are then given up, buffers and streams must be left as they are, and the log says
  // so. Once it returned true or after Close, true at once.
  bool Abort(absl::Duration timeout);

  // An orderly end: all ranks call it, when all operations are over. Aborts when that fails.
  absl::Status Close();

 private:
  class Issue;
  NcclCommunicator(std::shared_ptr<NcclHandle> handle, uint32_t rank, uint32_t ranks,
                   const NcclOptions& options);

  absl::Status CheckMessages(std::span<const NcclMessage> messages) const;

  const uint32_t rank_;
  const uint32_t ranks_;
  const NcclOptions options_;
  // Shared with the thread that aborts.
  const std::shared_ptr<NcclHandle> handle_;
  std::atomic<bool> issuing_ = false;
  std::atomic<uint64_t> operations_ = 0;
  // Of registrations by address. Guarded by issuing_.
  std::map<uint64_t, void*> registrations_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TRANSPORT_NCCL_COMMUNICATOR_H_
