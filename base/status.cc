#include "base/status.h"

#include <cerrno>
#include <cstring>
#include <string>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/strings.h"

namespace zeroshard {
namespace {

constexpr char kErrnoPayload[] = "zeroshard/errno";

absl::StatusCode CodeOf(int errno_value) {
  switch (errno_value) {
    case ENOENT:
      return absl::StatusCode::kNotFound;
    case EEXIST:
    case EADDRINUSE:
      return absl::StatusCode::kAlreadyExists;
    case EACCES:
    case EPERM:
      return absl::StatusCode::kPermissionDenied;
    case ENOSPC:
    case ENOMEM:
    case EDQUOT:
    case EMFILE:
    case ENFILE:
    case EMSGSIZE:
      return absl::StatusCode::kResourceExhausted;
    case EBADMSG:
    case EUCLEAN:
    case ENODATA:
    case EILSEQ:
      return absl::StatusCode::kDataLoss;
    case ETIMEDOUT:
      return absl::StatusCode::kDeadlineExceeded;
    case EIO:
    case ENXIO:
    case ENODEV:
    case ENOLINK:
    case EREMOTEIO:
    case EAGAIN:
    case EINTR:
    case EBUSY:
    case EPIPE:
    case ECONNREFUSED:
    case ECONNRESET:
    case ECONNABORTED:
    case ENOTCONN:
    case EHOSTUNREACH:
    case ENETUNREACH:
      return absl::StatusCode::kUnavailable;
    case EINVAL:
    case ENOTDIR:
    case EISDIR:
    case ELOOP:
    case ENAMETOOLONG:
      return absl::StatusCode::kInvalidArgument;
    default:
      return absl::StatusCode::kInternal;
  }
}

absl::Status MakeErrnoStatus(int errno_value, std::string_view what) {
  const int value = errno_value < 0 ? -errno_value : errno_value;
  char buffer[128];
  const char* text = strerror_r(value, buffer, sizeof(buffer));
  absl::Status status(CodeOf(value), absl::StrCat(Abs(what), ": ", text, " (errno ", value, ")"));
  status.SetPayload(kErrnoPayload, absl::Cord(absl::StrCat(value)));
  return status;
}

}  // namespace

absl::Status ErrnoError(int errno_value, std::string_view operation, std::string_view object) {
  return MakeErrnoStatus(errno_value, absl::StrCat(Abs(operation), " ", Abs(object)));
}

absl::Status ErrnoErrorAt(int errno_value, std::string_view operation, std::string_view object,
                          unsigned long long offset) {
  return MakeErrnoStatus(errno_value,
                         absl::StrCat(Abs(operation), " ", Abs(object), " at offset ", offset));
}

std::optional<int> ErrnoOf(const absl::Status& status) {
  const auto payload = status.GetPayload(kErrnoPayload);
  int value = 0;
  if (!payload.has_value() || !absl::SimpleAtoi(std::string(*payload), &value)) {
    return std::nullopt;
  }
  return value;
}

bool IsRetryable(const absl::Status& status) {
  return status.code() == absl::StatusCode::kUnavailable ||
         status.code() == absl::StatusCode::kResourceExhausted ||
         status.code() == absl::StatusCode::kDeadlineExceeded;
}

absl::Status Annotate(const absl::Status& status, std::string_view context) {
  if (status.ok()) return status;
  absl::Status annotated(status.code(), absl::StrCat(Abs(context), ": ", status.message()));
  status.ForEachPayload([&annotated](absl::string_view url, const absl::Cord& payload) {
    annotated.SetPayload(url, payload);
  });
  return annotated;
}

void KeepFirstError(absl::Status& first, const absl::Status& next) {
  if (first.ok()) first = next;
}

}  // namespace zeroshard
