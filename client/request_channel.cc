#include "client/request_channel.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/fault_point.h"
#include "base/status.h"

namespace zeroshard {
namespace {

using trainer::v1::SessionRequest;

// How long a waiter sleeps before it looks at what is not in the page.
constexpr absl::Duration kSlice = absl::Milliseconds(20);
constexpr absl::Duration kInterruptInterval = absl::Milliseconds(100);
// How long the reason of a failure may stay behind the page that tells of it.
constexpr absl::Duration kReasonPatience = absl::Seconds(2);
// Failures that are remembered for a late Wait.
constexpr size_t kKeptFailures = kMaxPendingRequests;

absl::Status LostReason() {
  return absl::UnknownError("the worker reported a failure, and died before it could say why");
}

}  // namespace

RequestChannel::RequestChannel(const RankPage& page, absl::Duration timeout,
                               std::function<bool()> interrupted)
    : completions_(page),
      timeout_(timeout),
      interrupted_(std::move(interrupted)),
      pending_(completions_),
      watcher_(completions_, [this](uint64_t id) { return Poll(id); }) {}

RequestChannel::~RequestChannel() { Close(absl::CancelledError("the session was closed")); }

absl::StatusOr<std::unique_ptr<RequestChannel>> RequestChannel::Open(
    const RankPage& page, Stream::Options options, absl::Duration timeout,
    std::function<bool()> interrupted) {
  std::unique_ptr<RequestChannel> channel(
      new RequestChannel(page, timeout, std::move(interrupted)));
  ZS_ASSIGN_OR_RETURN(channel->stream_, Stream::Open(std::move(options), channel.get()));
  ZS_RETURN_IF_ERROR(channel->completions_.CheckUnused());
  return channel;
}

void RequestChannel::Close(absl::Status reason) {
  {
    absl::MutexLock lock(&mu_);
    KeepFirstError(sticky_, reason);
  }
  completions_.Nudge();
  if (stream_ != nullptr) stream_->Close();
  watcher_.Stop();
}

// --- Sending ------------------------------------------------------------------------------------

absl::StatusOr<uint64_t> RequestChannel::Submit(SessionRequest request, const Prepare& prepare) {
  if (request.has_step()) {
    ZS_RETURN_IF_ERROR(UnreportedFailure(next_id_.load(std::memory_order_relaxed)));
  }
  if (completions_.poisoned()) ZS_RETURN_IF_ERROR(Health());
  absl::StatusOr<std::optional<uint64_t>> sent = std::nullopt;
  const auto try_submit = [&] {
    sent = TrySubmit(request, prepare);
    return !sent.ok() || sent->has_value();
  };
  if (!try_submit()) {
    ZS_RETURN_IF_ERROR(Await(try_submit, timeout_, [] {
      return absl::StrCat("one of ", kMaxPendingRequests, " requests to complete");
    }));
  }
  if (!sent.ok()) return sent.status();
  ZS_FAULT_POINT("client.request.sent");
  return **sent;
}

absl::StatusOr<std::optional<uint64_t>> RequestChannel::TrySubmit(SessionRequest& request,
                                                                  const Prepare& prepare) {
  absl::MutexLock lock(&mu_);
  if (!sticky_.ok()) return sticky_;
  if (pending_.crowded()) RetireLocked();
  if (pending_.full()) return std::nullopt;
  const uint64_t id = pending_.next_id();
  if (prepare) ZS_RETURN_IF_ERROR(prepare(id));
  request.set_id(id);
  auto shared = std::make_shared<const SessionRequest>(std::move(request));
  if (shared->has_step()) last_step_id_.store(id, std::memory_order_relaxed);
  next_id_.store(id + 1, std::memory_order_release);
  pending_.Add(shared);
  stream_->Send(std::move(shared));
  return id;
}

void RequestChannel::RetireLocked() {
  pending_.Retire([this](const SessionRequest& request) {
    mu_.AssertHeld();
    failures_.try_emplace(request.id());
  });
  while (failures_.size() > kKeptFailures) failures_.erase(failures_.begin());
}

// --- Waiting ------------------------------------------------------------------------------------

bool RequestChannel::Done(uint64_t id) const {
  return id != 0 && id < next_id_.load(std::memory_order_acquire) &&
         completions_.Look(id) != Completions::Outcome::kPending;
}

absl::Status RequestChannel::Wait(uint64_t id, absl::Duration timeout) {
  if (id == 0 || id >= next_id_.load(std::memory_order_acquire)) {
    return absl::InvalidArgumentError(absl::StrCat("no request ", id, " was made"));
  }
  std::optional<absl::Status> outcome;
  const auto poll = [&] {
    const Completions::Outcome now = completions_.Look(id);
    if (now == Completions::Outcome::kPending) return false;
    outcome = Settle(id, now);
    return true;
  };
  if (poll()) return *outcome;
  ZS_RETURN_IF_ERROR(Await(poll, timeout, [&] { return Describe(id); }));
  return *outcome;
}

absl::Status RequestChannel::Await(const std::function<bool()>& ready, absl::Duration timeout,
                                   const std::function<std::string()>& what) {
  const absl::Time start = absl::Now();
  const absl::Time deadline = start + timeout;
  absl::Time ask_again = start + kInterruptInterval;
  while (true) {
    const uint32_t ticket = completions_.ticket();
    if (ready()) return absl::OkStatus();
    if (absl::Status health = Health(); !health.ok()) {
      // What completed before the end still counts.
      if (ready()) return absl::OkStatus();
      return Annotate(health, what());
    }
    if (monitor_) Fail(monitor_());
    const absl::Time now = absl::Now();
    if (now >= deadline) {
      return absl::DeadlineExceededError(absl::StrCat(what(), ": not complete after ",
                                                      absl::FormatDuration(now - start), "; ",
                                                      stream_->Describe()));
    }
    if (interrupted_ && now >= ask_again) {
      if (interrupted_()) return absl::CancelledError(absl::StrCat(what(), ": interrupted"));
      ask_again = now + kInterruptInterval;
    }
    completions_.Await(ticket, std::min(kSlice, deadline - now));
  }
}

std::optional<absl::Status> RequestChannel::Poll(uint64_t id) {
  const Completions::Outcome outcome = completions_.Look(id);
  if (outcome != Completions::Outcome::kPending) return Settle(id, outcome);
  absl::Status health = Health();
  if (!health.ok()) return Annotate(health, Describe(id));
  return std::nullopt;
}

void RequestChannel::OnComplete(uint64_t id, std::function<void(absl::Status)> callback) {
  watcher_.Add(id, std::move(callback));
}

std::string RequestChannel::Describe(uint64_t id) const {
  absl::MutexLock lock(&mu_);
  return pending_.Describe(id);
}

// --- Failures -----------------------------------------------------------------------------------

absl::Status RequestChannel::Settle(uint64_t id, Completions::Outcome outcome) {
  if (outcome == Completions::Outcome::kFailed) return ReasonOf(id);
  if (outcome == Completions::Outcome::kPast) {
    {
      absl::MutexLock lock(&mu_);
      if (!failures_.contains(id)) return absl::OkStatus();
    }
    return ReasonOf(id);
  }
  // A step that went well in spite of a request that failed would hide a lost gradient.
  if (id == last_step_id_.load(std::memory_order_relaxed)) return UnreportedFailure(id);
  return absl::OkStatus();
}

absl::Status RequestChannel::ReasonOf(uint64_t id) {
  absl::MutexLock lock(&mu_);
  failures_.try_emplace(id);
  const auto arrived = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return !sticky_.ok() || !failures_[id].reason.ok();
  };
  mu_.AwaitWithTimeout(absl::Condition(&arrived), kReasonPatience);
  FailedRequest& failed = failures_[id];
  failed.reported = true;
  if (failed.reason.ok()) failed.reason = sticky_.ok() ? LostReason() : sticky_;
  return Annotate(failed.reason, pending_.Describe(id));
}

