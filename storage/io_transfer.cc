#include "storage/io_transfer.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/file_io.h"

namespace zeroshard {
namespace {

absl::Status EndOfFile(const IoTransfer& transfer, uint64_t done) {
  return CorruptAt(DescribeFd(transfer.fd), transfer.offset + done,
                   absl::StrCat("the file ends inside a read of ", transfer.bytes,
                                " bytes at offset ", transfer.offset));
}

bool IsEndOfFile(int fd, uint64_t position) {
  struct stat info = {};
  return ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode) &&
         static_cast<uint64_t>(info.st_size) <= position;
}

}  // namespace

std::string_view NameOf(IoOperation operation) {
  switch (operation) {
    case IoOperation::kRead:
      return "read";
    case IoOperation::kWrite:
      return "write";
    case IoOperation::kSync:
      return "fdatasync";
  }
  return "unknown operation on";
}

absl::Status CheckTransfer(const IoTransfer& transfer) {
  const std::string what = absl::StrCat(Abs(NameOf(transfer.operation)), " of ", transfer.bytes,
                                        " bytes at offset ", transfer.offset);
  if (transfer.fd < 0) return absl::InvalidArgumentError(absl::StrCat(what, ": no descriptor"));
  if (transfer.operation == IoOperation::kSync) {
    if (transfer.memory == nullptr && transfer.bytes == 0 && transfer.offset == 0) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat(what, ": a sync is of the whole file"));
  }
  if (transfer.memory == nullptr || transfer.bytes == 0) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": no memory"));
  }
  constexpr uint64_t kEnd = std::numeric_limits<int64_t>::max();
  if (transfer.bytes > kEnd || transfer.offset > kEnd - transfer.bytes) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": files end before that"));
  }
  return absl::OkStatus();
}

absl::Status TransferError(const IoTransfer& transfer, int errno_value, uint64_t done) {
  const std::string_view name = NameOf(transfer.operation);
  const std::string file = DescribeFd(transfer.fd);
  if (transfer.operation == IoOperation::kSync) return ErrnoError(errno_value, name, file);
  return ErrnoErrorAt(errno_value, name, file, transfer.offset + done);
}

absl::Status TransferTimedOut(const IoTransfer& transfer) {
  std::string text = absl::StrCat(Abs(NameOf(transfer.operation)), " ", DescribeFd(transfer.fd));
  if (transfer.operation != IoOperation::kSync) {
    absl::StrAppend(&text, " at offset ", transfer.offset, ", ", transfer.bytes, " bytes");
  }
  return absl::DeadlineExceededError(absl::StrCat(text, ": did not complete in time"));
}

size_t TransferProgress::bytes() const {
  return std::min(transfer_.bytes - done_, kMaxBytesPerCall);
}

std::optional<absl::Status> TransferProgress::Advance(int64_t result) {
  if (result == -EINTR) return std::nullopt;
  if (result < 0) return TransferError(transfer_, static_cast<int>(result), done_);
  if (transfer_.operation == IoOperation::kSync) return absl::OkStatus();
  const size_t moved = static_cast<size_t>(result);
  if (moved > bytes()) return TransferError(transfer_, EIO, done_);  // more than was asked for
  if (done_ + moved == transfer_.bytes) return absl::OkStatus();
  return AfterShort(moved);
}

std::optional<absl::Status> TransferProgress::AfterShort(size_t moved) {
  const uint64_t reached = offset() + moved;
  if (transfer_.operation == IoOperation::kRead) {
    if (moved == 0 || IsEndOfFile(transfer_.fd, reached))
      return EndOfFile(transfer_, done_ + moved);
  } else if (moved == 0) {
    return TransferError(transfer_, EIO, done_);
  }
  const uint64_t aligned = reached / kDirectIoAlignment * kDirectIoAlignment;
  done_ = (aligned > offset() ? aligned : reached) - transfer_.offset;
  return std::nullopt;
}

}  // namespace zeroshard
