// UniqueFd: the one owner of a file descriptor; closes it when destroyed.

#ifndef ZEROSHARD_BASE_UNIQUE_FD_H_
#define ZEROSHARD_BASE_UNIQUE_FD_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace zeroshard {

// Movable, not copyable. Not synchronised: one thread at a time.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  ~UniqueFd() { reset(); }

  // The descriptor, or -1; still owned by this object.
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }

  // Gives the descriptor up to the caller.
  [[nodiscard]] int release() { return std::exchange(fd_, -1); }

  // Closes what is held and takes over `fd`. A close error is lost: see Close.
  void reset(int fd = -1);

  // Closes and reports; for files that were written. The object is empty afterwards.
  absl::Status Close() &&;

  // A second descriptor of the same open file, close-on-exec.
  absl::StatusOr<UniqueFd> Duplicate() const;

 private:
  int fd_ = -1;
};

// A second descriptor, close-on-exec, of a descriptor that someone else owns.
absl::StatusOr<UniqueFd> DuplicateFd(int fd);

}  // namespace zeroshard

#endif  // ZEROSHARD_BASE_UNIQUE_FD_H_
