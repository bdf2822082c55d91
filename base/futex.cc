#include "base/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <ctime>

#include "base/deadline.h"

namespace zeroshard {
namespace {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// Not the PRIVATE operations: the word lies in memory shared between processes.
long Futex(const std::atomic<uint32_t>& word, int operation, uint32_t value,
           const timespec* timeout) {
  return ::syscall(SYS_futex, &word, operation, value, timeout, nullptr, 0);
}

void CpuRelax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

}  // namespace

FutexResult FutexWait(const std::atomic<uint32_t>& word, uint32_t expected,
                      absl::Duration timeout) {
  const bool forever = timeout == absl::InfiniteDuration();
  const timespec limit =
      forever ? timespec{} : absl::ToTimespec(std::max(timeout, absl::ZeroDuration()));
  const long result = Futex(word, FUTEX_WAIT, expected, forever ? nullptr : &limit);
  return result != 0 && errno == ETIMEDOUT ? FutexResult::kTimedOut : FutexResult::kWoken;
}

int FutexWakeAll(const std::atomic<uint32_t>& word) {
  return static_cast<int>(std::max(0L, Futex(word, FUTEX_WAKE, INT_MAX, nullptr)));
}

bool FutexAwaitChange(const std::atomic<uint32_t>& word, uint32_t old, absl::Duration timeout,
                      absl::Duration spin) {
  const Deadline deadline = Deadline::After(timeout);
  const Deadline spin_end = Deadline::After(std::min(spin, timeout));
  while (word.load(std::memory_order_acquire) == old) {
    if (!spin_end.Passed()) {
      CpuRelax();
      continue;
    }
    if (deadline.Passed()) return false;
    FutexWait(word, old, deadline.Remaining());
  }
  return true;
}

}  // namespace zeroshard
