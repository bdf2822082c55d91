// The parts of a shard that know of a GPU: jobs with a data plane.
#include <algorithm>
#include <utility>

#include "base/dtype.h"
#include "base/fault_point.h"
#include "base/status.h"
#include "storage/shard_format.h"
#include "worker/shard.h"
#include "worker/unit_update.h"

namespace zeroshard {
namespace {

// Chunks on the host that are computed together, a lane: while one group is, the next one's
// gradients come and the parameters of the one before go.
constexpr size_t kGroupChunksOfLane = 4;

GrainRange Intersect(GrainRange a, GrainRange b) {
  const uint64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

}  // namespace

bool Shard::ParametersOnDevice() const {
  return tiers_->device() != nullptr && !HasHostParameters(memory_->config());
}

absl::Status Shard::OpenParameters(uint32_t unit, GrainRange run) const {
  if (!ParametersOnDevice()) return absl::OkStatus();
  const GrainRange part = Intersect(run, memory_->plan().unit(unit).shard);
  if (part.size() == 0) return absl::OkStatus();
  const uint64_t bytes = SizeOf(memory_->layout().units()[unit].dtype);
  return tiers_->device()->ReadParameters(
      unit, part, memory_->parameters_at_rest(unit) + part.first_element() * bytes);
}

absl::Status Shard::SettleParameters(uint32_t unit, GrainRange run) const {
  if (!ParametersOnDevice()) return absl::OkStatus();
  const GrainRange part = Intersect(run, memory_->plan().unit(unit).shard);
  if (part.size() == 0) return absl::OkStatus();
  const uint64_t bytes = SizeOf(memory_->layout().units()[unit].dtype);
  ZS_RETURN_IF_ERROR(tiers_->device()->WriteParameters(
      unit, part, memory_->parameters_at_rest(unit) + part.first_element() * bytes));
  ZS_FAULT_POINT("worker.device.parameters.before_give_back");
  tiers_->device()->GiveBackParameters(unit, part);
  return absl::OkStatus();
}

absl::Status Shard::ReadDeviceParameters(uint32_t unit, std::span<const StateArray> arrays,
                                         GrainRange grains,
                                         std::span<std::vector<std::byte>> outs) const {
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (arrays[i].kind != kKindParameter) continue;
    const GrainRange part = Intersect(arrays[i].grains, grains);
    if (part.size() == 0) continue;
    ZS_RETURN_IF_ERROR(tiers_->device()->ReadParameters(unit, part, outs[i].data()));
  }
  return absl::OkStatus();
}

void Shard::CompleteParameters(const UnitUpdate& update, const UnitState& state,
                               uint32_t chunk) const {
  if (!ParametersOnDevice()) return;
  const ChunkPlan& plan = memory_->plan().chunks()[chunk];
  const uint64_t end = plan.begin + plan.elements;
  const bool all = std::any_of(update.segments.begin(), update.segments.end(),
                               [&](const UpdateSegment& segment) {
                                 return segment.begin <= plan.begin && segment.end >= end;
                               });
  if (all) return;
  const DType dtype = memory_->layout().units()[plan.unit].dtype;
  ConvertElements(state.arrays.param + plan.begin, DType::kFloat32,
                  memory_->parameters_at_rest(plan.unit) + plan.begin * SizeOf(dtype), dtype,
                  plan.elements);
}

DeviceUpdate Shard::UpdateOnDevice(const UnitUpdate& update, uint32_t chunk) const {
  const ChunkPlan& plan = memory_->plan().chunks()[chunk];
  const UnitState& state = states_[plan.unit];
  DeviceUpdate on_device{.chunk = chunk, .master = state.arrays.master};
  on_device.segments = update.segments;
  if (state.arrays.state_format == StateFormat::kInt8) {
    const uint64_t grain = plan.begin / kGrainElements;
    on_device.first_block = state.blocks->first[grain];
    on_device.blocks =
        state.blocks->first[grain + plan.elements / kGrainElements] - on_device.first_block;
  }
  return on_device;
}

absl::Status Shard::ApplyWithDevice(const ApplyJob& job, std::span<const UnitUpdate> updates,
                                    const TouchedChunks& touched) const {
  DeviceShard& device = *tiers_->device();
  std::vector<DeviceUpdate> on_device;
  for (const uint32_t chunk : touched.on_device) {
    on_device.push_back(UpdateOnDevice(updates[memory_->plan().chunks()[chunk].unit], chunk));
  }
  const DeviceStep step{.attempt = job.attempt,
                        .kind = kind_,
                        .state_format = memory_->plan().state_format(),
                        .args = job.args,
                        .grad_scale = job.grad_scale};
  ZS_RETURN_IF_ERROR(device.StartUpdates(step, on_device));
  const absl::Status off_device = ApplyOffDevice(job, updates, touched);
  // What is in flight is named, also when the step fails elsewhere and is tried again.
  ZS_RETURN_IF_ERROR(device.FinishUpdates());
  ZS_RETURN_IF_ERROR(off_device);
  return device.SentParameters();
}

absl::Status Shard::ApplyOffDevice(const ApplyJob& job, std::span<const UnitUpdate> updates,
                                   const TouchedChunks& touched) const {
  DeviceShard& device = *tiers_->device();
  const size_t size = kGroupChunksOfLane * static_cast<size_t>(pool_->lanes());
  const auto group = [&](size_t begin) {
    const std::span<const uint32_t> all = touched.on_host;
    return all.subspan(std::min(begin, all.size()),
                       std::min(size, all.size() - std::min(begin, all.size())));
  };
  ZS_RETURN_IF_ERROR(device.FetchGradients(group(0)));
  for (size_t begin = 0; begin < touched.on_host.size(); begin += size) {
    ZS_RETURN_IF_ERROR(device.FetchGradients(group(begin + size)));
    ZS_RETURN_IF_ERROR(device.FetchedGradients(/*later=*/1));
    ApplyOnHost(job, updates, group(begin), touched.silent);
    pool_->ParallelFor(group(begin).size(), [&](size_t item, int) {
      const uint32_t chunk = group(begin)[item];
      const uint32_t unit = memory_->plan().chunks()[chunk].unit;
      CompleteParameters(updates[unit], states_[unit], chunk);
    });
    // Also of chunks that a predecessor has updated: it may not have sent them.
    ZS_RETURN_IF_ERROR(device.SendParameters(group(begin)));
    ZS_RETURN_IF_ERROR(device.PollUpdates().status());
  }
  if (touched.on_nvme.empty()) return absl::OkStatus();
  ZS_RETURN_IF_ERROR(device.FetchGradients(touched.on_nvme));
  ZS_RETURN_IF_ERROR(device.FetchedGradients(/*later=*/0));
  ZS_RETURN_IF_ERROR(ApplyOnTier(job, updates, touched.on_nvme));
  return device.SendParameters(touched.on_nvme);
}

}  // namespace zeroshard
