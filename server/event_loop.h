// EventLoop: the decision thread of the server. Runs readiness callbacks of descriptors, timers and
// posted functions, one after another, on the thread that calls Run().
//
// Post, Stop and stopped may be called from any thread, at any time; everything else from the
// loop's thread, or before Run. Callbacks must not block for long: whatever they delay is every job
// of the daemon.

#ifndef ZEROSHARD_SERVER_EVENT_LOOP_H_
#define ZEROSHARD_SERVER_EVENT_LOOP_H_

#include <functional>
#include <future>
#include <map>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/unique_fd.h"

namespace zeroshard {

class EventLoop {
 public:
  // `clock` must outlive the loop. Its Elapsed() is the loop's time.
  static absl::StatusOr<std::unique_ptr<EventLoop>> Create(const Clock* clock);

  // Runs until Stop.
  void Run();
  void Stop();
  bool stopped() const;

  // Runs `fn` on the loop's thread, in the order of the calls. False, and `fn` never runs, once the
  // loop has stopped.
  bool Post(std::function<void()> fn);

  // Posts `fn` and waits for what it returns. Not on the loop's own thread. An error once stopped.
  template <typename T>
  absl::StatusOr<T> Call(std::function<T()> fn) {
    auto task = std::make_shared<std::packaged_task<T()>>(std::move(fn));
    std::future<T> result = task->get_future();
    if (!Post([task] { (*task)(); })) return absl::UnavailableError("the daemon is shutting down");
    task.reset();
    result.wait();
    return result.get();
  }

  // Calls `fn` whenever `fd` is readable or its peer has hung up, until Unwatch. `fd` stays the
  // caller's.
  absl::Status Watch(int fd, std::function<void()> fn);
  void Unwatch(int fd);

  // Calls `fn` once, when Elapsed() has reached `when`. Returns an id for Cancel.
  uint64_t At(absl::Duration when, std::function<void()> fn);
  void Cancel(uint64_t timer);

  absl::Duration Now() const { return clock_->Elapsed(); }

 private:
  EventLoop(const Clock* clock, UniqueFd epoll, UniqueFd wake);

  void RunPosted();
  void RunTimers();
  int WaitMillis();

  // Constant after construction.
  const Clock* const clock_;
  const UniqueFd epoll_;
  const UniqueFd wake_;

  mutable absl::Mutex mu_;
  std::vector<std::function<void()>> posted_ ABSL_GUARDED_BY(mu_);
  bool stopped_ ABSL_GUARDED_BY(mu_) = false;

  // Loop thread only.
  struct Watched {
    uint32_t serial = 0;
    std::shared_ptr<std::function<void()>> fn;
  };
  std::map<int, Watched> watches_;
  uint32_t next_watch_ = 0;
  std::map<std::pair<absl::Duration, uint64_t>, std::function<void()>> timers_;
  std::map<uint64_t, absl::Duration> timer_times_;
  uint64_t next_timer_ = 1;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_EVENT_LOOP_H_
