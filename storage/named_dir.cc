#include "storage/named_dir.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/random_token.h"
#include "base/status.h"
#include "base/strings.h"
#include "storage/file_io.h"

namespace zeroshard {
namespace {

constexpr std::string_view kTemporaryPrefix = ".tmp-";
constexpr size_t kTemporaryDigits = 16;  // after the name
constexpr size_t kMaxNameLength = 128;

std::string PathOf(int dir_fd, const std::string& name) {
  return absl::StrCat(DescribeFd(dir_fd), "/", name);
}

bool IsNameCharacter(char c) {
  return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '.' ||
         c == '_' || c == '-';
}

std::string TemporaryName(const std::string& name) {
  return absl::StrCat(Abs(kTemporaryPrefix), name, "-", absl::Hex(RandomId(), absl::kZeroPad16));
}

absl::Status RefuseExisting(int dir_fd, const std::string& name) {
  struct stat info = {};
  if (::fstatat(dir_fd, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0) {
    return absl::AlreadyExistsError(absl::StrCat(PathOf(dir_fd, name), " exists"));
  }
  if (errno == ENOENT) return absl::OkStatus();
  return ErrnoError(errno, "stat", PathOf(dir_fd, name));
}

// rename(2) that fails when the target exists. Network file systems lack the flag; there, a
// directory cannot replace one that holds files, and a file is linked to its name instead.
absl::Status RenameIfAbsent(int dir_fd, const std::string& from, const std::string& to) {
  if (::renameat2(dir_fd, from.c_str(), dir_fd, to.c_str(), RENAME_NOREPLACE) == 0) {
    return absl::OkStatus();
  }
  int error = errno;
  if (error == EINVAL || error == ENOSYS) {
    struct stat info = {};
    if (::fstatat(dir_fd, from.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) {
      return ErrnoError(errno, "stat", PathOf(dir_fd, from));
    }
    if (S_ISDIR(info.st_mode)) {
      if (::renameat(dir_fd, from.c_str(), dir_fd, to.c_str()) == 0) return absl::OkStatus();
    } else if (::linkat(dir_fd, from.c_str(), dir_fd, to.c_str(), 0) == 0 &&
               ::unlinkat(dir_fd, from.c_str(), 0) == 0) {
      return absl::OkStatus();
    }
    error = errno;
  }
  if (error == ENOTEMPTY) error = EEXIST;
  return ErrnoError(error, "rename to", PathOf(dir_fd, to));
}

absl::Status Rename(int dir_fd, const std::string& from, const std::string& to, Existing existing) {
  ZS_FAULT_STATUS("storage.named_dir.rename");
  if (existing == Existing::kRefuse) return RenameIfAbsent(dir_fd, from, to);
  if (::renameat(dir_fd, from.c_str(), dir_fd, to.c_str()) != 0) {
    return ErrnoError(errno, "rename to", PathOf(dir_fd, to));
  }
  return absl::OkStatus();
}

// Removes a file, or a directory of files.
absl::Status RemoveEntry(int dir_fd, const std::string& name) {
  if (::unlinkat(dir_fd, name.c_str(), 0) == 0) return absl::OkStatus();
  if (errno != EISDIR && errno != EPERM) return ErrnoError(errno, "remove", PathOf(dir_fd, name));
  ZS_ASSIGN_OR_RETURN(UniqueFd fd, OpenBeneath(dir_fd, name, O_RDONLY | O_DIRECTORY));
  ZS_ASSIGN_OR_RETURN(std::vector<std::string> files, ListNames(fd.get()));
  for (const std::string& file : files) {
    if (::unlinkat(fd.get(), file.c_str(), 0) != 0) {
      return ErrnoError(errno, "remove", PathOf(fd.get(), file));
    }
  }
  if (::unlinkat(dir_fd, name.c_str(), AT_REMOVEDIR) != 0) {
    return ErrnoError(errno, "remove", PathOf(dir_fd, name));
  }
  return absl::OkStatus();
}

// Removes the temporaries whose name `wanted` accepts.
absl::StatusOr<int> RemoveThoseOf(int dir_fd, absl::FunctionRef<bool(std::string_view)> wanted) {
  ZS_ASSIGN_OR_RETURN(std::vector<std::string> names, ListNames(dir_fd));
  int removed = 0;
  for (const std::string& name : names) {
    if (!std::string_view(name).starts_with(kTemporaryPrefix) || !wanted(name)) continue;
    ZS_RETURN_IF_ERROR(RemoveEntry(dir_fd, name));
    ++removed;
  }
  return removed;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ListNames(int dir_fd) {
  ZS_ASSIGN_OR_RETURN(UniqueFd fd, OpenBeneath(dir_fd, ".", O_RDONLY | O_DIRECTORY));
  std::unique_ptr<DIR, int (*)(DIR*)> directory(::fdopendir(fd.get()), &::closedir);
  if (directory == nullptr) return ErrnoError(errno, "open directory", DescribeFd(dir_fd));
  static_cast<void>(fd.release());
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(directory.get())) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
    errno = 0;
  }
  if (errno != 0) return ErrnoError(errno, "read directory", DescribeFd(dir_fd));
  return names;
}

absl::Status ValidateName(std::string_view name) {
  bool valid = !name.empty() && name.size() <= kMaxNameLength && name.front() != '.';
  for (char c : name) valid = valid && IsNameCharacter(c);
  if (valid) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "\"", absl::CHexEscape(Abs(name.substr(0, 2 * kMaxNameLength))), "\" is not a name: 1 to ",
      kMaxNameLength, " letters, digits, '.', '_' or '-', the first one not a '.', are expected"));
}

absl::StatusOr<UniqueFd> OpenDirectory(const std::string& path) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoError(errno, "open directory", path);
  return fd;
}

