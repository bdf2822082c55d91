// Files and directories beneath a directory descriptor, named by clients.
//
// Clients send names, never paths. A name is one path component, opened without following symbolic
// links, so that nothing outside the directory can be reached. What is written appears whole or not
// at all: it is made under a temporary name, synced, and renamed. Temporary names begin with
// ".tmp-" and no valid name begins with a dot. Leftovers of a crash are collected by
// RemoveTemporaries.
//
// Thread-safe as far as the objects are not shared. Fault point: storage.named_dir.rename.
#ifndef ZEROSHARD_STORAGE_NAMED_DIR_H_
#define ZEROSHARD_STORAGE_NAMED_DIR_H_

#include <sys/types.h>

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/unique_fd.h"

namespace zeroshard {

// InvalidArgument unless `name` is [A-Za-z0-9._-]{1,128} and does not begin with a dot.
absl::Status ValidateName(std::string_view name);

// A directory by its path, as an operator configured it; symbolic links are followed.
absl::StatusOr<UniqueFd> OpenDirectory(const std::string& path);

// open(2) of the single path component `name`, close-on-exec, never through a symbolic link.
// InvalidArgument for a name with a slash, "." or "..".
absl::StatusOr<UniqueFd> OpenBeneath(int dir_fd, const std::string& name, int flags,
                                     mode_t mode = 0640);

// The names in a directory, in no order, but "." and "..".
absl::StatusOr<std::vector<std::string>> ListNames(int dir_fd);

// What Commit does with an existing file of the name.
enum class Existing { kRefuse, kReplace };

// A file that gets its name when it is complete; removed when it is destroyed before that.
class TemporaryFile {
 public:
  // Validates `name`, and refuses one that exists (AlreadyExists) when `existing` is kRefuse.
  static absl::StatusOr<TemporaryFile> Create(int dir_fd, const std::string& name,
                                              Existing existing);
  TemporaryFile(TemporaryFile&& other) noexcept = default;
  TemporaryFile& operator=(TemporaryFile&& other) = delete;
  ~TemporaryFile();

  // Open for reading and writing.
  int fd() const { return fd_.get(); }

  // Syncs, renames, syncs the directory.
  absl::Status Commit() &&;

 private:
  TemporaryFile() = default;

  UniqueFd directory_;
  UniqueFd fd_;
  std::string name_;
  std::string temporary_name_;  // empty once committed
  Existing existing_ = Existing::kRefuse;
};

// A flat directory that gets its name when it is complete; removed with the files in it when it is
// destroyed before that. An existing directory of the name is never replaced.
class TemporaryDirectory {
 public:
  static absl::StatusOr<TemporaryDirectory> Create(int dir_fd, const std::string& name);
  TemporaryDirectory(TemporaryDirectory&& other) noexcept = default;
  TemporaryDirectory& operator=(TemporaryDirectory&& other) = delete;
  ~TemporaryDirectory();

  int fd() const { return fd_.get(); }

  // Syncs the directory (its files are the caller's to sync), renames, syncs the parent.
  absl::Status Commit() &&;

 private:
  TemporaryDirectory() = default;

  UniqueFd parent_;
  UniqueFd fd_;
  std::string name_;
  std::string temporary_name_;  // empty once committed
};

// Removes what earlier processes left under temporary names: files, and directories of files.
// Returns how many entries it removed. Only for a directory that no other process writes to.
absl::StatusOr<int> RemoveTemporaries(int dir_fd);

// Likewise those of `name` alone. For a name that no other process makes.
absl::StatusOr<int> RemoveTemporariesOf(int dir_fd, const std::string& name);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_NAMED_DIR_H_
