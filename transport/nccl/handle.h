// NcclHandle: a communicator of NCCL, and when it may be touched.
//
// NCCL's calls on one communicator are not safe side by side: even the look at the asynchronous
// error completes what is pending. So one call is in NCCL at a time; none is made once the
// communicator is dead, and the abort, which frees it, waits for the call in progress (for a
// second; a call that does not return then is what the abort is to end).
//
// Any thread. Held by a shared pointer, as the thread that aborts can outlive its owner.
#ifndef ZEROSHARD_TRANSPORT_NCCL_HANDLE_H_
#define ZEROSHARD_TRANSPORT_NCCL_HANDLE_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "transport/nccl/api.h"
#include "transport/nccl/communicator.h"
#include "transport/nccl/library.h"

namespace zeroshard {

class NcclHandle : public std::enable_shared_from_this<NcclHandle> {
 public:
  // Of options those of the communicator. `who` begins all messages: "rank 1 of 4 of gpt generation
  // 3". NCCL keeps a pointer to `name`.
  NcclHandle(NcclLibrary library, const NcclOptions& options,
             std::shared_ptr<const std::string> name, std::string who, ncclComm_t comm = nullptr)
      : library_(std::move(library)),
        alive_(options.alive),
        name_(std::move(name)),
        who_(std::move(who)),
        comm_(comm) {}

  const NcclLibrary& library() const { return library_; }
  const std::string& who() const { return who_; }

  // One call into NCCL (or a group of calls); ncclInProgress is no failure. `what` is for messages.
  absl::Status Call(std::string_view what, const std::function<ncclResult_t(ncclComm_t&)>& call);

  // Whether nothing is pending in NCCL's own threads; its asynchronous error is a failure.
  absl::StatusOr<bool> Ready(std::string_view what);

  // What options.alive says; an error is a failure.
  absl::Status CheckAlive();

  // The communicator is there: from now on what NCCL calls a wrong use is a bug, not a wrong
  // set-up.
  void SetMade() { made_.store(true); }

  // Waits until Ready; the deadline is a failure.
  absl::Status Settle(std::string_view what, absl::Duration timeout);

  // ncclCommSplit; `name` is the new communicator's.
  absl::StatusOr<ncclComm_t> Split(int color, int key, std::shared_ptr<const std::string> name,
                                   absl::Duration timeout);

  // The first failure sticks and is returned.
  absl::Status Fail(const absl::Status& reason);
  absl::Status failure() const;

  // ncclCommAbort on a thread of its own, begun by the first call; whether it has ended in time.
  bool Abort(absl::Duration timeout);

  // The communicator has been freed by other means.
  void Forget();

 private:
  absl::Status Enter();
  void Leave();
  void RunAbort();
  absl::Status Describe(ncclResult_t result, std::string_view what) const;

  // Constant after construction.
  const NcclLibrary library_;
  const std::function<absl::Status()> alive_;
  const std::shared_ptr<const std::string> name_;
  const std::string who_;

  std::atomic<bool> made_ = false;
  mutable absl::Mutex mu_;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
  bool calling_ ABSL_GUARDED_BY(mu_) = false;
  bool aborting_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  // Touched by the call in progress, and by the abort once no other call can begin.
  ncclComm_t comm_;
  // NCCL writes what it split off here when it is done, which may be after our deadline. One thread
  // splits at a time.
  ncclComm_t split_off_ = nullptr;
};

// Waits a little longer each time: a yield at first, then sleeps up to half a millisecond.
class Backoff {
 public:
  void Wait();

 private:
  int turns_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TRANSPORT_NCCL_HANDLE_H_
