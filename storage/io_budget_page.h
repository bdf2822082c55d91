// The page of an IoBudget; only for its own sources. docs/io_budget.md says what the words mean.
#ifndef ZEROSHARD_STORAGE_IO_BUDGET_PAGE_H_
#define ZEROSHARD_STORAGE_IO_BUDGET_PAGE_H_

#include <linux/limits.h>

#include <atomic>
#include <cstdint>

#include "storage/io_budget.h"

namespace zeroshard {

// All words are right by themselves: nothing depends on two of them changing together.
struct IoBudgetPage {
  static constexpr uint64_t kMagic = 0x746567647562695aull;  // "Zibudget"
  static constexpr uint32_t kVersion = 1;
  static constexpr size_t kMaxJobName = 256;

  enum Waits : uint32_t { kForNothing = 0, kForDepth = 1, kForRate = 2 };

  // What a holder wants to move in one direction. Written by the holder.
  struct alignas(64) Flow {
    std::atomic<int64_t> since;         // when it asked first
    std::atomic<int64_t> active_until;  // past it, it is taken for gone
    std::atomic<uint64_t> wanted;       // bytes
    std::atomic<uint32_t> waits;        // Waits; written last
  };
  // A holder at a device. Written by the holder.
  struct alignas(64) Slot {
    Flow flow[2];
    std::atomic<uint64_t> finish;  // virtual time at which what it was granted is done
    std::atomic<uint64_t> bytes[2];
  };
  struct alignas(64) Device {
    std::atomic<uint64_t> bytes_per_second;
    std::atomic<uint32_t> depth;
    std::atomic<uint32_t> tokens;  // the largest depth so far: tokens beyond were never taken
    std::atomic<uint64_t> write_budget;
    std::atomic<uint64_t> warned;  // day << 2 | level; the server's

    alignas(64) std::atomic<int64_t> paid_until;  // when all granted bytes are done at the rate
    std::atomic<int64_t> write_paid_until;        // the same for slowed writes
    std::atomic<uint64_t> virtual_time;           // the latest start of a granted transfer
    std::atomic<uint64_t> today;                  // see PackDay
    std::atomic<uint64_t> bytes[2];
    std::atomic<uint64_t> wait_nanos;
    std::atomic<uint64_t> overdrafts;

    alignas(64) std::atomic<uint16_t> token[IoBudget::kMaxDepth];  // holder + 1, or 0
    char path[PATH_MAX];
    Slot slot[IoBudget::kMaxHolders];
  };
  struct alignas(64) Holder {
    std::atomic<uint32_t> in_use;  // 0 or 1; the server's, as all of these
    std::atomic<uint64_t> job;     // the same number for all workers of a job, never reused
    uint32_t worker;
    char name[kMaxJobName];
  };

  uint64_t magic;
  uint32_t version;
  uint64_t last_job;              // the server's
  std::atomic<uint32_t> devices;  // entries below it are complete
  std::atomic<uint32_t> holders;  // numbers that were ever given out are below it
  Holder holder[IoBudget::kMaxHolders];
  Device device[IoBudget::kMaxDevices];
};
static_assert(std::atomic<uint16_t>::is_always_lock_free &&
              std::atomic<uint64_t>::is_always_lock_free);

// A day and the bytes written on it in one word, so that both change together: 16 bits of the day,
// 48 bits of bytes / 512, rounded up.
inline uint64_t PackDay(const IoDay& day) {
  return static_cast<uint64_t>(day.day) << 48 | (day.written + 511) / 512;
}
inline IoDay UnpackDay(uint64_t word) {
  return {.day = static_cast<int64_t>(word >> 48), .written = (word & ((1ull << 48) - 1)) * 512};
}

// `bytes` more on `day`. A clock that was set back across midnight does not begin the day anew.
inline IoDay AddToDay(const IoDay& before, int64_t day, uint64_t bytes) {
  if (before.day == day || before.day == day + 1) return {before.day, before.written + bytes};
  return {day, bytes};
}

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_IO_BUDGET_PAGE_H_
