#include "client/dataplane/plane_core.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/deadline.h"
#include "base/log.h"
#include "base/status.h"
#include "base/strings.h"

namespace zeroshard {
namespace {

// How often a waiting call asks the device, and how often it looks at all the rest.
constexpr absl::Duration kAskInterval = absl::Microseconds(50);
constexpr absl::Duration kLookInterval = absl::Milliseconds(20);

}  // namespace

PlaneCore::PlaneCore(DataPlaneOptions options, const CudaDevice& device)
    : options_(std::move(options)), device_(device) {}

std::string PlaneCore::name() const {
  return absl::StrCat("job ", options_.job, ", generation ", options_.generation, ", rank ",
                      rank());
}

void PlaneCore::Watch(std::vector<NcclCommunicator*> communicators) {
  absl::MutexLock lock(&mu_);
  communicators_ = std::move(communicators);
}

absl::Status PlaneCore::Health() const {
  absl::MutexLock lock(&mu_);
  return dead_;
}

absl::Status PlaneCore::Fail(const absl::Status& reason, Tell tell) {
  absl::MutexLock lock(&mu_);
  if (!dead_.ok()) return dead_;
  dead_ = Annotate(reason, name());
  if (options_.counters != nullptr && tell == Tell::kWorker && !absl::IsCancelled(reason)) {
    uint64_t none = 0;
    counters().error.compare_exchange_strong(none, static_cast<uint64_t>(reason.code()));
  }
  for (NcclCommunicator* communicator : communicators_) communicator->Interrupt(dead_);
  if (!absl::IsCancelled(reason)) LogWarn(absl::StrCat("data plane ends: ", dead_.message()));
  return dead_;
}

absl::Status PlaneCore::Check(absl::Status status) {
  if (status.ok() || absl::IsInvalidArgument(status) || absl::IsFailedPrecondition(status)) {
    return status;
  }
  return Fail(status);
}

absl::Status PlaneCore::Look() {
  ZS_RETURN_IF_ERROR(Health());
  if (mismatch_->found.load(std::memory_order_acquire)) {
    return Fail(absl::AbortedError(
        absl::StrCat("rank ", mismatch_->rank, " sent a gradient of unit ", mismatch_->unit,
                     " with tag ", absl::Hex(mismatch_->tag), ", expected ",
                     absl::Hex(mismatch_->expected), ": ranks are not at the same micro-step")));
  }
  absl::Status found;
  {
    absl::MutexLock lock(&mu_);
    for (NcclCommunicator* communicator : communicators_) {
      KeepFirstError(found, communicator->Poll());
    }
  }
  // The generation's end is often what NCCL stumbles over: it is the better reason.
  const absl::Status dead = options_.alive ? options_.alive() : absl::OkStatus();
  if (!dead.ok()) return Fail(dead, Tell::kNobody);
  return found.ok() ? found : Fail(found);
}

absl::Status PlaneCore::Await(const std::function<absl::StatusOr<bool>()>& done,
                              std::string_view what) {
  absl::StatusOr<bool> state = done();
  if (state.ok() && *state) return absl::OkStatus();
  ++waits_;
  const Deadline deadline = Deadline::After(options_.timeout);
  absl::Time look = absl::Now();
  while (state.ok()) {
    if (*state) return absl::OkStatus();
    if (absl::Now() >= look) {
      ZS_RETURN_IF_ERROR(Look());
      look = absl::Now() + kLookInterval;
    }
    if (deadline.Passed()) {
      return Fail(absl::DeadlineExceededError(
          absl::StrCat(Abs(what), " is not done after ", absl::FormatDuration(options_.timeout))));
    }
    absl::SleepFor(kAskInterval);
    state = done();
  }
  return Fail(Annotate(state.status(), what));
}

}  // namespace zeroshard
