#include "storage/aligned_buffer.h"

#include <sys/mman.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace zeroshard {

absl::StatusOr<AlignedBuffer> AlignedBuffer::Make(size_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("a buffer of 0 bytes");
  void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return ErrnoError(errno, "mmap", absl::StrCat(bytes, " bytes"));
  AlignedBuffer buffer({static_cast<std::byte*>(memory), bytes});
  if (::madvise(memory, bytes, MADV_DONTFORK) != 0) {
    return ErrnoError(errno, "madvise", absl::StrCat(bytes, " bytes"));
  }
  return buffer;
}

AlignedBuffer::~AlignedBuffer() {
  if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

}  // namespace zeroshard
