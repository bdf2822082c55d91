// RequestChannel: numbered requests of one rank, and how each of them ended.
//
//   Submit -> PendingRequests -> Stream -> worker
//   Wait  <- Completions (the page; outcome) and failures (the stream; reasons)
//
// A waiter looks at the page, then sleeps on it in slices, and between slices looks at the news
// that are not in the page: a reason, a poisoned job, a lost worker, its own deadline. The first
// failure of the whole channel sticks. Any thread, except that Close and the destructor come last.
#ifndef ZEROSHARD_CLIENT_REQUEST_CHANNEL_H_
#define ZEROSHARD_CLIENT_REQUEST_CHANNEL_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/completion_watcher.h"
#include "client/completions.h"
#include "client/pending_requests.h"
#include "client/stream.h"
#include "proto/trainer.pb.h"

namespace zeroshard {

class RequestChannel final : private StreamOwner {
 public:
  // Opens the stream. `page` must outlive the channel; `timeout` is the one of Submit and the
  // default of Wait. `interrupted`, when set, is asked now and then by blocked calls; true ends
  // them.
  static absl::StatusOr<std::unique_ptr<RequestChannel>> Open(
      const RankPage& page, Stream::Options options, absl::Duration timeout,
      std::function<bool()> interrupted = {});
  ~RequestChannel() override;

  const trainer::v1::HelloReply& hello() const { return stream_->hello(); }
  const Completions& completions() const { return completions_; }
  absl::Duration timeout() const { return timeout_; }
  uint64_t reconnects() const { return stream_->reconnects(); }

  // Called with the request's id before it is sent; an error refuses the request and uses no id.
  using Prepare = std::function<absl::Status(uint64_t id)>;
  // Sends a request, after waiting for a free completion slot where there is none. A step is
  // refused with the failure of an earlier request that nobody has waited for.
  absl::StatusOr<uint64_t> Submit(trainer::v1::SessionRequest request, const Prepare& prepare = {});

  // As in Session.
  absl::Status Wait(uint64_t id, absl::Duration timeout);
  bool Done(uint64_t id) const;
  void OnComplete(uint64_t id, std::function<void(absl::Status)> callback);

  // Returns OK once `ready` returns true, which is asked again whenever the page has changed; else
  // an error that says `what` was waited for.
  absl::Status Await(const std::function<bool()>& ready, absl::Duration timeout,
                     const std::function<std::string()>& what);

  // OK, or why nothing will ever complete again.
  absl::Status Health();
  // Asked by waiting calls now and then; an error ends them all, as Close. Before any other thread
  // uses the channel.
  void Watch(std::function<absl::Status()> monitor) { monitor_ = std::move(monitor); }

  // All calls now under way and later ones fail with `reason`; the connection ends.
  void Close(absl::Status reason);

 private:
  struct FailedRequest {
    absl::Status reason;    // OK: has not arrived yet
    bool reported = false;  // a Wait or Step has returned it
  };

  RequestChannel(const RankPage& page, absl::Duration timeout, std::function<bool()> interrupted);

  void WithUnfinished(const std::function<void(const std::vector<SharedRequest>&)>&) override;
  void OnFailure(uint64_t id, absl::Status reason) override;
  void OnBroken(absl::Status reason) override;
  absl::Status Verdict() const override { return completions_.PoisonReason(); }

  // Keeps the first reason why nothing will complete any more.
  void Fail(const absl::Status& reason);
  std::string Describe(uint64_t id) const;
  std::optional<absl::Status> Poll(uint64_t id);
  absl::Status Settle(uint64_t id, Completions::Outcome outcome);
  // The reason of a failed request; waits a moment for it.
  absl::Status ReasonOf(uint64_t id);
  // The first failure below `end` that nobody was told of, or OK.
  absl::Status UnreportedFailure(uint64_t end);
  void RetireLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::StatusOr<std::optional<uint64_t>> TrySubmit(trainer::v1::SessionRequest& request,
                                                    const Prepare& prepare);

  const Completions completions_;
  const absl::Duration timeout_;
  const std::function<bool()> interrupted_;
  std::function<absl::Status()> monitor_;  // set before it is used
  std::atomic<uint64_t> next_id_{1};
  std::atomic<uint64_t> last_step_id_{0};

  mutable absl::Mutex mu_;
  PendingRequests pending_ ABSL_GUARDED_BY(mu_);
  std::map<uint64_t, FailedRequest> failures_ ABSL_GUARDED_BY(mu_);
  absl::Status sticky_ ABSL_GUARDED_BY(mu_);

  std::unique_ptr<Stream> stream_;  // set by Open
  CompletionWatcher watcher_;       // last: its thread uses all of the above
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_REQUEST_CHANNEL_H_
