#include "server/descriptor_server.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fd_passing.h"
#include "base/log.h"
#include "base/status.h"
#include "server/peer_table.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(10);
constexpr absl::Duration kSendTimeout = absl::Seconds(1);
constexpr size_t kMaxConnections = 4096;
constexpr size_t kMaxTokenBytes = 256;

}  // namespace

DescriptorServer::DescriptorServer(EventLoop* loop, JobTable* table, UniqueFd listener,
                                   std::vector<uint32_t> allow_uids)
    : loop_(loop),
      table_(table),
      listener_(std::move(listener)),
      allow_uids_(std::move(allow_uids)) {}

DescriptorServer::~DescriptorServer() {
  loop_->Unwatch(listener_.get());
  while (!connections_.empty()) Close(connections_.begin()->first);
}

absl::Status DescriptorServer::Start() {
  return loop_->Watch(listener_.get(), [this] { OnConnection(); });
}

void DescriptorServer::OnConnection() {
  absl::StatusOr<UniqueFd> socket = AcceptUnix(listener_.get(), absl::ZeroDuration());
  if (!socket.ok()) return;
  const absl::StatusOr<PeerCredentials> peer = GetPeerCredentials(socket->get());
  if (!peer.ok() || !CheckUser(peer->uid, allow_uids_).ok() ||
      connections_.size() >= kMaxConnections) {
    return;
  }
  const int fd = socket->get();
  if (!loop_->Watch(fd, [this, fd] { OnToken(fd); }).ok()) return;
  Connection& connection = connections_[fd];
  connection.socket = *std::move(socket);
  connection.timer = loop_->At(loop_->Now() + kPatience, [this, fd] { Close(fd); });
}

void DescriptorServer::OnToken(int fd) {
  const absl::StatusOr<Message> message = ReceiveMessage(fd, absl::ZeroDuration(), kMaxTokenBytes);
  if (message.ok()) {
    const std::optional<JobHost::Granted> granted = table_->Descriptors(message->bytes);
    const std::string answer =
        granted ? "ok" : "error: the token belongs to no attached rank; attach again";
    const absl::Status sent = SendMessage(
        fd, answer, granted ? std::span<const int>(granted->fds) : std::span<const int>(),
        kSendTimeout);
    if (!sent.ok()) LogWarn(absl::StrCat("descriptors could not be sent: ", sent.message()));
  }
  Close(fd);
}

void DescriptorServer::Close(int fd) {
  const auto it = connections_.find(fd);
  if (it == connections_.end()) return;
  loop_->Cancel(it->second.timer);
  loop_->Unwatch(fd);
  connections_.erase(it);
}

}  // namespace zeroshard
