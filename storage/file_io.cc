#include "storage/file_io.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status.h"
#include "base/strings.h"

namespace zeroshard {

std::string DescribeFd(int fd) {
  char path[4096];
  const std::string link = absl::StrCat("/proc/self/fd/", fd);
  const ssize_t length = ::readlink(link.c_str(), path, sizeof(path));
  if (length <= 0) return absl::StrCat("descriptor ", fd);
  return std::string(path, static_cast<size_t>(length));
}

absl::Status WriteAllAt(int fd, std::span<const std::byte> data, uint64_t offset,
                        const std::string& name) {
  ZS_FAULT_STATUS("storage.file.write");
  while (!data.empty()) {
    const ssize_t written = ::pwrite(fd, data.data(), data.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return ErrnoErrorAt(errno, "write", name, offset);
    if (written == 0) return ErrnoErrorAt(EIO, "write of nothing to", name, offset);
    data = data.subspan(static_cast<size_t>(written));
    offset += static_cast<uint64_t>(written);
  }
  return absl::OkStatus();
}

absl::Status ReadAllAt(int fd, std::span<std::byte> out, uint64_t offset, const std::string& name) {
  while (!out.empty()) {
    const ssize_t got = ::pread(fd, out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoErrorAt(errno, "read", name, offset);
    if (got == 0) {
      return CorruptAt(name, offset,
                       absl::StrCat("the file ends, ", out.size(), " more bytes were expected"));
    }
    out = out.subspan(static_cast<size_t>(got));
    offset += static_cast<uint64_t>(got);
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> RegularFileSize(int fd, const std::string& name) {
  struct stat info = {};
  if (::fstat(fd, &info) != 0) return ErrnoError(errno, "stat", name);
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(name, " is not a regular file"));
  }
  return static_cast<uint64_t>(info.st_size);
}

absl::Status SyncFile(int fd, const std::string& name) {
  ZS_FAULT_STATUS("storage.file.sync");
  if (::fdatasync(fd) != 0) return ErrnoError(errno, "fdatasync", name);
  return absl::OkStatus();
}

absl::Status SyncDirectory(int fd) {
  ZS_FAULT_STATUS("storage.file.sync");
  if (::fsync(fd) != 0) return ErrnoError(errno, "fsync", DescribeFd(fd));
  return absl::OkStatus();
}

absl::Status ReserveSpace(int fd, uint64_t bytes, const std::string& name) {
  if (bytes == 0) return absl::OkStatus();
  // fallocate alone would fill the disk before it finds out.
  struct statvfs volume = {};
  if (::fstatvfs(fd, &volume) != 0) return ErrnoError(errno, "statvfs", name);
  const uint64_t free_bytes = uint64_t{volume.f_bavail} * volume.f_frsize;
  if (bytes > free_bytes) {
    return absl::ResourceExhaustedError(absl::StrCat(name, " needs ", bytes, " bytes, ", free_bytes,
                                                     " are free on its file system"));
  }
  int result = 0;
  do {
    result = ::fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0 || errno == EOPNOTSUPP || errno == ENOSYS) return absl::OkStatus();
  return ErrnoError(errno, absl::StrCat("reserve ", bytes, " bytes for"), name);
}

absl::Status CorruptAt(const std::string& name, uint64_t offset, std::string_view what) {
  return absl::DataLossError(absl::StrCat(name, " at offset ", offset, ": ", Abs(what)));
}

}  // namespace zeroshard
