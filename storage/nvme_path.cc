#include "storage/nvme_path.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/chunk_image.h"
#include "storage/file_io.h"
#include "storage/named_dir.h"

namespace zeroshard {
namespace {

constexpr const char kDirectory[] = "zeroshard";
constexpr const char kLock[] = "lock";

absl::Status Refused(const std::string& path, std::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("nvme_path \"", path, "\" ", Abs(why)));
}

// Errors of the probe in terms of the path; EROFS is the operator's to change.
absl::Status PathError(const std::string& path, const absl::Status& status) {
  if (ErrnoOf(status) == EROFS) {
    return absl::FailedPreconditionError(
        absl::StrCat("nvme_path \"", path, "\" is on a read-only file system"));
  }
  return Annotate(status, Std(absl::StrCat("nvme_path \"", path, "\"")));
}

absl::StatusOr<UniqueFd> OpenOwnDirectory(const std::string& path) {
  ZS_ASSIGN_OR_RETURN(UniqueFd parent, OpenDirectory(path));
  if (::mkdirat(parent.get(), kDirectory, 0700) != 0 && errno != EEXIST) {
    return ErrnoError(errno, "make directory", absl::StrCat(path, "/", kDirectory));
  }
  ZS_ASSIGN_OR_RETURN(UniqueFd own, OpenBeneath(parent.get(), kDirectory, O_RDONLY | O_DIRECTORY));
  struct stat info = {};
  if (::fstat(own.get(), &info) != 0) return ErrnoError(errno, "stat", DescribeFd(own.get()));
  if (info.st_uid != ::geteuid() || (info.st_mode & 022) != 0) {
    return absl::PermissionDeniedError(
        absl::StrFormat("%s belongs to user %d with mode %04o; it must belong to the daemon's user "
                        "%d and be writable by nobody else",
                        DescribeFd(own.get()), info.st_uid, info.st_mode & 07777, ::geteuid()));
  }
  return own;
}

// Alignment that the file wants for O_DIRECT; 0 when it has none of it, 1 when it does not tell.
uint64_t DirectAlignment(int fd) {
  struct statx info = {};
  if (::statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) != 0) return 1;
  if ((info.stx_mask & STATX_DIOALIGN) == 0) return 1;
  if (info.stx_dio_mem_align == 0 || info.stx_dio_offset_align == 0) return 0;
  return std::max(info.stx_dio_mem_align, info.stx_dio_offset_align);
}

absl::Status WriteAndReadBack(int fd, const std::string& name) {
  const DirectBuffer out(2 * kImageAlignment);
  const DirectBuffer in(2 * kImageAlignment);
  for (size_t i = 0; i < out.span().size(); ++i) out.span()[i] = std::byte(i * 7 + i / 256);
  ZS_RETURN_IF_ERROR(WriteAllAt(fd, out.span(), 0, name));
  ZS_RETURN_IF_ERROR(ReadAllAt(fd, in.span(), 0, name));
  if (std::memcmp(out.span().data(), in.span().data(), out.span().size()) != 0) {
    return CorruptAt(name, 0, "a probe does not read back as it was written");
  }
  return absl::OkStatus();
}

// Whether O_DIRECT works; an error when nothing works.
absl::StatusOr<bool> Probe(const NvmePath& path, const FileSystemKind& kind) {
  ZS_ASSIGN_OR_RETURN(TemporaryFile file,
                      TemporaryFile::Create(path.directory.get(), "probe", Existing::kReplace));
  const std::string name = DescribeFd(file.fd());
  ZS_RETURN_IF_ERROR(WriteAndReadBack(file.fd(), name));
  const uint64_t alignment = DirectAlignment(file.fd());
  if (alignment > kImageAlignment) {
    return Refused(path.path,
                   Std(absl::StrCat("wants transfers aligned to ", alignment, " bytes; at most ",
                                    kImageAlignment, " are supported")));
  }
  // Memory takes O_DIRECT without meaning it.
  if (alignment == 0 || kind.place == FileSystemPlace::kMemory) return false;
  const int flags = ::fcntl(file.fd(), F_GETFL);
  if (::fcntl(file.fd(), F_SETFL, flags | O_DIRECT) != 0) return false;
  const absl::Status direct = WriteAndReadBack(file.fd(), name);
  if (ErrnoOf(direct) == EINVAL || ErrnoOf(direct) == EOPNOTSUPP) return false;
  ZS_RETURN_IF_ERROR(direct);
  return true;
}

