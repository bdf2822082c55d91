// The part of JobHost that concerns the NVMe tier.
#include <algorithm>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "server/job_host.h"
#include "server/job_metrics.h"

namespace zeroshard {
namespace {

using admin::v1::MoveStatesReply;
using admin::v1::MoveStatesRequest;

// A move that nobody bounds leaves most of a drive to the job.
constexpr uint64_t kMoveRate = uint64_t{256} << 20;

// Bytes of workers' states that are listed on a tier.
uint64_t StatesOn(const char* tier, const JobPlan& plan) {
  uint64_t bytes = 0;
  for (const model::v1::LedgerLine& line : plan.ledger) {
    const bool worker = line.holder().starts_with("worker ");
    if (line.tier() == tier && worker && line.state() != "slots") bytes += line.bytes();
  }
  return bytes;
}

uint64_t Apart(uint64_t a, uint64_t b) { return std::max(a, b) - std::min(a, b); }

absl::StatusOr<model::v1::Tier> ParseTier(const std::string& text) {
  if (text == "nvme") return model::v1::TIER_NVME;
  if (text == "host" || text == "cpu") return model::v1::TIER_HOST;
  if (text == "gpu") return model::v1::TIER_GPU;
  return absl::InvalidArgumentError(
      absl::StrCat("to: expected \"nvme\", \"host\" or \"gpu\", found \"", text, "\""));
}

// Whether a unit has a parameter, or is of a module, of this name.
bool HasName(const JobPlan& plan, const Unit& unit, const std::string& name) {
  return std::ranges::any_of(unit.parameters, [&](uint32_t index) {
    const auto& parameter = plan.manifest.parameters(static_cast<int>(index));
    return parameter.name() == name || parameter.module() == name ||
           std::ranges::find(parameter.aliases(), name) != parameter.aliases().end();
  });
}

}  // namespace

absl::Status JobHost::ReserveNvme() {
  if (plan_->nvme_paths.empty()) return absl::OkStatus();
  if (environment_.nvme == nullptr || admission_ == nullptr) {
    return absl::InternalError("nothing is known of the paths of the job's NVMe tier");
  }
  ZS_ASSIGN_OR_RETURN(
      nvme_, environment_.nvme->Reserve(state_.name, job_id_, admission_, plan_->nvme_bytes));
  admission_.reset();
  for (const NvmePathConfig& path : plan_->nvme_paths) {
    if (environment_.io == nullptr) break;
    const absl::StatusOr<std::string> device = environment_.io->AddPath(path.path);
    if (device.ok()) {
      io_devices_[path.path] = *device;
    } else {
      LogWarn(absl::StrCat(path.path, " has no I/O budget: ", device.status().message()));
    }
  }
  return absl::OkStatus();
}

void JobHost::DescribeTiers(internal::v1::WorkerStart& start) const {
  const TierConfig& tiers = environment_.config->tiers;
  start.set_huge_pages(tiers.huge_pages);
  start.set_require_pinned(tiers.require_pinned);
  for (const NvmePathConfig& path : plan_->nvme_paths) {
    internal::v1::NvmePath& out = *start.add_nvme_paths();
    out.set_path(path.path);
    out.set_weight(path.weight);
    out.set_allow_network_path(path.allow_network_path);
    const auto device = io_devices_.find(path.path);
    if (device != io_devices_.end()) out.set_io_device(device->second);
  }
  if (nvme_ != nullptr) start.set_io_backend(std::string(NameOf(nvme_->backend())));
  start.set_io_timeout_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(tiers.io_timeout)));
}

absl::StatusOr<std::vector<uint32_t>> JobHost::ChooseUnits(const MoveStatesRequest& request) const {
  const std::span<const Unit> units = plan_->layout.front().units();
  std::set<uint32_t> chosen;
  for (uint32_t u = 0; u < units.size() && request.units().empty(); ++u) chosen.insert(u);
  for (const std::string& text : request.units()) {
    const size_t before = chosen.size();
    uint32_t index = 0;
    const bool number = absl::SimpleAtoi(text, &index);
    bool found = number && index < units.size();
    if (found) chosen.insert(index);
    for (uint32_t u = 0; u < units.size() && !number; ++u) {
      if (!HasName(*plan_, units[u], text)) continue;
      chosen.insert(u);
      found = true;
    }
    if (!found && chosen.size() == before) {
      return absl::NotFoundError(absl::StrCat("job '", state_.name, "' has no unit \"", text,
                                              "\": expected 0 to ", units.size() - 1,
                                              ", or the name of a parameter or module"));
    }
  }
  std::erase_if(chosen, [&](uint32_t u) { return !units[u].trainable; });
  return std::vector<uint32_t>(chosen.begin(), chosen.end());
}

