// absl::Mutex and absl::CondVar on top of the standard library, for thread-sanitizer builds only.
//
// The distribution's Abseil is not instrumented, so the sanitizer sees no synchronisation in its
// locks and reports races where there are none. Symbols of a program come before those of shared
// libraries, so these definitions serve the program and every library in it. They keep the
// documented behaviour except fairness and deadlock detection.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <thread>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace {

// Threads that wait for "something has changed". Waking takes the gate, so no wake-up is lost.
struct Announcer {
  std::mutex gate;
  std::condition_variable changed;
  uint64_t epoch = 0;
  std::atomic<int> waiters{0};

  void Announce() {
    if (waiters.load() == 0) return;
    std::lock_guard<std::mutex> lock(gate);
    ++epoch;
    changed.notify_all();
  }

  // Calls `unlock` once no announcement can be missed, and returns after one, or at the deadline.
  template <typename Unlock>
  void Wait(absl::Time deadline, Unlock unlock) {
    std::unique_lock<std::mutex> lock(gate);
    const uint64_t seen = epoch;
    ++waiters;
    unlock();
    const auto announced = [&] { return epoch != seen; };
    if (deadline == absl::InfiniteFuture()) {
      changed.wait(lock, announced);
    } else {
      changed.wait_until(lock, absl::ToChronoTime(deadline), announced);
    }
    --waiters;
  }
};

struct MutexState {
  std::shared_mutex lock;
  std::atomic<std::thread::id> writer{};
  Announcer signal;

  bool HeldByWriter() const { return writer.load() == std::this_thread::get_id(); }

  void Lock(bool exclusive) {
    if (exclusive) {
      lock.lock();
      writer = std::this_thread::get_id();
    } else {
      lock.lock_shared();
    }
  }

  void Unlock(bool exclusive) {
    if (exclusive) {
      writer = std::thread::id();
      lock.unlock();
    } else {
      lock.unlock_shared();
    }
  }
};

// The state behind a word of an absl object, made at first use.
template <typename State>
State& StateOf(std::atomic<intptr_t>& word) {
  intptr_t value = word.load(std::memory_order_acquire);
  if (value == 0) {
    auto* fresh = new State;
    if (word.compare_exchange_strong(value, reinterpret_cast<intptr_t>(fresh))) return *fresh;
    delete fresh;
  }
  return *reinterpret_cast<State*>(value);
}

bool AwaitCondition(MutexState& state, const absl::Condition& condition, absl::Time deadline) {
  const bool exclusive = state.HeldByWriter();
  while (!condition.Eval()) {
    if (absl::Now() >= deadline) return false;
    // What this thread changed before it waits may be what others wait for.
    state.signal.Announce();
    state.signal.Wait(deadline, [&] { state.Unlock(exclusive); });
    state.Lock(exclusive);
  }
  return true;
}

}  // namespace

namespace absl {
ABSL_NAMESPACE_BEGIN

Mutex::~Mutex() { delete reinterpret_cast<MutexState*>(mu_.load(std::memory_order_acquire)); }

void Mutex::Lock() { StateOf<MutexState>(mu_).Lock(true); }

void Mutex::Unlock() {
  MutexState& state = StateOf<MutexState>(mu_);
  state.signal.Announce();
  state.Unlock(true);
}

bool Mutex::TryLock() {
  MutexState& state = StateOf<MutexState>(mu_);
  if (!state.lock.try_lock()) return false;
  state.writer = std::this_thread::get_id();
  return true;
}

void Mutex::ReaderLock() { StateOf<MutexState>(mu_).Lock(false); }

void Mutex::ReaderUnlock() {
  MutexState& state = StateOf<MutexState>(mu_);
  state.signal.Announce();
  state.Unlock(false);
}

bool Mutex::ReaderTryLock() { return StateOf<MutexState>(mu_).lock.try_lock_shared(); }

void Mutex::Await(const Condition& cond) {
  AwaitCondition(StateOf<MutexState>(mu_), cond, absl::InfiniteFuture());
}

bool Mutex::AwaitWithTimeout(const Condition& cond, absl::Duration timeout) {
  return AwaitWithDeadline(cond, absl::Now() + timeout);
}

bool Mutex::AwaitWithDeadline(const Condition& cond, absl::Time deadline) {
  return AwaitCondition(StateOf<MutexState>(mu_), cond, deadline);
}

void Mutex::LockWhen(const Condition& cond) {
  Lock();
  Await(cond);
}

bool Mutex::LockWhenWithTimeout(const Condition& cond, absl::Duration timeout) {
  return LockWhenWithDeadline(cond, absl::Now() + timeout);
}

bool Mutex::LockWhenWithDeadline(const Condition& cond, absl::Time deadline) {
  Lock();
  return AwaitWithDeadline(cond, deadline);
}

void Mutex::ReaderLockWhen(const Condition& cond) {
  ReaderLock();
  Await(cond);
}

bool Mutex::ReaderLockWhenWithTimeout(const Condition& cond, absl::Duration timeout) {
  return ReaderLockWhenWithDeadline(cond, absl::Now() + timeout);
}

bool Mutex::ReaderLockWhenWithDeadline(const Condition& cond, absl::Time deadline) {
  ReaderLock();
  return AwaitWithDeadline(cond, deadline);
}

void Mutex::AssertHeld() const {}
void Mutex::AssertReaderHeld() const {}
void Mutex::AssertNotHeld() const {}
void Mutex::ForgetDeadlockInfo() {}
void Mutex::EnableDebugLog(const char*) {}
void Mutex::EnableInvariantDebugging(void (*)(void*), void*) {}

CondVar::~CondVar() { delete reinterpret_cast<Announcer*>(cv_.load(std::memory_order_acquire)); }

void CondVar::Wait(Mutex* mu) { WaitWithDeadline(mu, absl::InfiniteFuture()); }

bool CondVar::WaitWithTimeout(Mutex* mu, absl::Duration timeout) {
  return WaitWithDeadline(mu, absl::Now() + timeout);
}

// Returns whether the deadline has passed.
bool CondVar::WaitWithDeadline(Mutex* mu, absl::Time deadline) {
  const bool exclusive = StateOf<MutexState>(mu->mu_).HeldByWriter();
  StateOf<Announcer>(cv_).Wait(deadline, [&] { exclusive ? mu->Unlock() : mu->ReaderUnlock(); });
  exclusive ? mu->Lock() : mu->ReaderLock();
  return absl::Now() >= deadline;
}

void CondVar::Signal() { StateOf<Announcer>(cv_).Announce(); }
void CondVar::SignalAll() { StateOf<Announcer>(cv_).Announce(); }
void CondVar::EnableDebugLog(const char*) {}

ABSL_NAMESPACE_END
}  // namespace absl

// The words of an absl::Status are counted by atomics in the system's library, which is not
// instrumented: whoever gives the last copy back seems to race with those who read theirs before.
// Rings of io_uring are mapped and unmapped by system calls that the sanitizer does not see: the
// entries of a ring seem to race with those of an earlier one at the same address.
extern "C" const char* __tsan_default_suppressions() {
  return "race:absl::*Status::UnrefNonInlined\n"
         "race:io_uring_prep_\n"
         "race:io_uring_sqe_set_data64\n";
}
