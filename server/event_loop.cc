#include "server/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace zeroshard {
namespace {

// An upper bound of one wait: a clock that is moved by hand is looked at this often.
constexpr int kMaxWaitMillis = 500;

}  // namespace

absl::StatusOr<std::unique_ptr<EventLoop>> EventLoop::Create(const Clock* clock) {
  UniqueFd epoll(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll.valid()) return ErrnoError(errno, "epoll_create1", "event loop");
  UniqueFd wake(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake.valid()) return ErrnoError(errno, "eventfd", "event loop");
  auto loop = std::unique_ptr<EventLoop>(new EventLoop(clock, std::move(epoll), std::move(wake)));
  EventLoop* self = loop.get();
  ZS_RETURN_IF_ERROR(loop->Watch(self->wake_.get(), [self] {
    uint64_t count = 0;
    static_cast<void>(!read(self->wake_.get(), &count, sizeof(count)));
  }));
  return loop;
}

EventLoop::EventLoop(const Clock* clock, UniqueFd epoll, UniqueFd wake)
    : clock_(clock), epoll_(std::move(epoll)), wake_(std::move(wake)) {}

bool EventLoop::Post(std::function<void()> fn) {
  {
    absl::MutexLock lock(&mu_);
    if (stopped_) return false;
    posted_.push_back(std::move(fn));
  }
  const uint64_t one = 1;
  static_cast<void>(!write(wake_.get(), &one, sizeof(one)));
  return true;
}

void EventLoop::Stop() {
  {
    absl::MutexLock lock(&mu_);
    stopped_ = true;
  }
  const uint64_t one = 1;
  static_cast<void>(!write(wake_.get(), &one, sizeof(one)));
}

bool EventLoop::stopped() const {
  absl::MutexLock lock(&mu_);
  return stopped_;
}

absl::Status EventLoop::Watch(int fd, std::function<void()> fn) {
  epoll_event event{};
  event.events = EPOLLIN;
  const uint32_t serial = next_watch_++;
  event.data.u64 = uint64_t{serial} << 32 | static_cast<uint32_t>(fd);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    return ErrnoError(errno, "epoll_ctl", absl::StrCat("descriptor ", fd));
  }
  watches_[fd] = {serial, std::make_shared<std::function<void()>>(std::move(fn))};
  return absl::OkStatus();
}

void EventLoop::Unwatch(int fd) {
  if (watches_.erase(fd) == 0) return;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

uint64_t EventLoop::At(absl::Duration when, std::function<void()> fn) {
  const uint64_t id = next_timer_++;
  timers_[{when, id}] = std::move(fn);
  timer_times_[id] = when;
  return id;
}

void EventLoop::Cancel(uint64_t timer) {
  const auto it = timer_times_.find(timer);
  if (it == timer_times_.end()) return;
  timers_.erase({it->second, timer});
  timer_times_.erase(it);
}

void EventLoop::RunPosted() {
  std::vector<std::function<void()>> batch;
  {
    absl::MutexLock lock(&mu_);
    batch.swap(posted_);
  }
  for (std::function<void()>& fn : batch) fn();
}

void EventLoop::RunTimers() {
  const absl::Duration now = Now();
  while (!timers_.empty() && timers_.begin()->first.first <= now) {
    auto node = timers_.extract(timers_.begin());
    timer_times_.erase(node.key().second);
    node.mapped()();
  }
}

int EventLoop::WaitMillis() {
  {
    absl::MutexLock lock(&mu_);
    if (!posted_.empty()) return 0;
  }
  if (timers_.empty()) return kMaxWaitMillis;
  const absl::Duration wait = timers_.begin()->first.first - Now();
  const int64_t millis = absl::ToInt64Milliseconds(wait + absl::Microseconds(999));
  return static_cast<int>(std::clamp<int64_t>(millis, 0, kMaxWaitMillis));
}

void EventLoop::Run() {
  std::vector<epoll_event> events(64);
  while (true) {
    RunPosted();
    RunTimers();
    {
      absl::MutexLock lock(&mu_);
      if (stopped_ && posted_.empty()) return;
    }
    const int count =
        epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), WaitMillis());
    for (int i = 0; i < count; ++i) {
      // A callback of this batch may have unwatched the descriptor of a later one, and another may
      // be watched by now under its number.
      const uint64_t data = events[i].data.u64;
      const auto it = watches_.find(static_cast<int>(data & 0xffffffff));
      if (it == watches_.end() || it->second.serial != data >> 32) continue;
      const std::shared_ptr<std::function<void()>> fn = it->second.fn;
      (*fn)();
    }
  }
}

}  // namespace zeroshard
