#include "storage/io_backend.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/random_token.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/aligned_buffer.h"
#include "storage/file_io.h"
#include "storage/io_thread_queue.h"
#include "storage/io_uring_queue.h"

namespace zeroshard {
namespace {

constexpr size_t kProbeBytes = 4 * kDirectIoAlignment;

absl::Status One(IoQueue& queue, const IoTransfer& transfer) {
  ZS_RETURN_IF_ERROR(queue.Submit(transfer));
  const std::vector<IoCompletion> done = queue.Wait(1, transfer.deadline);
  if (done.empty()) return absl::DeadlineExceededError("a probe of the directory did not end");
  return done.front().status;
}

absl::Status Transfers(IoQueue& queue, int fd, AlignedBuffer& memory, const Deadline& deadline) {
  const std::span<std::byte> out = memory.bytes().first(kProbeBytes);
  const std::span<std::byte> in = memory.bytes().last(kProbeBytes);
  for (size_t i = 0; i < kProbeBytes; ++i) out[i] = static_cast<std::byte>(i * 7 + i / 256);
  ZS_RETURN_IF_ERROR(One(queue, {.operation = IoOperation::kWrite,
                                 .fd = fd,
                                 .memory = out.data(),
                                 .bytes = kProbeBytes,
                                 .deadline = deadline}));
  ZS_RETURN_IF_ERROR(One(queue, {.operation = IoOperation::kSync, .fd = fd, .deadline = deadline}));
  ZS_RETURN_IF_ERROR(One(queue, {.operation = IoOperation::kRead,
                                 .fd = fd,
                                 .memory = in.data(),
                                 .bytes = kProbeBytes,
                                 .deadline = deadline}));
  if (!std::equal(out.begin(), out.end(), in.begin())) {
    return CorruptAt(DescribeFd(fd), 0, "what was written and what was read differ");
  }
  return absl::OkStatus();
}

absl::Status Probe(IoBackend backend, const std::string& directory, const IoProbeOptions& options) {
  ZS_ASSIGN_OR_RETURN(ScratchFile file, OpenScratchFile(directory));
  ZS_ASSIGN_OR_RETURN(AlignedBuffer memory, AlignedBuffer::Make(2 * kProbeBytes));
  ZS_ASSIGN_OR_RETURN(std::unique_ptr<IoQueue> queue,
                      MakeIoQueue(backend, {.depth = options.depth, .threads = 1}));
  absl::Status status = Transfers(*queue, file.fd.get(), memory, Deadline::After(options.timeout));
  const std::vector<uint64_t> held = queue->Close(Deadline::After(absl::Seconds(5)));
  if (!held.empty()) {
    std::move(memory).Abandon();
    (void)file.fd.release();  // as the memory, the drive may still use it
  }
  return status;
}

std::string Explain(const absl::Status& status) {
  std::string text(status.message());
  if (ErrnoOf(status) == EPERM) {
    text += "; a seccomp filter (containers) or the sysctl kernel.io_uring_disabled forbids it";
  }
  rlimit limit = {};
  if (ErrnoOf(status) == ENOMEM && ::getrlimit(RLIMIT_MEMLOCK, &limit) == 0) {
    absl::StrAppend(&text,
                    "; rings count as locked memory, of which all processes of this user "
                    "together may have ",
                    limit.rlim_cur, " bytes (RLIMIT_MEMLOCK)");
  }
  return text;
}

}  // namespace

absl::StatusOr<std::unique_ptr<IoQueue>> MakeIoQueue(IoBackend backend,
                                                     const IoQueueOptions& options) {
  ZS_CHECK(backend != IoBackend::kAuto, "a backend must be chosen first");
  if (backend == IoBackend::kUring) {
    return MakeIoUringQueue({.depth = options.depth, .buffers = options.buffers});
  }
  return MakeIoThreadQueue({.depth = options.depth, .threads = options.threads});
}

absl::StatusOr<IoBackendChoice> ChooseIoBackend(IoBackend wanted, const std::string& directory,
                                                const IoProbeOptions& options) {
  IoBackendChoice choice;
  {
    ZS_ASSIGN_OR_RETURN(const ScratchFile file, OpenScratchFile(directory));
    choice.direct = file.direct;
  }
  const std::string passed =
      absl::StrCat("write, sync and read of a file in ", directory,
                   choice.direct ? "" : " (O_DIRECT is refused there)", " succeed");
  absl::Status uring;
  if (wanted != IoBackend::kThreads) {
    uring = Probe(IoBackend::kUring, directory, options);
    if (uring.ok()) {
      choice.backend = IoBackend::kUring;
      choice.reason = absl::StrCat("io_uring: ", passed);
      return choice;
    }
    if (wanted == IoBackend::kUring) {
      return absl::FailedPreconditionError(
          absl::StrCat("io.backend is uring, but io_uring does not work: ", Explain(uring)));
    }
  }
  ZS_RETURN_IF_ERROR(Probe(IoBackend::kThreads, directory, options));
  choice.backend = IoBackend::kThreads;
  choice.reason = wanted == IoBackend::kThreads
                      ? absl::StrCat("threads, as io.backend says: ", passed)
                      : absl::StrCat("threads, because io_uring does not work: ", Explain(uring));
  return choice;
}

absl::StatusOr<ScratchFile> OpenScratchFile(const std::string& directory) {
  for (const bool direct : {true, false}) {
    const int flags = O_RDWR | O_CLOEXEC | (direct ? O_DIRECT : 0);
    UniqueFd fd(::open(directory.c_str(), flags | O_TMPFILE, 0600));
    if (!fd.valid() && (errno == EOPNOTSUPP || errno == EISDIR)) {
      const std::string path = absl::StrCat(directory, "/.zeroshard-scratch-", RandomId());
      fd.reset(::open(path.c_str(), flags | O_CREAT | O_EXCL | O_NOFOLLOW, 0600));
      const int error = errno;
      // A refused O_DIRECT leaves the file that it did not open.
      if (fd.valid() || error == EINVAL) ::unlink(path.c_str());
      errno = error;
    }
    if (fd.valid()) return ScratchFile{std::move(fd), direct};
    if (!direct || errno != EINVAL) return ErrnoError(errno, "make a file in", directory);
  }
  return absl::InternalError("unreachable");
}

}  // namespace zeroshard
