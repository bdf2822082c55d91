#include "storage/aligned_buffer.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>

#include "absl/strings/str_cat.h"
#include "base/huge_page.h"
#include "base/status.h"

namespace zeroshard {
namespace {

// A mapping that ends within a huge page has small ones there.
size_t MappedBytes(size_t bytes) {
  if (bytes < kHugePageBytes || bytes > SIZE_MAX - kHugePageBytes) return bytes;
  return (bytes + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
}

}  // namespace

absl::StatusOr<AlignedBuffer> AlignedBuffer::Make(size_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("a buffer of 0 bytes");
  const size_t mapped = MappedBytes(bytes);
  void* memory = MapForHugePages({.bytes = mapped,
                                  .protection = PROT_READ | PROT_WRITE,
                                  .flags = MAP_PRIVATE | MAP_ANONYMOUS});
  if (memory == MAP_FAILED) return ErrnoError(errno, "mmap", absl::StrCat(bytes, " bytes"));
  AlignedBuffer buffer({static_cast<std::byte*>(memory), bytes});
  if (::madvise(memory, mapped, MADV_DONTFORK) != 0) {
    return ErrnoError(errno, "madvise", absl::StrCat(bytes, " bytes"));
  }
  // A wish: a transfer of large pages has few segments, and costs kernel and drive less.
  static_cast<void>(::madvise(memory, mapped, MADV_HUGEPAGE));
  // Who locks `bytes` of it ends a mapping within the last huge page; there would be small ones
  // there if it were not in memory before.
  if (mapped != bytes) buffer.data()[bytes - 1] = std::byte{0};
  return buffer;
}

AlignedBuffer::~AlignedBuffer() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), MappedBytes(bytes_.size()));
}

}  // namespace zeroshard
