// Time as an object, so that a test can hold it still.
//
// Now() is wall time for logs and records; Elapsed() only ever moves forward and is what deadlines
// and intervals are measured with. All methods may be called from any thread.

#ifndef ZEROSHARD_BASE_CLOCK_H_
#define ZEROSHARD_BASE_CLOCK_H_

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace zeroshard {

class Clock {
 public:
  virtual ~Clock() = default;

  // Wall time; may jump.
  virtual absl::Time Now() const = 0;

  // Time since some fixed moment; never goes back.
  virtual absl::Duration Elapsed() const = 0;

  // Returns once Elapsed() has grown by `duration`. A negative duration returns at once.
  virtual void SleepFor(absl::Duration duration) = 0;
};

// The machine's clocks. Stateless.
class SystemClock final : public Clock {
 public:
  absl::Time Now() const override;
  absl::Duration Elapsed() const override;
  void SleepFor(absl::Duration duration) override;
};

// Stands still until a test moves it.
class ManualClock final : public Clock {
 public:
  explicit ManualClock(absl::Time start = absl::UnixEpoch()) : start_(start) {}

  absl::Time Now() const override;
  absl::Duration Elapsed() const override;

  // Blocks until Advance has moved the clock far enough.
  void SleepFor(absl::Duration duration) override;

  // Moves both times forward and wakes sleepers. `duration` must not be negative.
  void Advance(absl::Duration duration);

  // How many threads are inside SleepFor now.
  int sleepers() const;

  // Blocks until at least `count` threads are inside SleepFor.
  void AwaitSleepers(int count) const;

 private:
  const absl::Time start_;
  mutable absl::Mutex mu_;
  absl::Duration elapsed_ ABSL_GUARDED_BY(mu_);
  int sleepers_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_BASE_CLOCK_H_
