#include "worker/control_store.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace zeroshard {
namespace {

// Past the request's own timeout, for the way there and back.
constexpr absl::Duration kGrace = absl::Seconds(10);

}  // namespace

absl::Status ControlStore::Set(const std::string& key, const std::string& value) {
  internal::v1::StoreRequest request;
  request.set_key(key);
  request.set_value(value);
  return Call(std::move(request), absl::ZeroDuration()).status();
}

absl::StatusOr<std::string> ControlStore::Get(const std::string& key, absl::Duration timeout) {
  internal::v1::StoreRequest request;
  request.set_key(key);
  request.set_timeout_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(timeout)));
  return Call(std::move(request), timeout);
}

absl::StatusOr<std::string> ControlStore::Call(internal::v1::StoreRequest request,
                                               absl::Duration timeout) {
  uint64_t id = 0;
  {
    absl::MutexLock lock(&mu_);
    id = next_request_++;
  }
  request.set_request(id);
  internal::v1::FromWorker message;
  *message.mutable_store() = request;
  ZS_RETURN_IF_ERROR(link_.Send(message));
  absl::MutexLock lock(&mu_);
  auto answered = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return closed_ || replies_.contains(id);
  };
  mu_.AwaitWithTimeout(absl::Condition(&answered), timeout + kGrace);
  const auto reply = replies_.find(id);
  if (reply == replies_.end()) {
    return absl::UnavailableError(
        absl::StrCat("no answer from the server for key ", request.key()));
  }
  absl::StatusOr<std::string> result = std::move(reply->second);
  replies_.erase(reply);
  return result;
}

void ControlStore::OnReply(const internal::v1::StoreReply& reply) {
  absl::MutexLock lock(&mu_);
  if (reply.code() == 0) {
    replies_.insert_or_assign(reply.request(), reply.value());
  } else {
    replies_.insert_or_assign(
        reply.request(),
        absl::Status(static_cast<absl::StatusCode>(reply.code()), reply.message()));
  }
}

void ControlStore::Close() {
  absl::MutexLock lock(&mu_);
  closed_ = true;
}

}  // namespace zeroshard
