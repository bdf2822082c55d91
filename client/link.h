// Link: one connection of a Stream, from Hello to its end. Only for stream.cc.
//
// A reactor of gRPC's callback API: writes are started from the thread that sends, one at a time,
// and go on from gRPC's threads; replies are read there too.
#ifndef ZEROSHARD_CLIENT_LINK_H_
#define ZEROSHARD_CLIENT_LINK_H_

#include <grpcpp/grpcpp.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "client/pending_requests.h"
#include "proto/trainer.grpc.pb.h"

namespace zeroshard {

class Link final
    : public grpc::ClientBidiReactor<trainer::v1::SessionRequest, trainer::v1::SessionReply> {
 public:
  // Both run on gRPC's threads; neither after Finish has returned.
  struct Events {
    std::function<void(const trainer::v1::Failure&)> on_failure;
    // Nothing can be sent any more.
    std::function<void()> on_broken;
  };

  // Starts the call and sends `hello`.
  static std::unique_ptr<Link> Start(std::shared_ptr<grpc::Channel> channel, SharedRequest hello,
                                     Events events);
  // Cancels the call and waits for its end.
  ~Link() override;

  // The reply to Hello, or why there is none; nullopt: neither came in time. One caller, not again
  // after a reply.
  absl::StatusOr<std::optional<trainer::v1::HelloReply>> AwaitHello(absl::Duration timeout);
  void Send(SharedRequest request);
  // Cancels the call unless it has ended, waits for the end and returns how it ended.
  absl::Status Finish();

 private:
  explicit Link(Events events) : events_(std::move(events)) {}

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  void StartNextWrite() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Break();

  const Events events_;
  grpc::ClientContext context_;
  std::unique_ptr<trainer::v1::Session::Stub> stub_;
  trainer::v1::SessionReply reply_;  // owned by the read in flight

  absl::Mutex mu_;
  std::deque<SharedRequest> queue_ ABSL_GUARDED_BY(mu_);  // front: the write in flight
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool broken_ ABSL_GUARDED_BY(mu_) = false;
  bool done_ ABSL_GUARDED_BY(mu_) = false;
  absl::Status end_ ABSL_GUARDED_BY(mu_);
  std::unique_ptr<trainer::v1::HelloReply> hello_ ABSL_GUARDED_BY(mu_);
  absl::Status refused_ ABSL_GUARDED_BY(mu_);
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_LINK_H_
