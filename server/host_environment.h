// What jobs are given from outside: attach calls, and what their table provides.
#ifndef ZEROSHARD_SERVER_HOST_ENVIRONMENT_H_
#define ZEROSHARD_SERVER_HOST_ENVIRONMENT_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "base/unique_fd.h"
#include "proto/records.pb.h"
#include "proto/trainer.pb.h"
#include "server/cluster_client.h"
#include "server/daemon_config.h"
#include "server/drive_metrics.h"
#include "server/event_loop.h"
#include "server/job.h"
#include "server/node_cores.h"
#include "server/node_io.h"
#include "server/node_memory.h"
#include "server/nvme_store.h"
#include "server/planner.h"
#include "server/worker_process.h"

namespace zeroshard {

class JobMetrics;
class NodeGpus;
class PowerJobs;

// The process at the other end of a connection.
struct Peer {
  int64_t pid = 0;
  uint32_t uid = 0;
  UniqueFd pidfd;
};

// One Attach call on its way through the decision thread.
struct AttachCall {
  uint64_t id = 0;
  uint32_t rank = 0;
  Peer peer;
  std::shared_ptr<const JobSpec> spec;
  std::shared_ptr<const JobPlan> plan;
  std::shared_ptr<const NvmeAdmission> nvme;  // of the plan's paths; null without such
  model::v1::Device device;                   // that the rank trains on, as it says
  std::string gave_up;                        // see AttachRequested
  Instant deadline;
  std::function<void(absl::StatusOr<trainer::v1::AttachReply>)> done;  // once
};

// What the table provides to its hosts. All pointers outlive the host.
struct HostEnvironment {
  EventLoop* loop = nullptr;
  const DaemonConfig* config = nullptr;
  JobMetrics* metrics = nullptr;
  ClusterClient* cluster = nullptr;  // null where no cluster is configured
  NvmeStore* nvme = nullptr;         // null where no job can have an NVMe tier
  PowerJobs* power = nullptr;        // null: jobs end with the daemon, whatever their durability
  const NodeIo* io = nullptr;        // null: transfers are not bounded
  DriveMetrics* drives = nullptr;    // null where there is no io
  const NodeCores* cores = nullptr;  // null: workers run on all their lanes at all times
  NodeGpus* gpus = nullptr;          // null where the devices are the host's
  std::string worker_binary;
  std::string descriptor_socket;
  std::function<MemoryInUse()> memory_in_use;  // of the other jobs
  // Device memory that is promised to the other jobs, by device.
  std::function<std::map<std::string, uint64_t>()> gpu_in_use;
  std::function<void(WorkerProcess)> retire;  // waits for a worker that was told to stop
  std::function<void(records::v1::JournalRecord)> journal;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_HOST_ENVIRONMENT_H_