absl::StatusOr<UniqueFd> OpenBeneath(int dir_fd, const std::string& name, int flags, mode_t mode) {
  const bool itself = name == "." && (flags & O_DIRECTORY) != 0;
  if (name.empty() || name == ".." || (name == "." && !itself) ||
      name.find('/') != std::string::npos || name.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", absl::CHexEscape(name), "\" is not the name of a file"));
  }
  open_how how = {};
  how.flags = static_cast<uint64_t>(flags | O_CLOEXEC);
  how.mode = (flags & O_CREAT) != 0 ? mode : 0;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS;
  UniqueFd fd;
  do {
    fd.reset(static_cast<int>(::syscall(SYS_openat2, dir_fd, name.c_str(), &how, sizeof(how))));
  } while (!fd.valid() && (errno == EINTR || errno == EAGAIN));
  // Filters of containers that do not know the call answer EPERM. For one component without a slash
  // O_NOFOLLOW is as strict.
  if (!fd.valid() && (errno == ENOSYS || errno == EPERM)) {
    fd.reset(::openat(dir_fd, name.c_str(), flags | O_CLOEXEC | O_NOFOLLOW, mode));
  }
  if (!fd.valid()) return ErrnoError(errno, "open", PathOf(dir_fd, name));
  return fd;
}

absl::StatusOr<TemporaryFile> TemporaryFile::Create(int dir_fd, const std::string& name,
                                                    Existing existing) {
  ZS_RETURN_IF_ERROR(ValidateName(name));
  if (existing == Existing::kRefuse) {
    ZS_RETURN_IF_ERROR(RefuseExisting(dir_fd, name));
  }
  std::string temporary_name = TemporaryName(name);
  TemporaryFile file;
  file.name_ = name;
  file.existing_ = existing;
  ZS_ASSIGN_OR_RETURN(file.directory_, DuplicateFd(dir_fd));
  ZS_ASSIGN_OR_RETURN(file.fd_, OpenBeneath(dir_fd, temporary_name, O_RDWR | O_CREAT | O_EXCL));
  file.temporary_name_ = std::move(temporary_name);
  return file;
}

TemporaryFile::~TemporaryFile() {
  if (directory_.valid() && !temporary_name_.empty()) {
    static_cast<void>(::unlinkat(directory_.get(), temporary_name_.c_str(), 0));
  }
}

absl::Status TemporaryFile::Commit() && {
  ZS_RETURN_IF_ERROR(SyncFile(fd_.get(), PathOf(directory_.get(), temporary_name_)));
  ZS_RETURN_IF_ERROR(Rename(directory_.get(), temporary_name_, name_, existing_));
  temporary_name_.clear();
  ZS_RETURN_IF_ERROR(SyncDirectory(directory_.get()));
  return std::move(fd_).Close();
}

absl::StatusOr<TemporaryDirectory> TemporaryDirectory::Create(int dir_fd, const std::string& name) {
  ZS_RETURN_IF_ERROR(ValidateName(name));
  ZS_RETURN_IF_ERROR(RefuseExisting(dir_fd, name));
  std::string temporary_name = TemporaryName(name);
  TemporaryDirectory directory;
  directory.name_ = name;
  ZS_ASSIGN_OR_RETURN(directory.parent_, DuplicateFd(dir_fd));
  if (::mkdirat(dir_fd, temporary_name.c_str(), 0750) != 0) {
    return ErrnoError(errno, "make directory", PathOf(dir_fd, temporary_name));
  }
  directory.temporary_name_ = std::move(temporary_name);
  ZS_ASSIGN_OR_RETURN(directory.fd_,
                      OpenBeneath(dir_fd, directory.temporary_name_, O_RDONLY | O_DIRECTORY));
  return directory;
}

TemporaryDirectory::~TemporaryDirectory() {
  if (!parent_.valid() || temporary_name_.empty()) return;
  // What cannot be removed now is collected by RemoveTemporaries.
  static_cast<void>(RemoveEntry(parent_.get(), temporary_name_).ok());
}

absl::Status TemporaryDirectory::Commit() && {
  ZS_RETURN_IF_ERROR(SyncDirectory(fd_.get()));
  ZS_RETURN_IF_ERROR(Rename(parent_.get(), temporary_name_, name_, Existing::kRefuse));
  temporary_name_.clear();
  return SyncDirectory(parent_.get());
}

absl::StatusOr<int> RemoveTemporaries(int dir_fd) {
  return RemoveThoseOf(dir_fd, [](std::string_view) { return true; });
}

absl::StatusOr<int> RemoveTemporariesOf(int dir_fd, const std::string& name) {
  const std::string begin = absl::StrCat(Abs(kTemporaryPrefix), name, "-");
  return RemoveThoseOf(dir_fd, [&begin](std::string_view found) {
    return found.starts_with(begin) && found.size() == begin.size() + kTemporaryDigits;
  });
}

}  // namespace zeroshard
