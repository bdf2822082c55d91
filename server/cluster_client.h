// ClusterClient: what this daemon says to the one that keeps a job (node 0 of the cluster).
//
// Every call returns at once; its answer comes on the decision thread, with the call's deadline at
// the latest, or never when the loop has stopped. Unavailable names the node that does not answer.
// Called on the decision thread. Implementations: gRPC (MakeClusterClient), and a fake in tests.

#ifndef ZEROSHARD_SERVER_CLUSTER_CLIENT_H_
#define ZEROSHARD_SERVER_CLUSTER_CLIENT_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/cluster.pb.h"
#include "server/cluster_config.h"
#include "server/event_loop.h"

namespace zeroshard {

class ClusterClient {
 public:
  template <typename Reply>
  using Done = std::function<void(absl::StatusOr<Reply>)>;

  virtual ~ClusterClient() = default;
  virtual void Join(const cluster::v1::JoinRequest& request, Done<cluster::v1::JoinReply> done) = 0;
  virtual void SetKey(const cluster::v1::SetKeyRequest& request,
                      Done<cluster::v1::SetKeyReply> done) = 0;
  // The deadline is that of the request, and a little for the way.
  virtual void GetKey(const cluster::v1::GetKeyRequest& request,
                      Done<cluster::v1::GetKeyReply> done) = 0;
};

// `loop` must outlive the client, which waits for calls under way when it goes, after cancelling
// them.
std::unique_ptr<ClusterClient> MakeClusterClient(const ClusterConfig& cluster, EventLoop* loop);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_CLUSTER_CLIENT_H_
