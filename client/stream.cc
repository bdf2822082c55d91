#include "client/stream.h"

#include <cerrno>

#include <algorithm>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "client/grpc_util.h"
#include "client/link.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kConnectTimeout = absl::Seconds(5);
constexpr absl::Duration kHelloSlice = absl::Milliseconds(100);
constexpr absl::Duration kFirstBackoff = absl::Milliseconds(2);
constexpr absl::Duration kLastBackoff = absl::Milliseconds(200);

// How long a worker may turn a rank away as unknown: one that has just started hears of its ranks
// one by one, and perhaps later than the rank itself.
constexpr absl::Duration kUnknownPatience = absl::Seconds(5);

// The listener is the daemon's and outlives its workers: where nobody listens, the daemon or the
// job is gone. What it said last may still be on its way.
constexpr absl::Duration kRefusedPatience = absl::Seconds(2);

bool NobodyListens(const absl::Status& status) {
  const std::optional<int> code = ErrnoOf(status);
  return code == ECONNREFUSED || code == ENOENT;
}

// Whether the worker may not have heard of the rank yet, or was just ending.
bool MayBeEarly(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsUnauthenticated(status) ||
         absl::IsCancelled(status);
}

// Whether a new worker, or the same one a little later, may take the rank back.
bool MayRecover(const absl::Status& status, absl::Duration gone) {
  if (NobodyListens(status)) return gone < kRefusedPatience;
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kDataLoss:
      return false;
    case absl::StatusCode::kUnauthenticated:
      return gone < kUnknownPatience;
    default:
      return true;
  }
}

}  // namespace

class Stream::Impl {
 public:
  Impl(Options options, StreamOwner* owner) : options_(std::move(options)), owner_(owner) {}

  ~Impl() { Close(); }

  void Close() {
    {
      absl::MutexLock lock(&mu_);
      stopping_ = true;
    }
    if (keeper_.joinable()) keeper_.join();
  }

  absl::Status Open() {
    const absl::Time start = absl::Now();
    auto link = Connect(/*reconnect=*/false);
    while (!link.ok() && MayBeEarly(link.status()) && owner_->Verdict().ok() &&
           absl::Now() - start < kUnknownPatience) {
      absl::SleepFor(kLastBackoff / 10);
      link = Connect(/*reconnect=*/false);
    }
    if (!link.ok()) return Annotate(link.status(), absl::StrCat("worker ", options_.socket));
    absl::MutexLock lock(&mu_);
    link_ = *std::move(link);
    keeper_ = std::thread([this] { Keep(); });
    return absl::OkStatus();
  }

  void Send(SharedRequest request) {
    absl::MutexLock lock(&mu_);
    if (link_ != nullptr) link_->Send(std::move(request));
  }

  std::string Describe() const {
    absl::MutexLock lock(&mu_);
    if (link_ != nullptr) return "the worker is connected";
    if (stopping_) return "the session is closed";
    return absl::StrCat("the worker has been gone for ",
                        absl::FormatDuration(absl::Now() - lost_at_), " (", last_error_.message(),
                        ")");
  }

  uint64_t reconnects() const {
    absl::MutexLock lock(&mu_);
    return reconnects_;
  }
  const trainer::v1::HelloReply& hello() const { return hello_; }

 private:
  // One try. The new link sends nothing but its Hello yet.
  absl::StatusOr<std::unique_ptr<Link>> Connect(bool reconnect) {
    ZS_ASSIGN_OR_RETURN(auto channel, ConnectChannel(options_.socket, kConnectTimeout));
    auto hello = std::make_shared<trainer::v1::SessionRequest>();
    hello->mutable_hello()->set_token(options_.token);
    hello->mutable_hello()->set_rank(options_.rank);
    hello->mutable_hello()->set_generation(options_.generation);
    hello->mutable_hello()->set_reconnect(reconnect);
    {
      absl::MutexLock lock(&mu_);
      broken_ = false;
    }
    auto link = Link::Start(std::move(channel), std::move(hello),
                            {.on_failure = [this](const auto& failure) { OnFailure(failure); },
                             .on_broken = [this] { OnBroken(); }});
    ZS_ASSIGN_OR_RETURN(trainer::v1::HelloReply reply, AwaitHello(*link, reconnect));
    if (!reconnect) hello_ = std::move(reply);
    return link;
  }

  // In slices, so that a closing session need not wait for a worker that is stopped, nor a new one
  // for a worker that is not started again.
  absl::StatusOr<trainer::v1::HelloReply> AwaitHello(Link& link, bool reconnect) {
    const absl::Time deadline = absl::Now() + options_.hello_timeout;
    while (true) {
      ZS_ASSIGN_OR_RETURN(auto reply, link.AwaitHello(kHelloSlice));
      if (reply.has_value()) return *std::move(reply);
      if (!reconnect) ZS_RETURN_IF_ERROR(owner_->Verdict());
      absl::MutexLock lock(&mu_);
      if (stopping_ || absl::Now() >= deadline) {
        return absl::DeadlineExceededError("the worker does not answer");
      }
    }
  }

