#include "server/planner.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "server/gpu_plan.h"
#include "server/ledger_lines.h"
#include "storage/layout_proto.h"
#include "storage/partition.h"
#include "storage/rank_page.h"

namespace zeroshard {
namespace {

using internal::v1::WorkerRegion;

constexpr uint64_t kPage = 4096;

uint64_t Pages(uint64_t bytes) { return std::max(kPage, (bytes + kPage - 1) / kPage * kPage); }

void PlaceWorkersAndRanks(const PlanInput& input, JobPlan& plan) {
  const Placement& placement = plan.placement;
  const uint32_t workers = placement.workers * placement.nodes;
  const bool shared = plan.config.transport() == model::v1::TRANSPORT_SHARED_MEMORY;
  plan.islands = shared ? 1 : workers;
  for (uint32_t w = 0; w < workers; ++w) {
    internal::v1::WorkerPlace place;
    place.set_island(shared ? 0 : w);
    place.set_device(input.devices[w % placement.workers]);
    plan.workers.push_back(place);
  }
  for (uint32_t r = 0; r < input.world_size; ++r) {
    internal::v1::RankPlace place;
    place.set_home_worker(placement.home_worker(r));
    place.set_island(plan.workers[place.home_worker()].island());
    plan.ranks.push_back(place);
  }
}

void AddRegion(JobPlan& plan, WorkerRegion::Kind kind, uint32_t index, uint32_t island,
               uint64_t bytes) {
  plan.regions.push_back({kind, index, island, Pages(bytes), Pages(bytes)});
}

// The slot table of a worker, the room of its files and its staging. `own`: the region of its
// partition; what rests on the NVMe tier takes no memory there.
absl::Status AddNvmeTier(const PartitionPlan& partition, size_t own, JobPlan& plan) {
  ZS_ASSIGN_OR_RETURN(const NvmePlan nvme, plan.NvmePlanOf(partition));
  const uint32_t w = plan.regions[own].index;
  plan.regions[own].memory -= nvme.unbacked_bytes();
  AddRegion(plan, WorkerRegion::KIND_SLOT_TABLE, w, plan.workers[w].island(), nvme.table_bytes());
  plan.nvme_bytes.resize(plan.nvme_paths.size());
  for (uint32_t p = 0; p < plan.nvme_bytes.size(); ++p) {
    plan.nvme_bytes[p] += nvme.extents().file_bytes(p);
  }
  plan.nvme_home.push_back(nvme.home_bytes());
  plan.staging_bytes += StagingBytes(plan, nvme);
  return absl::OkStatus();
}

absl::Status AddRegions(JobPlan& plan) {
  const Layout& layout = plan.layout.front();
  const Placement& placement = plan.placement;
  for (uint32_t w = 0; w < plan.workers.size(); ++w) {
    if (!placement.has_worker(w)) continue;
    ZS_ASSIGN_OR_RETURN(const PartitionPlan partition,
                        PartitionPlan::Create(layout, plan.config, w, plan.lanes));
    AddRegion(plan, WorkerRegion::KIND_PARTITION, w, plan.workers[w].island(), partition.bytes());
    const size_t own = plan.regions.size() - 1;
    if (!plan.nvme_paths.empty()) ZS_RETURN_IF_ERROR(AddNvmeTier(partition, own, plan));
    if (DevicePlan::Exists(plan.config)) ZS_RETURN_IF_ERROR(AddGpu(partition, own, plan));
  }
  for (uint32_t island = 0; island < plan.islands; ++island) {
    if (!plan.has_island(island)) continue;
    AddRegion(plan, WorkerRegion::KIND_PARAMETER_WINDOW, island, island, layout.window_bytes());
    plan.regions.back().memory =
        std::min(plan.regions.back().bytes, Pages(WindowMemory(layout, plan.config)));
    AddRegion(plan, WorkerRegion::KIND_BOARD, island, island, Board::Bytes(plan.board));
    AddRegion(plan, WorkerRegion::KIND_USER_STATE, island, island,
              UserStates::Bytes(plan.config.world_size(), plan.config.user_state_bytes()));
  }
  const uint64_t gradient_window =
      GradientWindowBytes(layout, plan.config) + ParameterRingBytes(layout, plan.config);
  uint64_t local_accumulator = 0;
  if (UsesLocalAccumulators(plan.config)) {
    ZS_ASSIGN_OR_RETURN(const PartitionPlan local,
                        PartitionPlan::CreateLocal(layout, plan.config, plan.lanes));
    local_accumulator = local.bytes();
  }
  for (uint32_t r = 0; r < plan.ranks.size(); ++r) {
    if (!placement.has_rank(r)) continue;
    const uint32_t island = plan.ranks[r].island();
    AddRegion(plan, WorkerRegion::KIND_GRADIENT_WINDOW, r, island, gradient_window);
    AddRegion(plan, WorkerRegion::KIND_RANK_PAGE, r, island, RankPageBytes());
    if (local_accumulator > 0) {
      AddRegion(plan, WorkerRegion::KIND_LOCAL_ACCUMULATOR, r, island, local_accumulator);
    }
  }
  return absl::OkStatus();
}

}  // namespace

uint64_t RankPageBytes() { return Pages(sizeof(RankPage)); }

// Islands of a job that spans nodes are its workers.
bool JobPlan::has_island(uint32_t island) const {
  return !placement.spans() || placement.has_worker(island);
}

uint64_t JobPlan::memory_bytes() const {
  uint64_t bytes = staging_bytes;
  for (const RegionPlan& region : regions) bytes += region.memory;
  return bytes;
}

uint64_t JobPlan::nvme_total() const {
  return std::accumulate(nvme_bytes.begin(), nvme_bytes.end(), uint64_t{0});
}

absl::StatusOr<NvmePlan> JobPlan::NvmePlanOf(const PartitionPlan& partition) const {
  std::vector<uint64_t> weights;
  for (const NvmePathConfig& path : nvme_paths) weights.push_back(path.weight);
  ZS_ASSIGN_OR_RETURN(NvmePlan nvme, NvmePlan::Create(layout.front(), partition, config, weights));
  for (const auto& [unit, tier] : moved) nvme.SetStateHome(unit, tier == model::v1::TIER_NVME);
  return nvme;
}

absl::StatusOr<JobPlan> MovedPlan(const JobPlan& plan, model::v1::Tier to,
                                  const std::vector<uint32_t>& units) {
  JobPlan next = plan;
  for (const uint32_t unit : units) next.moved[unit] = to;
  next.nvme_home.clear();
  for (RegionPlan& region : next.regions) {
    if (region.kind != WorkerRegion::KIND_PARTITION) continue;
    ZS_ASSIGN_OR_RETURN(
        const PartitionPlan partition,
        PartitionPlan::Create(next.layout.front(), next.config, region.index, next.lanes));
    region.memory = region.bytes;
    if (!next.nvme_paths.empty()) {
      ZS_ASSIGN_OR_RETURN(const NvmePlan nvme, next.NvmePlanOf(partition));
      region.memory -= nvme.unbacked_bytes();
      next.nvme_home.push_back(nvme.home_bytes());
    }
    if (DevicePlan::Exists(next.config)) {
      ZS_ASSIGN_OR_RETURN(const DevicePlan device, next.DevicePlanOf(partition));
      const GpuHomes homes = GpuHomesOf(next, partition, device);
      region.memory -= homes.unbacked_bytes;
      next.gpus[region.index - next.placement.first_worker()].home = homes.bytes;
    }
  }
  ZS_ASSIGN_OR_RETURN(next.ledger, LedgerLines(next));
  return next;
}

absl::StatusOr<JobPlan> PlanJob(const PlanInput& input) {
  JobPlan plan;
  ZS_ASSIGN_OR_RETURN(plan.config, MakeEngineConfig(input));
  // On GPUs a worker a rank, on the first of them for now.
  const uint32_t devices = plan.config.data_plane() ? input.world_size / input.nodes
                                                    : static_cast<uint32_t>(input.devices.size());
  plan.placement = {input.node, input.nodes, input.world_size / input.nodes, devices};
  plan.manifest = input.manifest;
  plan.lanes = input.lanes;
  plan.warnings = input.config.warnings;
  plan.values = input.config.resolved;
  if (!input.config.scheduler.type.empty()) {
    plan.scheduler = absl::StrCat("{\"type\": \"", input.config.scheduler.type,
                                  "\", \"params\": ", input.config.scheduler.params_json, "}");
  }
  if (NvmePlan::Exists(plan.config)) {
    if (input.nvme_paths.empty()) {
      return absl::FailedPreconditionError(
          "the job has states on nvme, and there is no nvme_path for them");
    }
    plan.nvme_paths = input.nvme_paths;
  }
  if (input.nodes > 1 && input.config.zeroshard.transport == TransportChoice::kShm) {
    plan.warnings.push_back(absl::StrCat("zeroshard.transport is \"shm\", but the job spans ",
                                         input.nodes, " daemons: its workers exchange over Gloo"));
  }
  if (input.config.tiers.optimizer && plan.config.optimizer() == model::v1::OPTIMIZER_NONE) {
    plan.warnings.push_back(
        "zero_optimization.offload_optimizer has no effect: the job has no optimizer states");
  }
  ZS_ASSIGN_OR_RETURN(Layout layout, LayoutFromProto(input.manifest, devices * input.nodes));
  plan.board.workers = devices * input.nodes;
  plan.board.ranks = input.world_size;
  plan.board.units = static_cast<uint32_t>(layout.units().size());
  plan.board.parameters = static_cast<uint32_t>(layout.parameters().size());
  plan.layout.push_back(std::move(layout));
  PlaceWorkersAndRanks(input, plan);
  ZS_RETURN_IF_ERROR(AddRegions(plan));
  ZS_ASSIGN_OR_RETURN(plan.ledger, LedgerLines(plan));
  if (!plan.gpus.empty()) plan.warnings.push_back(GpuProtection(plan));
  return plan;
}

}  // namespace zeroshard
