#include "server/peer_table.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace zeroshard {

void PeerTable::Set(int fd, Peer peer) {
  absl::MutexLock lock(&mu_);
  peers_[absl::StrCat("fd:", fd)] = std::move(peer);
}

absl::StatusOr<Peer> PeerTable::Find(const std::string& grpc_peer) {
  absl::MutexLock lock(&mu_);
  const auto it = peers_.find(grpc_peer);
  if (it == peers_.end()) {
    return absl::PermissionDeniedError(absl::StrCat("unknown connection '", grpc_peer, "'"));
  }
  Peer peer;
  peer.pid = it->second.pid;
  peer.uid = it->second.uid;
  ZS_ASSIGN_OR_RETURN(peer.pidfd, it->second.pidfd.Duplicate());
  return peer;
}

absl::Status CheckUser(uint32_t uid, const std::vector<uint32_t>& allow_uids) {
  const bool allowed = uid == 0 || uid == geteuid() ||
                       std::find(allow_uids.begin(), allow_uids.end(), uid) != allow_uids.end();
  if (allowed) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("user ", uid, " may not use this daemon; add it to allow_uids"));
}

}  // namespace zeroshard
