// The arithmetic of a whole transfer: what is left after a short one, and how its end is told.
// Shared by the implementations of IoQueue. Pure, except that messages look up the file's path.
#ifndef ZEROSHARD_STORAGE_IO_TRANSFER_H_
#define ZEROSHARD_STORAGE_IO_TRANSFER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

#include "absl/status/status.h"
#include "storage/io_queue.h"

namespace zeroshard {

// The most that is asked of the kernel at once; larger transfers take several calls.
inline constexpr size_t kMaxBytesPerCall = size_t{1} << 30;

// "read", "write", "fdatasync": the words of error messages.
std::string_view NameOf(IoOperation operation);

// InvalidArgument for a transfer that cannot be done.
absl::Status CheckTransfer(const IoTransfer& transfer);

// An error of a transfer, naming operation, file and offset. `errno_value` may be negative.
absl::Status TransferError(const IoTransfer& transfer, int errno_value, uint64_t done = 0);

// DeadlineExceeded, in the same words.
absl::Status TransferTimedOut(const IoTransfer& transfer);

// How far one transfer has come.
class TransferProgress {
 public:
  explicit TransferProgress(const IoTransfer& transfer) : transfer_(transfer) {}

  const IoTransfer& transfer() const { return transfer_; }

  // What to ask of the kernel now.
  std::byte* memory() const { return transfer_.memory + done_; }
  size_t bytes() const;
  uint64_t offset() const { return transfer_.offset + done_; }

  // Takes the kernel's answer to that, a count of bytes or a negative errno. Returns the
  // transfer's status when it has ended; nothing when there is more to ask. What follows a short
  // answer begins at a multiple of kDirectIoAlignment in the file, where that makes progress, so
  // that it is allowed with O_DIRECT too.
  std::optional<absl::Status> Advance(int64_t result);

 private:
  std::optional<absl::Status> AfterShort(size_t moved);

  IoTransfer transfer_;
  size_t done_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_IO_TRANSFER_H_
