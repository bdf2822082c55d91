#include "base/fd_passing.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/poll.h"
#include "base/status.h"

namespace zeroshard {
namespace {

constexpr size_t kControlBytes = CMSG_SPACE(sizeof(int) * kMaxFdsPerMessage);

// Takes over every descriptor in the control data, so that none leaks on an error path.
std::vector<UniqueFd> TakeFds(msghdr& header) {
  std::vector<UniqueFd> fds;
  for (cmsghdr* part = CMSG_FIRSTHDR(&header); part != nullptr; part = CMSG_NXTHDR(&header, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof(fd));
      fds.emplace_back(fd);
    }
  }
  return fds;
}

absl::Status CheckOutgoing(std::string_view bytes, std::span<const int> fds) {
  if (bytes.empty() || bytes.size() > kMaxMessageBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a message of ", bytes.size(), " bytes: expected 1 to ", kMaxMessageBytes));
  }
  if (fds.size() > kMaxFdsPerMessage) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a message with ", fds.size(), " descriptors: expected at most ", kMaxFdsPerMessage));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status SendMessage(int socket, std::string_view bytes, std::span<const int> fds,
                         absl::Duration timeout) {
  ZS_RETURN_IF_ERROR(CheckOutgoing(bytes, fds));
  iovec data = {const_cast<char*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[kControlBytes] = {};
  msghdr header = {};
  header.msg_iov = &data;
  header.msg_iovlen = 1;
  if (!fds.empty()) {
    header.msg_control = control;
    header.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* part = CMSG_FIRSTHDR(&header);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(part), fds.data(), fds.size_bytes());
  }
  const Deadline deadline = Deadline::After(timeout);
  while (true) {
    const ssize_t sent = ::sendmsg(socket, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent == static_cast<ssize_t>(bytes.size())) return absl::OkStatus();
    if (sent >= 0) {
      return absl::InternalError(
          absl::StrCat("sent ", sent, " of ", bytes.size(), " bytes: not a SOCK_SEQPACKET socket"));
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return ErrnoError(errno, "send a message on", "Unix socket");
    ZS_RETURN_IF_ERROR(AwaitReady(socket, POLLOUT, deadline, "send a message on a Unix socket"));
  }
}

absl::StatusOr<Message> ReceiveMessage(int socket, absl::Duration timeout, size_t max_bytes) {
  Message message;
  message.bytes.resize(max_bytes);
  iovec data = {message.bytes.data(), message.bytes.size()};
  alignas(cmsghdr) char control[kControlBytes];
  const Deadline deadline = Deadline::After(timeout);
  bool was_reset = false;
  while (true) {
    msghdr header = {};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof(control);
    const ssize_t received = ::recvmsg(socket, &header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (received < 0) {
      if (errno == EINTR) continue;
      // The peer left without reading all that it was sent; what it has sent is still there.
      if (errno == ECONNRESET && !std::exchange(was_reset, true)) continue;
      if (errno != EAGAIN) return ErrnoError(errno, "receive a message on", "Unix socket");
      ZS_RETURN_IF_ERROR(
          AwaitReady(socket, POLLIN, deadline, "receive a message on a Unix socket"));
      continue;
    }
    message.fds = TakeFds(header);
    if (received == 0) return absl::UnavailableError("the peer closed the Unix socket");
    if ((header.msg_flags & MSG_TRUNC) != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("a message of more than ", max_bytes, " bytes was dropped"));
    }
    if ((header.msg_flags & MSG_CTRUNC) != 0) {
      return absl::InvalidArgumentError(
          "a message was dropped: too many descriptors in it, or no free ones in this process");
    }
    message.bytes.resize(static_cast<size_t>(received));
    return message;
  }
}

}  // namespace zeroshard
