// Unix sockets between processes of one node: listening, connecting, who the peer is, and messages
// that carry file descriptors (SCM_RIGHTS).
//
// SendMessage and ReceiveMessage need SOCK_SEQPACKET (the default here): one send is one receive.
// All functions may be called from any thread; two threads must not receive on one socket at once.
// Every wait has a timeout; absl::InfiniteDuration() waits for ever.

#ifndef ZEROSHARD_BASE_FD_PASSING_H_
#define ZEROSHARD_BASE_FD_PASSING_H_

#include <sys/types.h>

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"

namespace zeroshard {

// The kernel's limit for the path of a Unix socket, without the closing zero byte.
inline constexpr size_t kMaxUnixPathBytes = 107;

// Descriptors in one message.
inline constexpr size_t kMaxFdsPerMessage = 64;

// Bytes in one message, unless the receiver asks for less.
inline constexpr size_t kMaxMessageBytes = 64 * 1024;

enum class UnixSocketType { kSeqpacket, kStream };

// InvalidArgument with both lengths when `path` is empty or too long for a Unix socket.
absl::Status CheckUnixPath(std::string_view path);

// A listening, non-blocking, close-on-exec socket at `path` with file mode `mode`. A socket file
// that nobody listens on any more (left by a crash) is replaced; a live one gives AlreadyExists,
// and so does a file of any other kind, which is never removed.
absl::StatusOr<UniqueFd> ListenUnix(const std::string& path, mode_t mode,
                                    UnixSocketType type = UnixSocketType::kSeqpacket);

// A connected socket. Unavailable when nobody listens, NotFound when there is no such path;
// a listener that does not take the connection in time gives DeadlineExceeded.
absl::StatusOr<UniqueFd> ConnectUnix(const std::string& path, absl::Duration timeout,
                                     UnixSocketType type = UnixSocketType::kSeqpacket);

// The next connection of a listener; DeadlineExceeded when none came in time.
absl::StatusOr<UniqueFd> AcceptUnix(int listener, absl::Duration timeout);

// Two connected SOCK_SEQPACKET sockets, close-on-exec.
absl::StatusOr<std::pair<UniqueFd, UniqueFd>> UnixSocketPair();

// Who connected, as the kernel recorded it then.
struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
  gid_t gid = 0;
};
absl::StatusOr<PeerCredentials> GetPeerCredentials(int socket);

struct Message {
  std::string bytes;          // never empty
  std::vector<UniqueFd> fds;  // close-on-exec
};

// Sends one message of 1 to kMaxMessageBytes bytes with up to kMaxFdsPerMessage descriptors, which
// the caller keeps. Unavailable when the peer is gone; never raises SIGPIPE.
absl::Status SendMessage(int socket, std::string_view bytes, std::span<const int> fds,
                         absl::Duration timeout);

// The next message. Unavailable when the peer closed, DeadlineExceeded when none came in time,
// InvalidArgument when it was longer than `max_bytes` or carried too many descriptors (it is then
// dropped and its descriptors are closed).
absl::StatusOr<Message> ReceiveMessage(int socket, absl::Duration timeout,
                                       size_t max_bytes = kMaxMessageBytes);

}  // namespace zeroshard

#endif  // ZEROSHARD_BASE_FD_PASSING_H_
