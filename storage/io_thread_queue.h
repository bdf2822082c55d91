// The implementation of IoQueue for kernels and containers that forbid io_uring: pread, pwrite and
// fdatasync on a pool of threads.
#ifndef ZEROSHARD_STORAGE_IO_THREAD_QUEUE_H_
#define ZEROSHARD_STORAGE_IO_THREAD_QUEUE_H_

#include <cstddef>
#include <memory>

#include "absl/status/statusor.h"
#include "storage/io_queue.h"

namespace zeroshard {

struct IoThreadOptions {
  size_t depth = 32;   // 1 to kMaxIoDepth
  size_t threads = 8;  // at least 1; not more are made than `depth`
};

// ResourceExhausted when threads cannot be made.
//
// Transfers are begun in the order of Submit, as many at once as there are threads. Those that wait
// for a thread can be cancelled, those inside a system call cannot. A thread that is still inside
// one when Close gives up lives on until the call returns, and then ends.
absl::StatusOr<std::unique_ptr<IoQueue>> MakeIoThreadQueue(const IoThreadOptions& options);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_IO_THREAD_QUEUE_H_
