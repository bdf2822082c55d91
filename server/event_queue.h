// EventQueue: the events of a job on their way to one Watch call. Any thread.
//
// The decision thread pushes, the call's thread takes. A watcher that does not read loses the
// oldest events, never holds anybody up.

#ifndef ZEROSHARD_SERVER_EVENT_QUEUE_H_
#define ZEROSHARD_SERVER_EVENT_QUEUE_H_

#include <deque>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "proto/trainer.pb.h"

namespace zeroshard {

class EventQueue {
 public:
  void Push(const trainer::v1::WatchEvent& event) {
    absl::MutexLock lock(&mu_);
    if (events_.size() >= kCapacity) events_.pop_front();
    events_.push_back(event);
  }

  // No further events will come.
  void Close() {
    absl::MutexLock lock(&mu_);
    closed_ = true;
  }

  // The next event, waiting at most `timeout`.
  std::optional<trainer::v1::WatchEvent> Next(absl::Duration timeout) {
    absl::MutexLock lock(&mu_);
    mu_.AwaitWithTimeout(absl::Condition(this, &EventQueue::Awake), timeout);
    if (events_.empty()) return std::nullopt;
    trainer::v1::WatchEvent event = events_.front();
    events_.pop_front();
    return event;
  }

  // Closed, and all events taken.
  bool done() {
    absl::MutexLock lock(&mu_);
    return closed_ && events_.empty();
  }

 private:
  static constexpr size_t kCapacity = 1000;

  bool Awake() const ABSL_SHARED_LOCKS_REQUIRED(mu_) { return closed_ || !events_.empty(); }

  absl::Mutex mu_;
  std::deque<trainer::v1::WatchEvent> events_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_EVENT_QUEUE_H_
