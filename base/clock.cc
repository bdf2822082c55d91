#include "base/clock.h"

#include <ctime>

#include "absl/time/clock.h"
#include "base/check.h"

namespace zeroshard {

absl::Time SystemClock::Now() const { return absl::Now(); }

absl::Duration SystemClock::Elapsed() const {
  timespec now = {};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return absl::DurationFromTimespec(now);
}

void SystemClock::SleepFor(absl::Duration duration) { absl::SleepFor(duration); }

absl::Time ManualClock::Now() const {
  absl::MutexLock lock(&mu_);
  return start_ + elapsed_;
}

absl::Duration ManualClock::Elapsed() const {
  absl::MutexLock lock(&mu_);
  return elapsed_;
}

void ManualClock::SleepFor(absl::Duration duration) {
  absl::MutexLock lock(&mu_);
  const absl::Duration until = elapsed_ + duration;
  const auto reached = [this, until]()
                           ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return elapsed_ >= until; };
  ++sleepers_;
  mu_.Await(absl::Condition(&reached));
  --sleepers_;
}

void ManualClock::Advance(absl::Duration duration) {
  ZS_CHECK(duration >= absl::ZeroDuration(), "a clock does not go back");
  absl::MutexLock lock(&mu_);
  elapsed_ += duration;
}

int ManualClock::sleepers() const {
  absl::MutexLock lock(&mu_);
  return sleepers_;
}

void ManualClock::AwaitSleepers(int count) const {
  absl::MutexLock lock(&mu_);
  const auto reached = [this, count]()
                           ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return sleepers_ >= count; };
  mu_.Await(absl::Condition(&reached));
}

}  // namespace zeroshard
