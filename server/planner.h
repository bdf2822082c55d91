// PlanJob: from the config, the manifest and the devices to everything that must exist before a job
// can run: the engine's configuration, every shared region with its size, who serves whom, and the
// ledger.
//
// A pure function of its input; any thread. The ledger's lines of the host tier add up to the
// memory of all regions and staging, byte for byte: what is not state is named padding, window or
// records; those of the NVMe tier add up to its files, those of the gpu tier to what the job takes
// of its devices. Of a job that spans daemons each plans its
// own regions and ledger; all else is the same on every one.

#ifndef ZEROSHARD_SERVER_PLANNER_H_
#define ZEROSHARD_SERVER_PLANNER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "proto/internal.pb.h"
#include "proto/model.pb.h"
#include "server/ds_config.h"
#include "server/nvme_paths.h"
#include "server/placement.h"
#include "storage/board.h"
#include "storage/device_plan.h"
#include "storage/layout.h"
#include "storage/nvme_plan.h"
#include "storage/partition.h"

namespace zeroshard {

struct PlanInput {
  DsConfig config;
  model::v1::Manifest manifest;
  uint32_t world_size = 1;
  uint32_t local_ranks = 1;
  bool forward_only = false;
  std::vector<std::string> devices;  // of each node; one worker each
  uint32_t node = 0;                 // this daemon's place among those of the job
  uint32_t nodes = 1;
  uint32_t lanes = 1;  // compute threads of each worker
  uint32_t collective_timeout_ms = 60000;
  std::vector<NvmePathConfig> nvme_paths;  // of a job with an NVMe tier
};

// One shared region. `index`: the worker of a partition; the rank of a gradient window, rank page
// or local accumulator; the island of a window, board or user_state region.
struct RegionPlan {
  internal::v1::WorkerRegion::Kind kind = internal::v1::WorkerRegion::KIND_UNSPECIFIED;
  uint32_t index = 0;
  uint32_t island = 0;
  uint64_t bytes = 0;   // length of the file
  uint64_t memory = 0;  // bytes that may be backed by memory at one time
};

// Device memory of one worker and its rank.
struct GpuBytes {
  uint64_t shared = 0;   // KIND_DEVICE_SHARED
  uint64_t states = 0;   // KIND_DEVICE_STATES
  uint64_t trainer = 0;  // the rank's own, at most
  uint64_t home = 0;     // bytes of the worker's states that rest there
  uint64_t ring = 0;     // of the host: gradients and parameters of what is offloaded go through it
  uint64_t total() const { return shared + states + trainer; }
};

struct JobPlan {
  Placement placement;
  model::v1::EngineConfig config;
  model::v1::Manifest manifest;
  std::vector<Layout> layout;                      // exactly one
  std::vector<RegionPlan> regions;                 // of this node
  std::vector<internal::v1::RankPlace> ranks;      // of the whole job
  std::vector<internal::v1::WorkerPlace> workers;  // of the whole job
  uint32_t islands = 1;
  uint32_t lanes = 1;
  BoardShape board;
  std::vector<NvmePathConfig> nvme_paths;  // as the input; empty without an NVMe tier
  std::vector<uint64_t> nvme_bytes;        // of the files on each, of this node's workers
  std::vector<uint64_t> nvme_home;         // bytes of states that rest there, of each such worker
  uint64_t staging_bytes = 0;              // memory of this node's workers beside the regions
  uint64_t host_limit = 0;                 // of memory_bytes(), also after moves; 0 for none
  std::vector<GpuBytes> gpus;              // of this node's workers; empty without a data plane
  // Units whose states an operator has moved, and where to.
  std::map<uint32_t, model::v1::Tier> moved;
  std::vector<model::v1::LedgerLine> ledger;
  std::vector<std::string> warnings;
  std::string scheduler;
  std::vector<ResolvedValue> values;

  // Host memory on this node: of the regions, and staging.
  uint64_t memory_bytes() const;
  // Of all files on this node.
  uint64_t nvme_total() const;
  // What worker `w` has on the NVMe tier; `partition` is its partition's plan.
  absl::StatusOr<NvmePlan> NvmePlanOf(const PartitionPlan& partition) const;
  // The same on its device, of a job with a data plane.
  absl::StatusOr<DevicePlan> DevicePlanOf(const PartitionPlan& partition) const {
    return DevicePlan::Create(layout.front(), partition, config);
  }
  // Whether an island lies on this node.
  bool has_island(uint32_t island) const;
};

// InvalidArgument or FailedPrecondition, naming the key or parameter: a batch triangle that does
// not hold, a trainable parameter without an optimizer, an in-place window over Gloo, an NVMe tier
// without a path, and what Layout refuses.
absl::StatusOr<JobPlan> PlanJob(const PlanInput& input);

// `plan` once the states of `units` rest on `to`: memory and ledger are others.
absl::StatusOr<JobPlan> MovedPlan(const JobPlan& plan, model::v1::Tier to,
                                  const std::vector<uint32_t>& units);

// The engine's part of a config, without a layout.
absl::StatusOr<model::v1::EngineConfig> MakeEngineConfig(const PlanInput& input);

// Bytes of a rank page, a whole number of pages.
uint64_t RankPageBytes();

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_PLANNER_H_
