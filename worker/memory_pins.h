// MemoryPins: what of one worker's host memory is pinned, and what should be and is not.
//
// Pins each memory once, when it is mapped: locked, on the worker's NUMA node, in huge pages where
// the daemon wants them and the kernel gives them. A job whose config has no pin_memory has nothing
// pinned, placed or advised. What cannot be locked is logged once for the process and counted, or
// is an error where the daemon requires it. Unmapping the memory undoes it; the counts stay. Loop
// thread only.
#ifndef ZEROSHARD_WORKER_MEMORY_PINS_H_
#define ZEROSHARD_WORKER_MEMORY_PINS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "device/cpu/core_budget.h"
#include "device/cpu/pinned_memory.h"
#include "proto/internal.pb.h"

namespace zeroshard {

class MemoryPins {
 public:
  // Pins nothing.
  MemoryPins() = default;
  // As the job and the daemon say. `cores`: where this worker computes.
  MemoryPins(const internal::v1::WorkerStart& start, const std::optional<CoreShare>& cores);

  // The region of states. Its pages are locked as they are touched: those that are not used, or
  // are on the NVMe tier, stay out of memory. `later_bytes`: what will be pinned after it.
  // ResourceExhausted when it cannot be locked and must be.
  absl::Status PinStates(std::span<std::byte> region, uint64_t later_bytes);
  // Anonymous memory of this process, all of it brought in now; `progress` is raised meanwhile.
  absl::Status PinStaging(std::span<std::byte> memory, std::atomic<uint64_t>& progress);

  // Locked, in whole pages; of states also what is not touched yet.
  uint64_t pinned_bytes() const { return pinned_bytes_; }
  // Was to be locked and is not.
  uint64_t unpinned_bytes() const { return unpinned_bytes_; }

 private:
  absl::Status Pin(std::span<std::byte> memory, PinOptions options);

  // Constant after construction.
  bool pin_ = false;
  bool require_ = false;
  bool huge_pages_ = false;
  bool tiered_ = false;
  uint32_t worker_ = 0;
  int node_ = -1;

  bool warned_ = false;
  uint64_t pinned_bytes_ = 0;
  uint64_t unpinned_bytes_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_MEMORY_PINS_H_
