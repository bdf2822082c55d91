// The io_uring implementation of IoQueue.
#ifndef ZEROSHARD_STORAGE_IO_URING_QUEUE_H_
#define ZEROSHARD_STORAGE_IO_URING_QUEUE_H_

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/io_queue.h"

namespace zeroshard {

struct IoUringOptions {
  size_t depth = 32;  // 1 to kMaxIoDepth

  // Memory to register with the kernel, each at most 1 GiB; transfers that lie in one of these save
  // the lookup of their pages. It stays mapped until the queue is destroyed. If the kernel refuses
  // (locked memory is limited), the queue does without, and description() says so.
  std::vector<std::span<std::byte>> buffers = {};
};

// PermissionDenied, Internal (no such system call) or ResourceExhausted where io_uring cannot be
// had. That it can be set up does not say that transfers work: see storage/io_backend.h.
//
// One ring, for the calling thread alone, that runs completions only when that thread waits
// (SINGLE_ISSUER, DEFER_TASKRUN); kernels without these get a plain ring. No polling, in the kernel
// or on the device.
absl::StatusOr<std::unique_ptr<IoQueue>> MakeIoUringQueue(const IoUringOptions& options);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_IO_URING_QUEUE_H_
