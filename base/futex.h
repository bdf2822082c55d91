// Waiting on a word of shared memory, between processes.
//
// The writer stores to the word and then calls FutexWakeAll; the waiter re-reads the word after
// every return. A waiter's mapping may be read-only. All functions may be called from any thread.

#ifndef ZEROSHARD_BASE_FUTEX_H_
#define ZEROSHARD_BASE_FUTEX_H_

#include <atomic>
#include <cstdint>

#include "absl/time/time.h"

namespace zeroshard {

enum class FutexResult {
  kWoken,     // woken, or the word differed, or for no reason: read the word again
  kTimedOut,  // the word may have changed meanwhile all the same
};

// Sleeps while `word` holds `expected`, at most `timeout` (absl::InfiniteDuration() for ever).
FutexResult FutexWait(const std::atomic<uint32_t>& word, uint32_t expected, absl::Duration timeout);

// Wakes all waiters of `word` in all processes; returns how many there were.
int FutexWakeAll(const std::atomic<uint32_t>& word);

// Waits until `word` no longer holds `old`: spins for `spin` first, as a wait of a few microseconds
// costs less than a system call, and then sleeps. Returns whether it changed in time.
bool FutexAwaitChange(const std::atomic<uint32_t>& word, uint32_t old, absl::Duration timeout,
                      absl::Duration spin = absl::ZeroDuration());

}  // namespace zeroshard

#endif  // ZEROSHARD_BASE_FUTEX_H_
