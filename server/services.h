// The gRPC services of the daemon: validate, translate, hand to the decision thread, reply.
//
// Handlers run on gRPC's threads. What they share lives in ServiceContext, which outlives the
// services.

#ifndef ZEROSHARD_SERVER_SERVICES_H_
#define ZEROSHARD_SERVER_SERVICES_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "server/checkpoint_ops.h"
#include "server/daemon_config.h"
#include "server/event_loop.h"
#include "server/job_table.h"
#include "server/peer_table.h"

namespace grpc {
class Service;
}

namespace zeroshard {

class NodeGpus;

struct ServiceContext {
  EventLoop* loop = nullptr;
  JobTable* table = nullptr;
  PeerTable* peers = nullptr;
  CheckpointOps* checkpoints = nullptr;
  NvmeStore* nvme = nullptr;
  NodeGpus* gpus = nullptr;  // null where the devices are the host's
  const DaemonConfig* config = nullptr;
  uint32_t lanes = 1;  // of each worker
  absl::Duration started_at;
  std::string metrics_address;  // as bound, "" when off
};

std::unique_ptr<grpc::Service> MakeTrainerService(const ServiceContext* context);
std::unique_ptr<grpc::Service> MakeAdminService(const ServiceContext* context);
// The standard one, for what watches over services.
std::unique_ptr<grpc::Service> MakeHealthService(const ServiceContext* context);
// For other daemons; everything else is for local users only.
std::unique_ptr<grpc::Service> MakeClusterService(const ServiceContext* context);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_SERVICES_H_
