// Pinned memory: mapped memory that stays in memory, in huge pages where the kernel gives them, on
// one NUMA node.
//
// What is locked is exactly the pages asked for, never rounded to more: RLIMIT_MEMLOCK counts a
// byte for a byte. Memory that cannot be locked is used unlocked, with a warning that says what to
// do, unless the lock was required. Unmapping undoes everything; nothing is inherited by a forked
// child, which does not get the mapping either. May be called from any thread; calls of one process
// share the limit.
#ifndef ZEROSHARD_DEVICE_CPU_PINNED_MEMORY_H_
#define ZEROSHARD_DEVICE_CPU_PINNED_MEMORY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/statusor.h"

namespace zeroshard {

// What lies behind a mapping.
enum class MemoryKind {
  kAnonymous,   // private pages of this process
  kMemoryFile,  // a memfd, shared, from its beginning
};

struct PinOptions {
  std::string what = "memory";  // for messages
  MemoryKind kind = MemoryKind::kAnonymous;
  bool lock = true;
  // Pages are locked as they are touched, none is brought in now: for memory that is used in parts.
  // Pages that are given back (PunchHole) are locked again when they are touched again.
  bool on_touch = false;
  bool require = false;     // memory that cannot be locked is an error
  bool huge_pages = false;  // not for memory that is given back in parts: it would come in at once
  int node = -1;            // NUMA node, as the kernel numbers them; -1: anywhere
  // What this process will lock after this, for the warning: the limit must have room for both.
  uint64_t later_bytes = 0;
  std::atomic<uint64_t>* progress = nullptr;  // raised while pages are brought in; may be null
  std::string huge_page_settings = "/sys/kernel/mm/transparent_hugepage";
};

struct PinnedResult {
  uint64_t locked_bytes = 0;    // the memory in whole pages, or 0
  uint64_t unlocked_bytes = 0;  // asked for, but not locked
  std::string warning;          // why, and what to do; empty when nothing is amiss
  bool huge = false;            // the kernel may use huge pages for it
  std::string huge_reason;      // why not; empty when huge, or not asked for
  int node = -1;                // where it lies; -1: anywhere
  std::string node_reason;      // why not where it was asked for
};

// Pins `memory`, which starts at a page. InvalidArgument when it does not, or is empty.
// ResourceExhausted when it cannot be locked and options.require; then nothing stays locked.
absl::StatusOr<PinnedResult> PinMemory(std::span<std::byte> memory, const PinOptions& options);

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CPU_PINNED_MEMORY_H_
