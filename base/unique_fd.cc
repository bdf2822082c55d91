#include "base/unique_fd.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "base/status.h"

namespace zeroshard {

void UniqueFd::reset(int fd) {
  // Linux releases the descriptor even where close fails, so it is never tried again.
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

absl::Status UniqueFd::Close() && {
  const int fd = release();
  if (fd >= 0 && ::close(fd) != 0) {
    return ErrnoError(errno, "close", "descriptor " + std::to_string(fd));
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> UniqueFd::Duplicate() const { return DuplicateFd(fd_); }

absl::StatusOr<UniqueFd> DuplicateFd(int fd) {
  UniqueFd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) return ErrnoError(errno, "duplicate", "descriptor " + std::to_string(fd));
  return copy;
}

}  // namespace zeroshard
