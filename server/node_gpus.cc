#include "server/node_gpus.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "server/devices.h"
#include "server/node_memory.h"

namespace zeroshard {
namespace {

std::string Names(const std::vector<Gpu>& gpus) {
  return absl::StrJoin(gpus, ", ", [](std::string* out, const Gpu& gpu) {
    absl::StrAppend(out, gpu.device, gpu.usable.ok() ? "" : " (not usable)");
  });
}

absl::StatusOr<std::vector<Gpu>> AllUsable(std::vector<Gpu> found) {
  std::vector<std::string> reasons;
  for (const Gpu& gpu : found) {
    if (!gpu.usable.ok()) reasons.push_back(std::string(gpu.usable.message()));
  }
  std::erase_if(found, [](const Gpu& gpu) { return !gpu.usable.ok(); });
  if (!found.empty()) return found;
  return absl::FailedPreconditionError(
      absl::StrCat("devices: no GPU can be used: ", absl::StrJoin(reasons, "; ")));
}

absl::StatusOr<std::vector<Gpu>> Choose(const std::vector<std::string>& devices,
                                        std::vector<Gpu> found) {
  if (devices.size() == 1 && devices.front() == kAllGpus) return AllUsable(std::move(found));
  std::vector<Gpu> chosen;
  for (const std::string& device : devices) {
    const auto it = std::find_if(found.begin(), found.end(),
                                 [&](const Gpu& gpu) { return gpu.device == device; });
    if (it == found.end()) {
      return absl::NotFoundError(absl::StrCat("devices: there is no ", device,
                                              "; there are: ", Names(found),
                                              " (CUDA_VISIBLE_DEVICES of the daemon counts)"));
    }
    ZS_RETURN_IF_ERROR(Annotate(it->usable, absl::StrCat("devices: ", device)));
    chosen.push_back(*it);
  }
  return chosen;
}

// What of `plan` is on the device of worker `w`.
std::string Sum(const JobPlan& plan, uint32_t w) {
  const std::string worker = absl::StrCat("worker ", w);
  const std::string rank = absl::StrCat("rank ", w);
  std::vector<std::string> parts;
  for (const model::v1::LedgerLine& line : plan.ledger) {
    if (line.tier() != "gpu" || (line.holder() != worker && line.holder() != rank)) continue;
    parts.push_back(absl::StrCat(line.state(), " ", HumanBytes(line.bytes())));
  }
  return absl::StrJoin(parts, " + ");
}

}  // namespace

absl::StatusOr<std::unique_ptr<NodeGpus>> NodeGpus::Create(const std::vector<std::string>& devices,
                                                           uint64_t limit, std::vector<Gpu> found) {
  ZS_ASSIGN_OR_RETURN(std::vector<Gpu> chosen, Choose(devices, std::move(found)));
  return std::unique_ptr<NodeGpus>(new NodeGpus(std::move(chosen), limit));
}

std::vector<std::string> NodeGpus::devices() const {
  std::vector<std::string> names;
  for (const Gpu& gpu : gpus_) names.push_back(gpu.device);
  return names;
}

const Gpu& NodeGpus::at(const std::string& device) const {
  return *std::find_if(gpus_.begin(), gpus_.end(),
                       [&](const Gpu& gpu) { return gpu.device == device; });
}

uint64_t NodeGpus::Capacity(const Gpu& gpu) const {
  return limit_ == 0 ? gpu.total_bytes : std::min(limit_, gpu.total_bytes);
}

void NodeGpus::SetFree(const std::string& device, std::optional<uint64_t> bytes) {
  absl::MutexLock lock(&mu_);
  free_.erase(device);
  if (bytes.has_value()) free_[device] = *bytes;
}

std::optional<uint64_t> NodeGpus::Free(const std::string& device) const {
  absl::MutexLock lock(&mu_);
  const auto it = free_.find(device);
  if (it == free_.end()) return std::nullopt;
  return it->second;
}

std::string DescribeGpu(const Gpu& gpu) {
  return absl::StrCat(gpu.device, ", ", GpuUuidText(gpu.uuid), " (", gpu.name, ")");
}

absl::StatusOr<std::vector<std::string>> PlaceOnGpus(std::span<const Gpu> gpus,
                                                     std::span<const model::v1::Device> ranks) {
  std::vector<std::string> places(ranks.size());
  std::map<std::string, size_t> taken;  // by device: the rank
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (ranks[r].uuid().empty()) continue;
    const auto it = std::find_if(gpus.begin(), gpus.end(),
                                 [&](const Gpu& gpu) { return gpu.uuid == ranks[r].uuid(); });
    if (it == gpus.end()) {
      std::vector<std::string> names;
      for (const Gpu& gpu : gpus) names.push_back(DescribeGpu(gpu));
      return absl::FailedPreconditionError(absl::StrCat(
          "rank ", r, " trains on ", GpuUuidText(ranks[r].uuid()), " (", ranks[r].name(),
          "), which is none of the daemon's devices: ", absl::StrJoin(names, "; ")));
    }
    const auto [other, added] = taken.emplace(it->device, r);
    if (!added) {
      return absl::FailedPreconditionError(
          absl::StrCat("ranks ", other->second, " and ", r, " both train on ", DescribeGpu(*it),
                       "; each rank needs a GPU of its own (set its device by LOCAL_RANK)"));
    }
    places[r] = it->device;
  }
  size_t next = 0;
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (!places[r].empty()) continue;
    while (next < gpus.size() && taken.contains(gpus[next].device)) ++next;
    if (next == gpus.size()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the job has ", ranks.size(), " ranks, and the daemon ", gpus.size(), " GPUs"));
    }
    places[r] = gpus[next++].device;
  }
  return places;
}

absl::Status CheckSameGpu(uint32_t rank, const model::v1::Device& of_rank, const Gpu& of_worker) {
  if (of_rank.uuid().empty() || of_rank.uuid() == of_worker.uuid) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "rank ", rank, " trains on ", GpuUuidText(of_rank.uuid()), " (", of_rank.name(),
      "), and its worker's memory is on ", DescribeGpu(of_worker),
      "; a rank and its worker share one GPU: choose it by LOCAL_RANK or CUDA_VISIBLE_DEVICES"));
}

absl::Status CheckGpuMemory(const std::string& job, const JobPlan& plan, const NodeGpus& gpus,
                            const GpuInUse& in_use) {
  for (uint32_t own = 0; own < plan.gpus.size(); ++own) {
    const uint32_t w = plan.placement.first_worker() + own;
    const std::string& device = plan.workers[w].device();
    const Gpu& gpu = gpus.at(device);
    const uint64_t need = plan.gpus[own].total();
    const auto it = in_use.find(device);
    const uint64_t held = it == in_use.end() ? 0 : it->second;
    const uint64_t capacity = gpus.Capacity(gpu);
    if (held + need <= capacity) continue;
    return absl::ResourceExhaustedError(absl::StrCat(
        "job '", job, "' needs ", HumanBytes(need), " of ", device, ", ",
        HumanBytes(capacity - std::min(capacity, held)), " free of ", HumanBytes(capacity),
        gpus.limit() == 0 ? "" : " (gpu_memory_limit)", "; the sum is ", Sum(plan, w),
        ". Offload the optimizer (offload_optimizer.device), or use a higher stage or more GPUs"));
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
