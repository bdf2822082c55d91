// Status helpers: propagation macros, and statuses made from errno values.
//
// Three classes of error, never mixed: the caller's mistake (InvalidArgument, FailedPrecondition,
// NotFound, AlreadyExists: state unchanged), the world failed (Unavailable, DataLoss,
// ResourceExhausted, DeadlineExceeded: names the object), and our bug (ZS_CHECK in base/check.h).
// Functions here are pure and may be called from any thread.

#ifndef ZEROSHARD_BASE_STATUS_H_
#define ZEROSHARD_BASE_STATUS_H_

#include <optional>
#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace zeroshard {

// The status for a failed system call: "open /path: No such file or directory (errno 2)".
// ENOENT gives NotFound; EEXIST and EADDRINUSE AlreadyExists; EACCES and EPERM PermissionDenied;
// ENOSPC, ENOMEM, EDQUOT, EMFILE, ENFILE and EMSGSIZE ResourceExhausted; ETIMEDOUT
// DeadlineExceeded; connection errors, EAGAIN, EINTR and EBUSY Unavailable, and so are EIO, ENXIO,
// ENODEV, ENOLINK and EREMOTEIO: a drive that did not do it says nothing of what it holds. DataLoss
// is what says that: ENODATA (an unreadable medium), EILSEQ (protection information), EBADMSG and
// EUCLEAN (a file system's checksums). EINVAL, ENOTDIR, EISDIR, ELOOP and ENAMETOOLONG
// InvalidArgument; all else Internal.
// `errno_value` may be negative, as liburing returns it.
absl::Status ErrnoError(int errno_value, std::string_view operation, std::string_view object);

// As above, for an error at a byte offset of the object: "... /path at offset 4096: ...".
absl::Status ErrnoErrorAt(int errno_value, std::string_view operation, std::string_view object,
                          unsigned long long offset);

// The errno value of a status made by ErrnoError, which survives Annotate.
std::optional<int> ErrnoOf(const absl::Status& status);

// Whether the same call may succeed later with nothing else changed.
bool IsRetryable(const absl::Status& status);

// The same code and payloads with "context: " before the message. OK stays OK.
absl::Status Annotate(const absl::Status& status, std::string_view context);

// Keeps the first failure of several: sets `first` only when it is OK.
void KeepFirstError(absl::Status& first, const absl::Status& next);

}  // namespace zeroshard

#define ZS_STATUS_CONCAT_INNER_(a, b) a##b
#define ZS_STATUS_CONCAT_(a, b) ZS_STATUS_CONCAT_INNER_(a, b)

// Returns the status of `expr` (an absl::Status) from the enclosing function unless it is OK.
#define ZS_RETURN_IF_ERROR(expr)                              \
  do {                                                        \
    if (absl::Status zs_status_ = (expr); !zs_status_.ok()) { \
      return zs_status_;                                      \
    }                                                         \
  } while (false)

// Assigns the value of `expr` (an absl::StatusOr<T>) to `lhs`, or returns its status.
// A declaration with commas in its type needs a type alias or auto.
#define ZS_ASSIGN_OR_RETURN(lhs, expr) \
  ZS_ASSIGN_OR_RETURN_INNER_(ZS_STATUS_CONCAT_(zs_value_, __COUNTER__), lhs, expr)

#define ZS_ASSIGN_OR_RETURN_INNER_(holder, lhs, expr) \
  auto holder = (expr);                               \
  if (!holder.ok()) {                                 \
    return std::move(holder).status();                \
  }                                                   \
  lhs = *std::move(holder)

#endif  // ZEROSHARD_BASE_STATUS_H_
