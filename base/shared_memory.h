// Memory shared between processes: sealed memfds, and mappings of them.
//
// A memfd lives as long as any process holds a descriptor or a mapping of it, so what it holds
// outlives the process that wrote it. Every region is sealed against shrinking and growing: a
// mapping never faults because another process truncated the file. Functions may be called from
// any thread; a MappedRegion is owned by one object and its bytes are not synchronised.

#ifndef ZEROSHARD_BASE_SHARED_MEMORY_H_
#define ZEROSHARD_BASE_SHARED_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace zeroshard {

// A zero-filled memfd of exactly `bytes` (> 0), close-on-exec, mode 0600, sealed against shrinking,
// growing and further seals. Pages are allocated on first touch; see Reserve. `name` only shows up
// in /proc.
absl::StatusOr<UniqueFd> CreateSealedMemfd(std::string_view name, size_t bytes);

// A read-only descriptor of the memfd `fd`. The file's mode becomes 0400, so that a process of
// another user cannot reopen the descriptor for writing through /proc. Descriptors that are already
// writable stay so.
absl::StatusOr<UniqueFd> ReopenReadOnly(int fd);

// OK when `fd` is sealed against shrinking and has at least `min_bytes`: required before mapping a
// descriptor that another process sent.
absl::Status VerifySealed(int fd, size_t min_bytes);

// Allocates the pages of [offset, offset + bytes) now. ResourceExhausted when memory is short,
// which otherwise would be a SIGBUS at first touch.
absl::Status Reserve(int fd, size_t offset, size_t bytes);

// Gives the whole pages inside [offset, offset + bytes) back; they read as zeros afterwards.
absl::Status PunchHole(int fd, size_t offset, size_t bytes);

// Bytes of memory that the file really occupies.
absl::StatusOr<uint64_t> AllocatedBytes(int fd);

// The file's length.
absl::StatusOr<uint64_t> FileBytes(int fd);

enum class Access { kReadOnly, kReadWrite };

struct MapOptions {
  size_t offset = 0;       // of the mapping in the file; a multiple of the page size
  bool dont_fork = false;  // a forked child does not get the mapping
  bool dont_dump = true;   // left out of core dumps
  bool populate = false;   // pages are mapped at once instead of on first touch
};

// A shared mapping of a descriptor, unmapped when destroyed. The descriptor may be closed
// meanwhile.
class MappedRegion {
 public:
  // Maps `bytes` (> 0) of `fd`, where huge pages are possible (base/huge_page.h). InvalidArgument
  // when the file is shorter than offset + bytes.
  static absl::StatusOr<MappedRegion> Map(int fd, size_t bytes, Access access,
                                          const MapOptions& options = {});

  MappedRegion() = default;
  MappedRegion(MappedRegion&& other) noexcept;
  MappedRegion& operator=(MappedRegion&& other) noexcept;
  MappedRegion(const MappedRegion&) = delete;
  MappedRegion& operator=(const MappedRegion&) = delete;
  ~MappedRegion();

  // Null when nothing is mapped. Writing to a read-only mapping is a SIGSEGV.
  std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  std::span<std::byte> bytes() const { return {data_, size_}; }

  // The bytes from `offset` on, seen as T. The caller has checked bounds and alignment.
  template <typename T>
  T* As(size_t offset = 0) const {
    return reinterpret_cast<T*>(data_ + offset);
  }

 private:
  MappedRegion(std::byte* data, size_t size) : data_(data), size_(size) {}
  void Unmap();

  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_BASE_SHARED_MEMORY_H_