absl::StatusOr<MoveStatesReply> JobHost::MoveStates(const MoveStatesRequest& request) {
  ZS_ASSIGN_OR_RETURN(const model::v1::Tier to, ParseTier(request.to()));
  if (request.state() != "optimizer") {
    return absl::InvalidArgumentError(
        absl::StrCat("state: expected \"optimizer\" (masters and optimizer states), found \"",
                     request.state(), "\""));
  }
  if (!regions_ || state_.phase == JobPhase::kFailed || !spawned_) {
    return absl::FailedPreconditionError(
        absl::StrCat("job '", state_.name, "' is ", JobPhaseName(state_.phase)));
  }
  const bool no_nvme = (!data_plane() || to == model::v1::TIER_NVME) &&
                       (plan_->nvme_paths.empty() || !NvmePlan::HasStates(plan_->config));
  if (no_nvme || plan_->config.optimizer() == model::v1::OPTIMIZER_NONE) {
    return absl::FailedPreconditionError(absl::StrCat(
        "job '", state_.name, "' has no room on nvme for optimizer states; give ",
        "offload_optimizer.nvme_path in its ds_config when it starts (its device may be \"cpu\")"));
  }
  const bool power = plan_->config.nvme().durability() == model::v1::DURABILITY_POWER;
  if (power && to == model::v1::TIER_HOST) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the states of job '", state_.name, "' survive the loss of power (zeroshard.durability), ",
        "which they do not on the host"));
  }
  ZS_ASSIGN_OR_RETURN(const std::vector<uint32_t> units, ChooseUnits(request));
  if (to == model::v1::TIER_GPU) ZS_RETURN_IF_ERROR(CheckGpuRoom(units));
  ZS_ASSIGN_OR_RETURN(JobPlan next, MovedPlan(*plan_, to, units));
  ZS_ASSIGN_OR_RETURN(const NodeMemory node, ReadNodeMemory());
  ZS_RETURN_IF_ERROR(CheckGrowth(state_.name, {plan_.get(), &next, MemoryTouched()}, node,
                                 environment_.config->host_memory_limit,
                                 environment_.memory_in_use()));
  MoveStatesReply reply;
  reply.set_units(static_cast<uint32_t>(units.size()));
  reply.set_bytes(std::max(Apart(StatesOn("nvme", *plan_), StatesOn("nvme", next)),
                           Apart(StatesOn("gpu", *plan_), StatesOn("gpu", next))));
  for (uint32_t node = 0; node < plan_->placement.nodes && state_.spans; ++node) {
    const std::string name = environment_.config->cluster.NodeName(node);
    node == plan_->placement.node ? reply.set_node(name) : reply.add_other_nodes(name);
  }
  const uint64_t rate = request.has_bytes_per_second() ? request.bytes_per_second() : kMoveRate;
  move_rate_ = rate == 0 ? 0 : std::max<uint64_t>(1, rate / workers_.size());
  plan_ = std::make_shared<const JobPlan>(std::move(next));
  LogInfo(absl::StrCat("job ", state_.name, ": ", HumanBytes(reply.bytes()), " of states of ",
                       units.size(), " units move to ", request.to()));
  if (environment_.metrics != nullptr) environment_.metrics->SetLedger(state_.name, *plan_);
  for (uint32_t w = 0; w < workers_.size(); ++w) SendMoves(w);
  return reply;
}

// All moves so far: a worker that was started again knows targets, but perhaps not the last ones.
void JobHost::SendMoves(uint32_t w) {
  for (const model::v1::Tier to :
       {model::v1::TIER_HOST, model::v1::TIER_NVME, model::v1::TIER_GPU}) {
    internal::v1::ToWorker message;
    internal::v1::MoveStates& move = *message.mutable_move();
    move.set_to(to);
    move.set_bytes_per_second(move_rate_);
    for (const auto& [unit, tier] : plan_->moved) {
      if (tier == to) move.add_units(unit);
    }
    if (move.units_size() > 0) SendToWorker(w, message);
  }
}

bool JobHost::Moving() const {
  if (plan_->moved.empty()) return false;
  for (uint32_t w = 0; w < workers_.size(); ++w) {
    const internal::v1::Stats& stats = workers_[w].stats;
    // Also before the worker has heard of it.
    if (stats.move_left_bytes() > 0) return true;
    if (data_plane() && stats.gpu_state_bytes() != plan_->gpus[w].home) return true;
    if (!plan_->nvme_paths.empty() && stats.nvme_state_bytes() != plan_->nvme_home[w]) return true;
  }
  return false;
}

std::string JobHost::Bottleneck() const {
  if (plan_->nvme_paths.empty()) return "";
  std::vector<TierWindow> windows;
  for (const Worker& worker : workers_) windows.push_back(worker.tier.window());
  return DescribeBottleneck(windows, plan_->nvme_paths, plan_->lanes);
}

}  // namespace zeroshard
