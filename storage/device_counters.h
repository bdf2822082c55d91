// The page of counters by which a worker on a GPU and its rank order their streams; the region
// DEVICE_COUNTERS, registered with CUDA by both. Who writes what: docs/device.md.
#ifndef ZEROSHARD_STORAGE_DEVICE_COUNTERS_H_
#define ZEROSHARD_STORAGE_DEVICE_COUNTERS_H_

#include <atomic>
#include <cstdint>

namespace zeroshard {

struct DeviceCounters {
  // The attempt whose sums are all in the accumulators; by the rank's stream.
  std::atomic<uint64_t> summed;
  // google.rpc.Code of the first error of the rank's data plane in this generation.
  std::atomic<uint64_t> error;
};
static_assert(sizeof(DeviceCounters) == 16 && std::atomic<uint64_t>::is_always_lock_free);

inline constexpr uint64_t kDeviceCounterBytes = 4096;

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_DEVICE_COUNTERS_H_
