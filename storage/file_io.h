// Whole transfers between memory and files, with every result checked.
//
// Transfers are positional, so that a descriptor may be shared between threads. Interrupted and
// short transfers are carried on. Errors name the file (`name`, see DescribeFd) and the offset. All
// functions may be called from any thread.
//
// Fault points: storage.file.write, storage.file.sync.
#ifndef ZEROSHARD_STORAGE_FILE_IO_H_
#define ZEROSHARD_STORAGE_FILE_IO_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace zeroshard {

// The path of an open file for messages; "descriptor N" when /proc is not there.
std::string DescribeFd(int fd);

inline std::span<const std::byte> AsBytes(std::string_view text) {
  return std::as_bytes(std::span<const char>(text.data(), text.size()));
}

absl::Status WriteAllAt(int fd, std::span<const std::byte> data, uint64_t offset,
                        const std::string& name);

// DataLoss when the file ends before `out` is full.
absl::Status ReadAllAt(int fd, std::span<std::byte> out, uint64_t offset, const std::string& name);

// InvalidArgument for anything but a regular file.
absl::StatusOr<uint64_t> RegularFileSize(int fd, const std::string& name);

// fdatasync of a file; fsync of a directory.
absl::Status SyncFile(int fd, const std::string& name);
absl::Status SyncDirectory(int fd);

// Reserves space so that writes below `bytes` do not run out of it; the length does not change.
// File systems that cannot reserve accept the call. ResourceExhausted, with the numbers, when there
// is no room.
absl::Status ReserveSpace(int fd, uint64_t bytes, const std::string& name);

// DataLoss naming file and offset: "/path at offset 4096: what".
absl::Status CorruptAt(const std::string& name, uint64_t offset, std::string_view what);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_FILE_IO_H_
