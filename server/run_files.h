// RunFiles: the directories and sockets of the daemon, removed again when it ends or fails to
// start.

#ifndef ZEROSHARD_SERVER_RUN_FILES_H_
#define ZEROSHARD_SERVER_RUN_FILES_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/fd_passing.h"
#include "base/unique_fd.h"

namespace zeroshard {

// One thread at a time.
class RunFiles {
 public:
  RunFiles() = default;
  RunFiles(const RunFiles&) = delete;
  RunFiles& operator=(const RunFiles&) = delete;
  // Removes the sockets; and the directories that it made, if they are empty.
  ~RunFiles();

  // A directory with all its parents. An existing one is used as it is; it must be writable.
  // PermissionDenied and InvalidArgument (not a directory) say which `key` of the configuration
  // names it.
  absl::Status MakeDirectory(const std::string& key, const std::string& path, mode_t mode);

  // A listening socket; a stale file is replaced, a live one is AlreadyExists.
  absl::StatusOr<UniqueFd> Listen(const std::string& path, mode_t mode, UnixSocketType type);

 private:
  std::vector<std::string> directories_;  // made here, outermost first
  std::vector<std::string> sockets_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_RUN_FILES_H_
