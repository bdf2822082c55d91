// Making Unix sockets: listening, connecting, accepting, and who the peer is.

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/fd_passing.h"
#include "base/poll.h"
#include "base/status.h"
#include "base/strings.h"

namespace zeroshard {
namespace {

int KernelType(UnixSocketType type) {
  return type == UnixSocketType::kSeqpacket ? SOCK_SEQPACKET : SOCK_STREAM;
}

sockaddr_un AddressOf(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

absl::StatusOr<UniqueFd> OpenSocket(UnixSocketType type) {
  UniqueFd socket(::socket(AF_UNIX, KernelType(type) | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) return ErrnoError(errno, "open", "Unix socket");
  return socket;
}

// Removes a socket file that nobody listens on; AlreadyExists for everything else.
absl::Status RemoveStaleSocket(const std::string& path, UnixSocketType type) {
  struct stat info = {};
  if (::lstat(path.c_str(), &info) != 0) {
    return errno == ENOENT ? absl::OkStatus() : ErrnoError(errno, "stat", path);
  }
  if (!S_ISSOCK(info.st_mode)) {
    return absl::AlreadyExistsError(
        absl::StrCat(path, " exists and is not a socket: remove it or choose another path"));
  }
  ZS_ASSIGN_OR_RETURN(const UniqueFd probe, OpenSocket(type));
  const sockaddr_un address = AddressOf(path);
  if (::connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 ||
      errno != ECONNREFUSED) {
    return absl::AlreadyExistsError(
        absl::StrCat(path, " is in use by a running process: stop it or choose another path"));
  }
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return ErrnoError(errno, "remove the stale socket", path);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckUnixPath(std::string_view path) {
  if (path.empty()) return absl::InvalidArgumentError("the path of a Unix socket is empty");
  if (path.find('\0') != std::string_view::npos) {
    return absl::InvalidArgumentError("the path of a Unix socket contains a zero byte");
  }
  if (path.size() > kMaxUnixPathBytes) {
    return absl::InvalidArgumentError(absl::StrCat("the path of a Unix socket has ", path.size(),
                                                   " bytes, the limit is ", kMaxUnixPathBytes, ": ",
                                                   Abs(path)));
  }
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> ListenUnix(const std::string& path, mode_t mode, UnixSocketType type) {
  ZS_RETURN_IF_ERROR(CheckUnixPath(path));
  ZS_RETURN_IF_ERROR(RemoveStaleSocket(path, type));
  ZS_ASSIGN_OR_RETURN(UniqueFd socket, OpenSocket(type));
  const sockaddr_un address = AddressOf(path);
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    return ErrnoError(errno, "bind the Unix socket", path);
  }
  // Before listen(), so that nobody connects while the mode is still the default one.
  if (::chmod(path.c_str(), mode) != 0) {
    const int error = errno;
    ::unlink(path.c_str());
    return ErrnoError(error, "set the mode of", path);
  }
  if (::listen(socket.get(), SOMAXCONN) != 0) {
    const int error = errno;
    ::unlink(path.c_str());
    return ErrnoError(error, "listen on", path);
  }
  return socket;
}

absl::StatusOr<UniqueFd> ConnectUnix(const std::string& path, absl::Duration timeout,
                                     UnixSocketType type) {
  ZS_RETURN_IF_ERROR(CheckUnixPath(path));
  ZS_ASSIGN_OR_RETURN(UniqueFd socket, OpenSocket(type));
  const sockaddr_un address = AddressOf(path);
  const Deadline deadline = Deadline::After(timeout);
  // A Unix socket never reports EINPROGRESS: a full backlog is EAGAIN, and nothing can be polled.
  while (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) !=
         0) {
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return ErrnoError(errno, "connect to", path);
    if (deadline.Passed()) {
      return absl::DeadlineExceededError(
          absl::StrCat("connect to ", path, ": the listener takes no connections"));
    }
    ::poll(nullptr, 0, 1);
  }
  return socket;
}

absl::StatusOr<UniqueFd> AcceptUnix(int listener, absl::Duration timeout) {
  const Deadline deadline = Deadline::After(timeout);
  while (true) {
    UniqueFd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (socket.valid()) return socket;
    if (errno == EINTR || errno == ECONNABORTED) continue;
    if (errno != EAGAIN) return ErrnoError(errno, "accept on", "Unix socket");
    ZS_RETURN_IF_ERROR(AwaitReady(listener, POLLIN, deadline, "accept on a Unix socket"));
  }
}

absl::StatusOr<std::pair<UniqueFd, UniqueFd>> UnixSocketPair() {
  int fds[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0) {
    return ErrnoError(errno, "open", "Unix socket pair");
  }
  return std::make_pair(UniqueFd(fds[0]), UniqueFd(fds[1]));
}

absl::StatusOr<PeerCredentials> GetPeerCredentials(int socket) {
  ucred credentials = {};
  socklen_t length = sizeof(credentials);
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) {
    return ErrnoError(errno, "read the peer's credentials of", "Unix socket");
  }
  return PeerCredentials{credentials.pid, credentials.uid, credentials.gid};
}

}  // namespace zeroshard
