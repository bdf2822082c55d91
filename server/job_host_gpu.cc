// The part of JobHost that concerns GPUs and the ranks' data planes. The server has descriptors of
// device memory and names of devices, and touches neither.
#include <algorithm>
#include <csignal>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "server/gpu_plan.h"
#include "server/job_host.h"
#include "server/ledger_lines.h"
#include "server/node_gpus.h"

namespace zeroshard {
namespace {

constexpr size_t kMaxKeyBytes = 256;
constexpr size_t kMaxValueBytes = 64 << 10;
constexpr size_t kMaxKeys = 4096;

}  // namespace

// A rank must be on its worker's GPU, whose memory it maps. Before there are workers they go to the
// ranks' GPUs.
absl::Status JobHost::CheckDevice(const AttachCall& call) const {
  if (!data_plane() || !regions_ || call.rank >= plan_->ranks.size()) return absl::OkStatus();
  const std::string& device = plan_->workers[plan_->ranks[call.rank].home_worker()].device();
  return Annotate(CheckSameGpu(call.rank, call.device, environment_.gpus->at(device)),
                  absl::StrCat("job '", state_.name, "'"));
}

absl::Status JobHost::PlaceOnDevices() {
  if (!data_plane()) return absl::OkStatus();
  if (environment_.gpus == nullptr) return absl::InternalError("nothing is known of GPUs");
  const uint32_t first = plan_->placement.first_rank();
  std::vector<model::v1::Device> wanted(plan_->placement.ranks);
  for (uint32_t r = 0; r < wanted.size(); ++r) {
    const auto call = calls_.find(state_.ranks[first + r].attach_id);
    if (call != calls_.end()) wanted[r] = call->second.device;
  }
  absl::StatusOr<std::vector<std::string>> places = PlaceOnGpus(environment_.gpus->gpus(), wanted);
  if (!places.ok()) return Annotate(places.status(), absl::StrCat("job '", state_.name, "'"));
  JobPlan plan = *plan_;
  for (uint32_t r = 0; r < places->size(); ++r) {
    plan.workers[plan.ranks[first + r].home_worker()].set_device((*places)[r]);
  }
  ZS_RETURN_IF_ERROR(
      CheckGpuMemory(state_.name, plan, *environment_.gpus, environment_.gpu_in_use()));
  plan_ = std::make_shared<const JobPlan>(std::move(plan));
  return absl::OkStatus();
}

std::map<std::string, uint64_t> JobHost::GpuHeld() const {
  std::map<std::string, uint64_t> held;
  for (uint32_t w = 0; regions_ && w < plan_->gpus.size(); ++w) {
    held[plan_->workers[Global(w)].device()] += plan_->gpus[w].total();
  }
  return held;
}

// `w` as the job numbers it.
model::v1::Device JobHost::DeviceOf(uint32_t w) const {
  const Gpu& gpu = environment_.gpus->at(plan_->workers[w].device());
  model::v1::Device device;
  device.set_ordinal(gpu.ordinal);
  device.set_uuid(gpu.uuid);
  device.set_name(gpu.name);
  return device;
}

// The device whose NUMA node the worker's threads run on: that of its GPU, where the machine says.
std::string JobHost::CoresOf(uint32_t w) const {
  const std::string& device = plan_->workers[Global(w)].device();
  if (!data_plane()) return device;
  return absl::StrCat("cpu:", environment_.gpus->at(device).numa_node.value_or(0));
}

void JobHost::OnDeviceRegions(uint32_t w, const internal::v1::DeviceRegions& message,
                              std::vector<UniqueFd> fds) {
  absl::Status adopted;
  if (!regions_ || !data_plane() || fds.size() != static_cast<size_t>(message.regions_size())) {
    adopted = absl::InvalidArgumentError("device memory without descriptors, or of no such job");
  }
  for (size_t i = 0; adopted.ok() && i < fds.size(); ++i) {
    adopted = regions_->AdoptDevice(*plan_, Global(w), message.regions(static_cast<int>(i)),
                                    std::move(fds[i]));
  }
  if (adopted.ok()) return;
  workers_[w].fatal = absl::InternalError(adopted.message());
  KillWorker(*workers_[w].process, SIGKILL);
}

// Whether all device memory of a worker that says it is ready is here; one that forgot it is ended.
bool JobHost::HasDevice(uint32_t w) {
  if (!data_plane() || regions_->HasDevice(Global(w))) return true;
  workers_[w].fatal = absl::InternalError("it has not handed its device memory over");
  KillWorker(*workers_[w].process, SIGKILL);
  return false;
}

// A GPU has room for what rested there at first.
absl::Status JobHost::CheckGpuRoom(const std::vector<uint32_t>& units) const {
  if (!data_plane()) {
    return absl::FailedPreconditionError(
        absl::StrCat("job '", state_.name, "' does not run on GPUs (the daemon's devices)"));
  }
  const Layout& layout = plan_->layout.front();
  ZS_ASSIGN_OR_RETURN(const PartitionPlan partition,
                      PartitionPlan::Create(layout, plan_->config, Global(0), plan_->lanes));
  ZS_ASSIGN_OR_RETURN(const DevicePlan device, plan_->DevicePlanOf(partition));
  for (const DeviceImage& image : device.images()) {
    if (image.home || image.elements == 0) continue;
    if (std::find(units.begin(), units.end(), image.unit) == units.end()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("unit ", image.unit, " of job '", state_.name,
                     "' has no room on the gpu: its states were offloaded when the job began"));
  }
  return absl::OkStatus();
}

// What waits for the ranks of a generation that is dead waits no longer.
void JobHost::EndGeneration(const absl::Status& status) {
  if (!data_plane()) return;
  if (regions_) regions_->KillCounters();
  rendezvous_.FailWaiters(absl::AbortedError(status.message()));
  rendezvous_ = KvStore();
}

void JobHost::Rendezvous(const trainer::v1::RendezvousRequest& request, KvStore::Done done) {
  const absl::StatusOr<uint32_t> rank = RankOfToken(request.token());
  if (!state_.poison.ok()) return done(absl::AbortedError(state_.poison.message()));
  if (!rank.ok()) return done(rank.status());
  if (ranks_[*rank].generation != request.generation()) {
    return done(absl::AbortedError(absl::StrCat("generation ", request.generation(), " of job '",
                                                state_.name, "' has ended; rank ", *rank,
                                                " is in generation ", ranks_[*rank].generation)));
  }
  if (request.key().empty() || request.key().size() > kMaxKeyBytes) {
    return done(absl::InvalidArgumentError(
        absl::StrCat("key: expected 1 to ", kMaxKeyBytes, " bytes, found ", request.key().size())));
  }
  if (!request.has_value()) {
    if (!keeps_store()) return ForwardRendezvous(*rank, request, std::move(done));
    rendezvous_.Get(request.key(), *rank, loop_.Now() + absl::Milliseconds(request.timeout_ms()),
                    std::move(done));
    return ArmTimer();
  }
  if (request.value().size() > kMaxValueBytes) {
    return done(absl::ResourceExhaustedError(absl::StrCat(
        "value: expected at most ", kMaxValueBytes, " bytes, found ", request.value().size())));
  }
  if (!keeps_store()) return ForwardRendezvous(*rank, request, std::move(done));
  const absl::Status set = SetRendezvousKey(request.key(), request.value());
  done(set.ok() ? absl::StatusOr<std::string>(request.value()) : set);
}

absl::Status JobHost::SetRendezvousKey(const std::string& key, const std::string& value) {
  if (rendezvous_.keys() >= kMaxKeys) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the generation has ", kMaxKeys, " keys already"));
  }
  return rendezvous_.Set(key, value);
}

}  // namespace zeroshard
