// Mappings that the kernel can back with huge pages.
//
// Huge pages need an address with the same remainder modulo their size as the offset in the file;
// the kernel itself does not always choose one. Only address space is used for it. May be called
// from any thread.

#ifndef ZEROSHARD_BASE_HUGE_PAGE_H_
#define ZEROSHARD_BASE_HUGE_PAGE_H_

#include <cstddef>
#include <span>

namespace zeroshard {

inline constexpr size_t kHugePageBytes = size_t{2} << 20;

struct MapRequest {
  size_t bytes = 0;
  int protection = 0;  // PROT_*
  int flags = 0;       // MAP_*
  int fd = -1;
  size_t offset = 0;  // in the file; a multiple of the page size
};

// mmap of the request, at such an address when it is as long as a huge page. MAP_FAILED with errno.
void* MapForHugePages(const MapRequest& request);

// The whole huge pages inside `memory`; empty when there is none.
std::span<std::byte> WholeHugePages(std::span<std::byte> memory);

}  // namespace zeroshard

#endif  // ZEROSHARD_BASE_HUGE_PAGE_H_
