#include "transport/nccl/handle.h"

#include <algorithm>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/deadline.h"
#include "base/log.h"
#include "base/status.h"
#include "base/strings.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kCallInProgress = absl::Seconds(1);

absl::StatusCode CodeOf(ncclResult_t result, bool made) {
  switch (result) {
    case ncclSystemError:
    case ncclRemoteError:
      return absl::StatusCode::kUnavailable;
    case ncclInvalidArgument:
    case ncclInvalidUsage:
      return made ? absl::StatusCode::kInternal : absl::StatusCode::kFailedPrecondition;
    default:
      return absl::StatusCode::kInternal;
  }
}

}  // namespace

void Backoff::Wait() {
  constexpr int kYields = 64;
  if (turns_ < kYields) {
    ++turns_;
    std::this_thread::yield();
    return;
  }
  turns_ = std::min(turns_ + 1, kYields + 25);
  absl::SleepFor(absl::Microseconds(20 * (turns_ - kYields)));
}

absl::Status NcclHandle::Describe(ncclResult_t result, std::string_view what) const {
  const NcclApi& api = library_.api();
  const char* detail = api.GetLastError(nullptr);
  std::string text =
      absl::StrCat("NCCL, ", who_, ": ", Abs(what), ": ", api.GetErrorString(result));
  if (detail != nullptr && *detail != '\0') absl::StrAppend(&text, " (", detail, ")");
  return absl::Status(CodeOf(result, made_.load()), text);
}

absl::Status NcclHandle::Enter() {
  absl::MutexLock lock(&mu_);
  const auto free = [this]()
                        ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !calling_ || !failure_.ok(); };
  mu_.Await(absl::Condition(&free));
  if (!failure_.ok()) return failure_;
  calling_ = true;
  return absl::OkStatus();
}

void NcclHandle::Leave() {
  absl::MutexLock lock(&mu_);
  calling_ = false;
}

absl::Status NcclHandle::Call(std::string_view what,
                              const std::function<ncclResult_t(ncclComm_t&)>& call) {
  ZS_RETURN_IF_ERROR(Enter());
  const ncclResult_t result = call(comm_);
  const bool failed = result != ncclSuccess && result != ncclInProgress;
  const absl::Status reason = failed ? Describe(result, what) : absl::OkStatus();
  Leave();
  return failed ? Fail(reason) : absl::OkStatus();
}

absl::StatusOr<bool> NcclHandle::Ready(std::string_view what) {
  ncclResult_t state = ncclSuccess;
  ZS_RETURN_IF_ERROR(Call(what, [&](ncclComm_t& comm) {
    const ncclResult_t result = library_.api().CommGetAsyncError(comm, &state);
    return result != ncclSuccess ? result : state;
  }));
  return state == ncclSuccess;
}

absl::Status NcclHandle::CheckAlive() {
  if (!alive_) return absl::OkStatus();
  const absl::Status status = alive_();
  return status.ok() ? status : Fail(status);
}

absl::Status NcclHandle::Settle(std::string_view what, absl::Duration timeout) {
  const Deadline deadline = Deadline::After(timeout);
  Backoff backoff;
  for (;;) {
    ZS_ASSIGN_OR_RETURN(const bool ready, Ready(what));
    if (ready) return absl::OkStatus();
    ZS_RETURN_IF_ERROR(CheckAlive());
    if (deadline.Passed()) {
      return Fail(absl::DeadlineExceededError(absl::StrCat(
          "NCCL, ", who_, ": ", Abs(what), " was not done within ", absl::FormatDuration(timeout),
          ": a rank that does not take part, or no way to it")));
    }
    backoff.Wait();
  }
}

absl::StatusOr<ncclComm_t> NcclHandle::Split(int color, int key,
                                             std::shared_ptr<const std::string> name,
                                             absl::Duration timeout) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.commName = name->c_str();
  split_off_ = nullptr;
  ZS_RETURN_IF_ERROR(Call("a split", [&](ncclComm_t& comm) {
    return library_.api().CommSplit(comm, color, key, &split_off_, &config);
  }));
  ZS_RETURN_IF_ERROR(Settle("a split", timeout));
  if (split_off_ == nullptr) return Fail(Describe(ncclInternalError, "a split made nothing"));
  return split_off_;
}

absl::Status NcclHandle::Fail(const absl::Status& reason) {
  absl::MutexLock lock(&mu_);
  if (failure_.ok()) failure_ = reason;
  return failure_;
}

absl::Status NcclHandle::failure() const {
  absl::MutexLock lock(&mu_);
  return failure_;
}

void NcclHandle::Forget() {
  absl::MutexLock lock(&mu_);
  comm_ = nullptr;
  ended_ = true;
}

bool NcclHandle::Abort(absl::Duration timeout) {
  absl::MutexLock lock(&mu_);
  if (failure_.ok()) {
    failure_ = absl::AbortedError(absl::StrCat("NCCL, ", who_, ": the communicator was aborted"));
  }
  if (!calling_ && !aborting_ && comm_ == nullptr) ended_ = true;
  if (!ended_ && !aborting_) {
    aborting_ = true;
    std::thread([self = shared_from_this()] { self->RunAbort(); }).detach();
  }
  return mu_.AwaitWithTimeout(absl::Condition(&ended_), timeout);
}

void NcclHandle::RunAbort() {
  {
    absl::MutexLock lock(&mu_);
    const auto idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return !calling_; };
    mu_.AwaitWithTimeout(absl::Condition(&idle), kCallInProgress);
  }
  ncclResult_t result = ncclSuccess;
  if (comm_ != nullptr) result = library_.api().CommAbort(comm_);
  if (result != ncclSuccess) {
    LogWarn(absl::StrCat("NCCL, ", who_,
                         ": the abort ended with: ", library_.api().GetErrorString(result)));
  }
  absl::MutexLock lock(&mu_);
  comm_ = nullptr;
  ended_ = true;
}

}  // namespace zeroshard
