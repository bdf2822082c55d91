#include "base/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/huge_page.h"
#include "base/status.h"

namespace zeroshard {
namespace {

std::string Describe(int fd) { return absl::StrCat("shared memory (descriptor ", fd, ")"); }

}  // namespace

absl::StatusOr<UniqueFd> CreateSealedMemfd(std::string_view name, size_t bytes) {
  if (bytes == 0) {
    return absl::InvalidArgumentError("shared memory of 0 bytes was asked for");
  }
  const std::string text(name);
  UniqueFd fd(::memfd_create(text.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) return ErrnoError(errno, "create shared memory", text);
  if (::fchmod(fd.get(), 0600) != 0) return ErrnoError(errno, "set the mode of", text);
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return ErrnoError(errno, absl::StrCat("size to ", bytes, " bytes"), text);
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return ErrnoError(errno, "seal", text);
  }
  return fd;
}

absl::StatusOr<UniqueFd> ReopenReadOnly(int fd) {
  if (::fchmod(fd, 0400) != 0) return ErrnoError(errno, "set the mode of", Describe(fd));
  const std::string path = absl::StrCat("/proc/self/fd/", fd);
  UniqueFd reader(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!reader.valid()) return ErrnoError(errno, "reopen read-only", Describe(fd));
  return reader;
}

absl::Status VerifySealed(int fd, size_t min_bytes) {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  if (seals < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(Describe(fd), " is not a memfd, so its size could change under a mapping"));
  }
  if ((seals & F_SEAL_SHRINK) == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(Describe(fd), " is not sealed against shrinking (F_SEAL_SHRINK)"));
  }
  ZS_ASSIGN_OR_RETURN(const uint64_t size, FileBytes(fd));
  if (size < min_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(Describe(fd), " has ", size, " bytes, expected at least ", min_bytes));
  }
  return absl::OkStatus();
}

absl::Status Reserve(int fd, size_t offset, size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  int result = 0;
  do {
    result = ::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0)
    return ErrnoError(errno, absl::StrCat("reserve ", bytes, " bytes of"), Describe(fd));
  return absl::OkStatus();
}

absl::Status PunchHole(int fd, size_t offset, size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  int result = 0;
  do {
    result = ::fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                         static_cast<off_t>(bytes));
  } while (result != 0 && errno == EINTR);
  if (result != 0) return ErrnoErrorAt(errno, "punch a hole into", Describe(fd), offset);
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> AllocatedBytes(int fd) {
  struct stat info = {};
  if (::fstat(fd, &info) != 0) return ErrnoError(errno, "stat", Describe(fd));
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

absl::StatusOr<uint64_t> FileBytes(int fd) {
  struct stat info = {};
  if (::fstat(fd, &info) != 0) return ErrnoError(errno, "stat", Describe(fd));
  return static_cast<uint64_t>(info.st_size);
}

absl::StatusOr<MappedRegion> MappedRegion::Map(int fd, size_t bytes, Access access,
                                               const MapOptions& options) {
  ZS_ASSIGN_OR_RETURN(const uint64_t size, FileBytes(fd));
  if (bytes == 0 || options.offset > size || bytes > size - options.offset) {
    return absl::InvalidArgumentError(absl::StrCat("cannot map ", bytes, " bytes at offset ",
                                                   options.offset, " of ", Describe(fd), " with ",
                                                   size, " bytes"));
  }
  const int protection = access == Access::kReadOnly ? PROT_READ : PROT_READ | PROT_WRITE;
  const int flags = MAP_SHARED | (options.populate ? MAP_POPULATE : 0);
  void* address = MapForHugePages({.bytes = bytes,
                                   .protection = protection,
                                   .flags = flags,
                                   .fd = fd,
                                   .offset = options.offset});
  if (address == MAP_FAILED) {
    return ErrnoError(errno, absl::StrCat("map ", bytes, " bytes of"), Describe(fd));
  }
  MappedRegion region(static_cast<std::byte*>(address), bytes);
  if (options.dont_fork && ::madvise(address, bytes, MADV_DONTFORK) != 0) {
    return ErrnoError(errno, "advise DONTFORK on", Describe(fd));
  }
  if (options.dont_dump && ::madvise(address, bytes, MADV_DONTDUMP) != 0) {
    return ErrnoError(errno, "advise DONTDUMP on", Describe(fd));
  }
  return region;
}

MappedRegion::MappedRegion(MappedRegion&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedRegion& MappedRegion::operator=(MappedRegion&& other) noexcept {
  if (this != &other) {
    Unmap();
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

MappedRegion::~MappedRegion() { Unmap(); }

void MappedRegion::Unmap() {
  if (data_ != nullptr) ::munmap(data_, size_);
}

}  // namespace zeroshard
