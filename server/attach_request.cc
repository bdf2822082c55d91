#include "server/attach_request.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/dtype.h"
#include "base/status.h"
#include "server/node_memory.h"
#include "server/placement.h"
#include "server/power_jobs.h"
#include "storage/layout_proto.h"
#include "storage/named_dir.h"

namespace zeroshard {
namespace {

// Bound of what one request can make the daemon allocate in tables.
constexpr uint32_t kMaxRanks = 4096;

std::string ParameterLine(const model::v1::Parameter& parameter) {
  const auto dtype = DTypeFromProto(parameter.dtype());
  std::string line = absl::StrCat(
      "'", parameter.name(), "': ", dtype.ok() ? std::string(DTypeName(*dtype)) : "unknown", "[",
      absl::StrJoin(parameter.shape(), ","), "], ", parameter.trainable() ? "trainable" : "frozen",
      ", group ", parameter.group(), ", module '", parameter.module(), "'");
  if (parameter.aliases_size() > 0) {
    absl::StrAppend(&line, ", also named '", absl::StrJoin(parameter.aliases(), "', '"), "'");
  }
  return line;
}

std::string GroupLine(int index, const model::v1::GroupOptions& group) {
  return absl::StrCat("parameter group ", index, " = {lr ", group.lr(), ", weight_decay ",
                      group.weight_decay(), ", betas ", group.beta1(), " ", group.beta2(), ", eps ",
                      group.eps(), ", momentum ", group.momentum(), ", dampening ",
                      group.dampening(), group.nesterov() ? ", nesterov" : "",
                      group.bias_correction() ? ", bias_correction" : "", "}");
}

absl::Status CheckRanks(const trainer::v1::AttachRequest& request) {
  if (request.world_size() == 0 || request.world_size() > kMaxRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("world_size: expected 1 to ", kMaxRanks, ", found ", request.world_size()));
  }
  if (request.rank() >= request.world_size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank: expected 0 to ", request.world_size() - 1, ", found ", request.rank()));
  }
  return absl::OkStatus();
}

JobSpec MakeSpec(const trainer::v1::AttachRequest& request, const DsConfig& config) {
  JobSpec spec;
  spec.world_size = request.world_size();
  spec.local_ranks = request.local_ranks() == 0 ? request.world_size() : request.local_ranks();
  spec.forward_only = request.forward_only();
  for (const auto& parameter : request.manifest().parameters()) {
    spec.parameters.push_back(ParameterLine(parameter));
  }
  for (const ResolvedValue& value : config.resolved) {
    spec.config.push_back(absl::StrCat(value.path, " = ", value.value_text));
  }
  for (int g = 0; g < request.manifest().groups_size(); ++g) {
    spec.config.push_back(GroupLine(g, request.manifest().groups(g)));
  }
  std::sort(spec.config.begin(), spec.config.end());
  return spec;
}

// A limit of the job's ds_config, else the daemon's; 0 for none.
uint64_t LimitOf(int64_t own, uint64_t daemon) {
  return own > 0 ? static_cast<uint64_t>(own) : daemon;
}

// What one job may take: as its ds_config says, else as the daemon does.
absl::Status CheckJobLimits(const std::string& job, const JobPlan& plan, const ZeroShardConfig& own,
                            const DaemonConfig& daemon) {
  const auto check = [&](uint64_t need, int64_t own_limit, uint64_t daemon_limit, const char* what,
                         const char* key) -> absl::Status {
    const uint64_t limit = LimitOf(own_limit, daemon_limit);
    if (limit == 0 || need <= limit) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        absl::StrCat("job '", job, "' needs ", HumanBytes(need), " (", need, " bytes) of ", what,
                     ", but ", own_limit > 0 ? "zeroshard." : "the daemon's job_", key, " is ",
                     HumanBytes(limit), " (", limit, " bytes)"));
  };
  const TierConfig& tiers = daemon.tiers;
  ZS_RETURN_IF_ERROR(check(plan.memory_bytes(), own.host_limit, tiers.job_host_limit,
                           "host memory on this node", "host_limit"));
  uint64_t gpu = 0;
  for (const GpuBytes& bytes : plan.gpus) gpu = std::max(gpu, bytes.total());
  ZS_RETURN_IF_ERROR(
      check(gpu, own.gpu_limit, daemon.job_gpu_limit, "memory of a GPU", "gpu_limit"));
  return check(plan.nvme_total(), own.nvme_limit, tiers.job_nvme_limit,
               "the NVMe tier on this node", "nvme_limit");
}

}  // namespace

absl::StatusOr<PreparedAttach> PrepareAttach(const trainer::v1::AttachRequest& request,
                                             const DaemonConfig& config, uint32_t lanes,
                                             PathRight right) {
  if (absl::Status name = ValidateName(request.job()); !name.ok()) {
    return Annotate(name, "job name");
  }
  ZS_RETURN_IF_ERROR(CheckRanks(request));
  ZS_ASSIGN_OR_RETURN(const Placement placement,
                      PlaceJob(config.cluster, request.world_size(), request.local_ranks(),
                               static_cast<uint32_t>(config.devices.size()), request.rank()));
  ClientValues client(request.overrides().begin(), request.overrides().end());
  ZS_ASSIGN_OR_RETURN(DsConfig ds_config,
                      ParseDsConfig(request.ds_config(), client, KindOf(config.devices)));
  PreparedAttach prepared;
  prepared.spec = std::make_shared<JobSpec>(MakeSpec(request, ds_config));
  PlanInput input;
  input.config = std::move(ds_config);
  input.manifest = request.manifest();
  input.world_size = request.world_size();
  input.local_ranks = prepared.spec->local_ranks;
  input.forward_only = request.forward_only();
  input.devices = config.devices;
  input.node = placement.node;
  input.nodes = placement.nodes;
  input.lanes = lanes;
  const int64_t timeout_ms = absl::ToInt64Milliseconds(config.collective_timeout);
  input.collective_timeout_ms = static_cast<uint32_t>(timeout_ms);
  ZS_ASSIGN_OR_RETURN(const model::v1::EngineConfig engine, MakeEngineConfig(input));
  if (NvmePlan::Exists(engine)) {
    ZS_ASSIGN_OR_RETURN(input.nvme_paths,
                        PathsOfJob(input.config.tiers.nvme_path, config.tiers.nvme_paths, right));
  }
  ZS_ASSIGN_OR_RETURN(JobPlan plan, PlanJob(input));
  ZS_RETURN_IF_ERROR(CheckPowerPlan(plan));
  ZS_RETURN_IF_ERROR(CheckJobLimits(request.job(), plan, input.config.zeroshard, config));
  plan.host_limit = LimitOf(input.config.zeroshard.host_limit, config.tiers.job_host_limit);
  prepared.plan = std::make_shared<JobPlan>(std::move(plan));
  return prepared;
}

}  // namespace zeroshard
