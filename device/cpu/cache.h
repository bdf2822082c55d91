// The caches of this machine's processors.
#ifndef ZEROSHARD_DEVICE_CPU_CACHE_H_
#define ZEROSHARD_DEVICE_CPU_CACHE_H_

#include <cstdint>
#include <string>

namespace zeroshard {

// Bytes of the largest cache that a processor is under, in a directory such as the default one
// (Linux, Documentation/ABI/testing/sysfs-devices-system-cpu); 0 when none is described there.
// sysconf(_SC_LEVEL3_CACHE_SIZE) is no substitute: on AMD it gives the sum of a package's caches.
uint64_t LastLevelCacheBytes(const std::string& directory = "/sys/devices/system/cpu/cpu0/cache");

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CPU_CACHE_H_
