// A copy that leaves the caches alone.
//
// For destinations much larger than the caches: non-temporal stores do not read the lines they are
// going to overwrite, which saves a third of the memory traffic. The C library's memcpy does the
// same above a size of its own; a large copy that is cut up among workers and threads stays below
// it. Any thread.
#ifndef ZEROSHARD_DEVICE_CPU_STREAM_COPY_H_
#define ZEROSHARD_DEVICE_CPU_STREAM_COPY_H_

#include <cstddef>

namespace zeroshard {

// Copies `bytes` bytes; the ranges do not overlap, any alignment. All stores are ordered before
// whatever the caller stores afterwards.
void StreamCopy(void* destination, const void* source, size_t bytes);

// Orders stores that went past the caches, which other threads may read from here on; such stores
// of a killed process are in memory, too, for entering the kernel writes them out.
inline void StreamFence() {
#if defined(__SSE2__)
  __builtin_ia32_sfence();
#endif
}

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CPU_STREAM_COPY_H_
