// PeerTable: who is at the other end of each gRPC connection.
//
// gRPC does not check peers of Unix sockets, so the server accepts connections itself, asks the
// kernel (SO_PEERCRED), and hands the descriptor in. gRPC then names the connection's peer
// "fd:<number>"; a number is used again only after gRPC has closed it, and then overwritten here.
// Any thread.

#ifndef ZEROSHARD_SERVER_PEER_TABLE_H_
#define ZEROSHARD_SERVER_PEER_TABLE_H_

#include <map>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/job_host.h"

namespace zeroshard {

class PeerTable {
 public:
  void Set(int fd, Peer peer);
  // The peer of ServerContext::peer(), with a pidfd of its own.
  absl::StatusOr<Peer> Find(const std::string& grpc_peer);

 private:
  absl::Mutex mu_;
  std::map<std::string, Peer> peers_ ABSL_GUARDED_BY(mu_);
};

// Whether a peer may talk to this daemon: its own user, root, and those named in allow_uids.
absl::Status CheckUser(uint32_t uid, const std::vector<uint32_t>& allow_uids);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_PEER_TABLE_H_
