#include "server/run_files.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace zeroshard {

RunFiles::~RunFiles() {
  for (const std::string& path : sockets_) unlink(path.c_str());
  for (auto it = directories_.rbegin(); it != directories_.rend(); ++it) rmdir(it->c_str());
}

absl::Status RunFiles::MakeDirectory(const std::string& key, const std::string& path, mode_t mode) {
  auto failed = [&](const char* what, const std::string& object) {
    return Annotate(ErrnoError(errno, what, object), key);
  };
  for (size_t slash = path.find('/', 1);; slash = path.find('/', slash + 1)) {
    const std::string prefix = path.substr(0, slash);
    const bool last = slash == std::string::npos;
    if (mkdir(prefix.c_str(), last ? mode : 0755) == 0) {
      directories_.push_back(prefix);
      // The mask of the process does not decide who may enter.
      if (last && chmod(prefix.c_str(), mode) != 0) return failed("chmod", prefix);
    } else if (errno != EEXIST) {
      return failed("mkdir", prefix);
    }
    if (last) break;
  }
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return failed("stat", path);
  if (!S_ISDIR(info.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat(key, ": ", path, " is not a directory"));
  }
  if (access(path.c_str(), W_OK | X_OK) != 0) return failed("access", path);
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> RunFiles::Listen(const std::string& path, mode_t mode,
                                          UnixSocketType type) {
  absl::StatusOr<UniqueFd> listener = ListenUnix(path, mode, type);
  if (!listener.ok()) {
    if (absl::IsAlreadyExists(listener.status())) {
      return absl::AlreadyExistsError(
          absl::StrCat("another daemon runs here already: ", listener.status().message(),
                       "; stop it, or choose another run_dir"));
    }
    return listener.status();
  }
  sockets_.push_back(path);
  return listener;
}

}  // namespace zeroshard