absl::Status CheckPath(const std::string& path) {
  if (path.empty()) return Refused(path, "is empty; give a directory on a local drive");
  if (path.front() != '/') return Refused(path, "is relative; give an absolute path");
  struct stat info = {};
  if (::stat(path.c_str(), &info) != 0) {
    if (errno == ENOENT) {
      return absl::NotFoundError(absl::StrCat(
          "nvme_path \"", path, "\" does not exist; make the directory on a local drive"));
    }
    return ErrnoError(errno, "nvme_path", path);
  }
  if (!S_ISDIR(info.st_mode)) return Refused(path, "is not a directory");
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> JudgeFileSystem(const std::string& path, const FileSystemKind& kind,
                                            const NvmePathOptions& options) {
  if (kind.place != FileSystemPlace::kNetwork) return std::string();
  const std::string what =
      absl::StrCat("is on ", kind.name,
                   ", a network file system: its speed is not a drive's, and it may acknowledge "
                   "writes that a crash loses");
  if (options.allow_network_path) return absl::StrCat("nvme_path \"", path, "\" ", what);
  return Refused(path, Std(absl::StrCat(what, "; allow_network_path: true takes it anyway")));
}

absl::StatusOr<NvmePath> AdmitNvmePath(const std::string& path, const NvmePathOptions& options) {
  ZS_RETURN_IF_ERROR(CheckPath(path));
  ZS_ASSIGN_OR_RETURN(const FileSystemKind kind, FileSystemKindAt(path));
  NvmePath admitted;
  admitted.path = path;
  admitted.filesystem = kind.name;
  ZS_ASSIGN_OR_RETURN(const std::string warning, JudgeFileSystem(path, kind, options));
  if (!warning.empty()) admitted.warnings.push_back(warning);
  auto directory = OpenOwnDirectory(path);
  if (!directory.ok()) return PathError(path, directory.status());
  admitted.directory = *std::move(directory);
  auto direct = Probe(admitted, kind);
  if (!direct.ok()) return PathError(path, direct.status());
  admitted.direct = *direct;
  if (!admitted.direct) {
    admitted.warnings.push_back(absl::StrCat(
        "nvme_path \"", path, "\" is on ", admitted.filesystem,
        " without O_DIRECT: transfers go through the page cache, so that states may take host "
        "memory twice"));
  }
  return admitted;
}

absl::StatusOr<UniqueFd> LockNvmePath(const NvmePath& path) {
  auto fd = OpenBeneath(path.directory.get(), kLock, O_RDWR | O_CREAT, 0600);
  if (!fd.ok()) return PathError(path.path, fd.status());
  if (::flock(fd->get(), LOCK_EX | LOCK_NB) == 0) return fd;
  if (errno != EWOULDBLOCK) return ErrnoError(errno, "lock", DescribeFd(fd->get()));
  return absl::FailedPreconditionError(
      absl::StrCat("nvme_path \"", path.path, "\" is used by another daemon, which holds ",
                   DescribeFd(fd->get()), "; give each daemon a directory of its own"));
}

DirectBuffer::DirectBuffer(size_t bytes)
    : data_(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{kImageAlignment}))),
      bytes_(bytes) {
  std::memset(data_.get(), 0, bytes);
}

void DirectBuffer::Free::operator()(std::byte* data) const {
  ::operator delete (data, std::align_val_t{kImageAlignment});
}

}  // namespace zeroshard