  void OnFailure(const trainer::v1::Failure& failure) {
    const absl::StatusCode code = failure.code() == 0
                                      ? absl::StatusCode::kUnknown
                                      : static_cast<absl::StatusCode>(failure.code());
    owner_->OnFailure(failure.id(), absl::Status(code, failure.message()));
  }

  void OnBroken() {
    absl::MutexLock lock(&mu_);
    broken_ = true;
  }

  // The keeper's thread: opens the stream again whenever it breaks.
  void Keep() {
    while (AwaitBreak()) {
      std::unique_ptr<Link> dead;
      {
        absl::MutexLock lock(&mu_);
        dead = std::move(link_);
        lost_at_ = absl::Now();
      }
      absl::Status reason = dead->Finish();
      dead.reset();
      if (reason.ok()) reason = absl::UnavailableError("the worker closed the stream");
      reason = Reopen(std::move(reason));
      if (!reason.ok()) {
        owner_->OnBroken(std::move(reason));
        return;
      }
    }
    std::unique_ptr<Link> last;
    absl::MutexLock lock(&mu_);
    last = std::move(link_);
  }

  // True when the link broke, false when the stream is being destroyed.
  bool AwaitBreak() {
    absl::MutexLock lock(&mu_);
    const auto changed = [this]()
                             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return stopping_ || broken_; };
    mu_.Await(absl::Condition(&changed));
    return !stopping_;
  }

  // Back in business: OK, or the reason why not any more (Cancelled when the stream is being
  // destroyed).
  absl::Status Reopen(absl::Status reason) {
    const absl::Time lost = absl::Now();
    absl::Duration backoff = kFirstBackoff;
    while (MayRecover(reason, absl::Now() - lost)) {
      {
        absl::MutexLock lock(&mu_);
        last_error_ = reason;
        mu_.AwaitWithTimeout(absl::Condition(&stopping_), backoff);
        if (stopping_) return absl::CancelledError("the session was closed");
      }
      backoff = std::min(2 * backoff, kLastBackoff);
      auto link = Connect(/*reconnect=*/true);
      if (link.ok()) {
        Resume(*std::move(link));
        return absl::OkStatus();
      }
      reason = link.status();
      if (absl::Now() - lost >= options_.patience) break;
    }
    const std::string where = absl::StrCat("the worker at ", options_.socket);
    if (!NobodyListens(reason)) {
      return Annotate(reason, absl::StrCat(where, " is lost to this rank"));
    }
    return absl::UnavailableError(absl::StrCat(
        where, " is lost to this rank: the daemon or the job is gone (", reason.message(), ")"));
  }

  void Resume(std::unique_ptr<Link> link) {
    owner_->WithUnfinished([&](const std::vector<SharedRequest>& requests) {
      absl::MutexLock lock(&mu_);
      for (const SharedRequest& request : requests) link->Send(request);
      link_ = std::move(link);
      ++reconnects_;
      LogInfo(absl::StrCat("rank ", options_.rank, " is connected to its worker again; ",
                           requests.size(), " requests were sent again"));
    });
  }

  const Options options_;
  StreamOwner* const owner_;
  trainer::v1::HelloReply hello_;  // constant after Open
  std::thread keeper_;

  mutable absl::Mutex mu_;
  std::unique_ptr<Link> link_ ABSL_GUARDED_BY(mu_);  // null while there is no connection
  bool broken_ ABSL_GUARDED_BY(mu_) = false;         // of the latest link
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time lost_at_ ABSL_GUARDED_BY(mu_);
  absl::Status last_error_ ABSL_GUARDED_BY(mu_);
  uint64_t reconnects_ ABSL_GUARDED_BY(mu_) = 0;
};

Stream::Stream(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Stream::~Stream() = default;

absl::StatusOr<std::unique_ptr<Stream>> Stream::Open(Options options, StreamOwner* owner) {
  auto impl = std::make_unique<Impl>(std::move(options), owner);
  ZS_RETURN_IF_ERROR(impl->Open());
  return std::unique_ptr<Stream>(new Stream(std::move(impl)));
}

const trainer::v1::HelloReply& Stream::hello() const { return impl_->hello(); }
void Stream::Send(SharedRequest request) { impl_->Send(std::move(request)); }
void Stream::Close() { impl_->Close(); }
std::string Stream::Describe() const { return impl_->Describe(); }
uint64_t Stream::reconnects() const { return impl_->reconnects(); }

}  // namespace zeroshard
