// AlignedBuffer: page-aligned memory of this process alone, for transfers with O_DIRECT.
//
// Anonymous pages, huge ones where there are any, zero at first; not inherited by a forked child,
// whose copy-on-write would detach a read in flight from the parent's pages. Not synchronised.
#ifndef ZEROSHARD_STORAGE_ALIGNED_BUFFER_H_
#define ZEROSHARD_STORAGE_ALIGNED_BUFFER_H_

#include <cstddef>
#include <span>
#include <utility>

#include "absl/status/statusor.h"

namespace zeroshard {

class AlignedBuffer {
 public:
  // From a huge page on, whole huge pages are mapped. ResourceExhausted when there is no memory;
  // InvalidArgument for no bytes.
  static absl::StatusOr<AlignedBuffer> Make(size_t bytes);

  AlignedBuffer(AlignedBuffer&& other) noexcept : bytes_(std::exchange(other.bytes_, {})) {}
  AlignedBuffer& operator=(AlignedBuffer&& other) noexcept {
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  AlignedBuffer(const AlignedBuffer&) = delete;
  AlignedBuffer& operator=(const AlignedBuffer&) = delete;
  ~AlignedBuffer();

  std::byte* data() const { return bytes_.data(); }
  size_t size() const { return bytes_.size(); }
  std::span<std::byte> bytes() const { return bytes_; }

  // Gives the memory up for good: it stays mapped until the process ends. For memory that a
  // transfer holds which never completed (IoQueue::Close).
  void Abandon() && { bytes_ = {}; }

 private:
  explicit AlignedBuffer(std::span<std::byte> bytes) : bytes_(bytes) {}

  std::span<std::byte> bytes_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_ALIGNED_BUFFER_H_