absl::Status RequestChannel::UnreportedFailure(uint64_t end) {
  uint64_t id = 0;
  {
    absl::MutexLock lock(&mu_);
    RetireLocked();
    for (const auto& [failed_id, failed] : failures_) {
      if (failed_id >= end) break;
      if (failed.reported) continue;
      id = failed_id;
      break;
    }
  }
  return id == 0 ? absl::OkStatus() : ReasonOf(id);
}

absl::Status RequestChannel::Health() {
  absl::MutexLock lock(&mu_);
  if (sticky_.ok() && completions_.poisoned()) {
    const auto arrived = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
      return !sticky_.ok() || !completions_.PoisonReason().ok();
    };
    mu_.AwaitWithTimeout(absl::Condition(&arrived), kReasonPatience);
    KeepFirstError(sticky_, completions_.PoisonReason());
    KeepFirstError(sticky_,
                   absl::AbortedError(
                       "the job was stopped, and the reason did not arrive: see the daemon's log"));
  }
  return sticky_;
}

void RequestChannel::Fail(const absl::Status& reason) {
  absl::MutexLock lock(&mu_);
  KeepFirstError(sticky_, reason);
}

void RequestChannel::OnFailure(uint64_t id, absl::Status reason) {
  {
    absl::MutexLock lock(&mu_);
    if (id == 0) {
      KeepFirstError(sticky_, reason);
    } else {
      KeepFirstError(failures_[id].reason, reason);
    }
  }
  completions_.Nudge();
}

void RequestChannel::OnBroken(absl::Status reason) {
  {
    absl::MutexLock lock(&mu_);
    KeepFirstError(sticky_, reason);
  }
  completions_.Nudge();
}

void RequestChannel::WithUnfinished(
    const std::function<void(const std::vector<SharedRequest>&)>& send_again) {
  absl::MutexLock lock(&mu_);
  send_again(pending_.Unfinished());
}

}  // namespace zeroshard
