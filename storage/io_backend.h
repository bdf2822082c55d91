// Which implementation of IoQueue to use on a directory: chosen by a probe with real I/O, because
// io_uring may be absent, forbidden (containers, seccomp, kernel.io_uring_disabled) or set up and
// still fail each transfer.
//
// Pure functions over the file system; any thread. A probe leaves no file behind, also when the
// process is killed in it, on file systems with O_TMPFILE.
#ifndef ZEROSHARD_STORAGE_IO_BACKEND_H_
#define ZEROSHARD_STORAGE_IO_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"
#include "storage/io_backend_name.h"
#include "storage/io_queue.h"

namespace zeroshard {

struct IoQueueOptions {
  size_t depth = 32;
  size_t threads = 8;                              // of the threads backend
  std::vector<std::span<std::byte>> buffers = {};  // to register with io_uring
};

// `backend` is not kAuto.
absl::StatusOr<std::unique_ptr<IoQueue>> MakeIoQueue(IoBackend backend,
                                                     const IoQueueOptions& options);

struct IoProbeOptions {
  size_t depth = 32;  // of the queues to be made later: rings may count as locked memory
  absl::Duration timeout = absl::Seconds(30);
};

struct IoBackendChoice {
  IoBackend backend = IoBackend::kThreads;  // never kAuto
  bool direct = false;                      // the file system takes O_DIRECT
  std::string reason;                       // one sentence for the log
};

// Writes, syncs and reads back a small file in the directory, with each backend until one passes:
// `wanted` alone, or for kAuto io_uring and then threads. An error when none does: that of the
// path, if threads fail too; FailedPrecondition when io_uring is required and does not work.
absl::StatusOr<IoBackendChoice> ChooseIoBackend(IoBackend wanted, const std::string& directory,
                                                const IoProbeOptions& options = {});

struct ScratchFile {
  UniqueFd fd;
  bool direct = false;  // opened with O_DIRECT
};

// A file without a name in the directory, for reading and writing; gone when it is closed.
absl::StatusOr<ScratchFile> OpenScratchFile(const std::string& directory);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_IO_BACKEND_H_
