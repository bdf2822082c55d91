#include "client/link.h"

#include <utility>

#include "client/grpc_util.h"

namespace zeroshard {

std::unique_ptr<Link> Link::Start(std::shared_ptr<grpc::Channel> channel, SharedRequest hello,
                                  Events events) {
  std::unique_ptr<Link> link(new Link(std::move(events)));
  link->stub_ = trainer::v1::Session::NewStub(std::move(channel));
  link->stub_->async()->Open(&link->context_, link.get());
  // Writes start outside of callbacks: the hold keeps OnDone away until the link is broken.
  link->AddHold();
  link->StartRead(&link->reply_);
  link->Send(std::move(hello));
  link->StartCall();
  return link;
}

Link::~Link() { Finish().IgnoreError(); }

absl::Status Link::Finish() {
  absl::MutexLock lock(&mu_);
  // The end of a broken call is on its way; a cancellation could hide the worker's reason.
  if (!broken_ || !mu_.AwaitWithTimeout(absl::Condition(&done_), absl::Seconds(1))) {
    context_.TryCancel();
  }
  mu_.Await(absl::Condition(&done_));
  return end_;
}

absl::StatusOr<std::optional<trainer::v1::HelloReply>> Link::AwaitHello(absl::Duration timeout) {
  {
    absl::MutexLock lock(&mu_);
    const auto settled = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      return hello_ != nullptr || broken_ || !refused_.ok();
    };
    if (!mu_.AwaitWithTimeout(absl::Condition(&settled), timeout)) return std::nullopt;
    if (hello_ != nullptr) return std::move(*hello_);
    if (!refused_.ok()) return refused_;
  }
  absl::Status end = Finish();
  return end.ok() ? absl::UnavailableError("the worker closed the stream") : end;
}

void Link::Send(SharedRequest request) {
  absl::MutexLock lock(&mu_);
  if (broken_) return;
  queue_.push_back(std::move(request));
  if (!writing_) StartNextWrite();
}

void Link::StartNextWrite() {
  writing_ = true;
  grpc::WriteOptions options;
  // More will follow at once: let gRPC put them into one system call.
  if (queue_.size() > 1) options.set_buffer_hint();
  StartWrite(queue_.front().get(), options);
}

void Link::OnWriteDone(bool ok) {
  {
    absl::MutexLock lock(&mu_);
    writing_ = false;
    queue_.pop_front();
    if (ok && !broken_ && !queue_.empty()) StartNextWrite();
  }
  if (!ok) Break();
}

void Link::OnReadDone(bool ok) {
  if (!ok) return Break();
  if (reply_.has_hello()) {
    absl::MutexLock lock(&mu_);
    hello_ = std::make_unique<trainer::v1::HelloReply>(reply_.hello());
  } else if (reply_.has_failure()) {
    events_.on_failure(reply_.failure());
    // Of the whole job: it died before the worker got to the Hello.
    if (reply_.failure().id() == 0 && reply_.failure().code() != 0) {
      absl::MutexLock lock(&mu_);
      refused_ = absl::Status(static_cast<absl::StatusCode>(reply_.failure().code()),
                              reply_.failure().message());
    }
  }
  StartRead(&reply_);
}

void Link::Break() {
  {
    absl::MutexLock lock(&mu_);
    if (broken_) return;
    broken_ = true;
  }
  events_.on_broken();
  RemoveHold();
}

void Link::OnDone(const grpc::Status& status) {
  absl::MutexLock lock(&mu_);
  end_ = FromGrpc(status);
  done_ = true;
}

}  // namespace zeroshard
