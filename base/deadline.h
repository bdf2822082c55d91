// Deadline: a moment on the monotonic clock until which a wait may last. A value; any thread.

#ifndef ZEROSHARD_BASE_DEADLINE_H_
#define ZEROSHARD_BASE_DEADLINE_H_

#include <ctime>

#include "absl/time/time.h"

namespace zeroshard {

class Deadline {
 public:
  // `timeout` from now; absl::InfiniteDuration() never passes, a negative one has passed.
  static Deadline After(absl::Duration timeout) { return Deadline(Monotonic() + timeout); }

  // Zero once it has passed.
  absl::Duration Remaining() const {
    const absl::Duration left = at_ - Monotonic();
    return left > absl::ZeroDuration() ? left : absl::ZeroDuration();
  }

  bool Passed() const { return Remaining() == absl::ZeroDuration(); }

 private:
  explicit Deadline(absl::Duration at) : at_(at) {}

  static absl::Duration Monotonic() {
    timespec now = {};
    ::clock_gettime(CLOCK_MONOTONIC, &now);
    return absl::DurationFromTimespec(now);
  }

  absl::Duration at_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_BASE_DEADLINE_H_
