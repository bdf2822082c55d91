// Reads that do not complete until a test lets them: what a dead device looks like.
#ifndef ZEROSHARD_TESTS_CONFORMANCE_STALLED_READ_H_
#define ZEROSHARD_TESTS_CONFORMANCE_STALLED_READ_H_

#include <cstdint>
#include <memory>

#include "storage/io_queue.h"

namespace zeroshard {

class StalledRead {
 public:
  // Lets the read end, with success.
  virtual ~StalledRead() = default;
  virtual void Release() = 0;
  virtual IoTransfer Transfer(uint64_t tag) = 0;
};

// Of a pipe without data: io_uring can do it, and cancel it.
std::unique_ptr<StalledRead> StallOnPipe();

// Of a file into memory whose first touch this process handles itself (userfaultfd): pread hangs
// inside the kernel, and no signal ends it. Null where the kernel does not allow that.
std::unique_ptr<StalledRead> StallOnPageFault();

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_CONFORMANCE_STALLED_READ_H_
