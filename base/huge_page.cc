#include "base/huge_page.h"

#include <sys/mman.h>
#include <sys/types.h>

#include <cerrno>
#include <cstdint>

namespace zeroshard {
namespace {

void* Map(void* address, int fixed, const MapRequest& request) {
  return ::mmap(address, request.bytes, request.protection, request.flags | fixed, request.fd,
                static_cast<off_t>(request.offset));
}

// Bytes from `address` to the next one that is `remainder` past a multiple of a huge page.
size_t Distance(const std::byte* address, size_t remainder) {
  return (remainder - reinterpret_cast<uintptr_t>(address)) % kHugePageBytes;
}

}  // namespace

void* MapForHugePages(const MapRequest& request) {
  if (request.bytes < kHugePageBytes || request.bytes > SIZE_MAX - kHugePageBytes) {
    return Map(nullptr, 0, request);
  }
  // Address space is taken with room to spare, mapped over, and what is left given back.
  const size_t room = request.bytes + kHugePageBytes;
  void* taken =
      ::mmap(nullptr, room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (taken == MAP_FAILED) return Map(nullptr, 0, request);
  auto* const first = static_cast<std::byte*>(taken);
  const size_t before = Distance(first, request.offset % kHugePageBytes);
  void* const address = Map(first + before, MAP_FIXED, request);
  if (address == MAP_FAILED) {
    const int error = errno;
    ::munmap(first, room);
    errno = error;
    return address;
  }
  if (before > 0) ::munmap(first, before);
  const size_t page = 4096;
  const size_t end = before + (request.bytes + page - 1) / page * page;
  if (end < room) ::munmap(first + end, room - end);
  return address;
}

std::span<std::byte> WholeHugePages(std::span<std::byte> memory) {
  const size_t skipped = Distance(memory.data(), 0);
  if (memory.size() < skipped + kHugePageBytes) return {};
  return memory.subspan(skipped, (memory.size() - skipped) / kHugePageBytes * kHugePageBytes);
}

}  // namespace zeroshard
