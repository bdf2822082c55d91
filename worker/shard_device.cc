// The parts of a shard that know of a GPU: jobs with a data plane.
#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "base/dtype.h"
#include "base/fault_point.h"
#include "base/status.h"
#include "storage/shard_format.h"
#include "worker/shard.h"
#include "worker/unit_update.h"

namespace zeroshard {
namespace {

GrainRange Intersect(GrainRange a, GrainRange b) {
  const uint64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

// Of a pass over the NVMe tier: while images are read, computed and written, gradients come from
// the device and parameters go there.
class DeviceFeed final : public TierFeed {
 public:
  explicit DeviceFeed(DeviceShard& device) : device_(device) {}

  absl::StatusOr<bool> Begin(const TierItem& item) override {
    // What the device updates by itself goes on.
    ZS_RETURN_IF_ERROR(device_.PollUpdates().status());
    if (IsMadeThere(item)) return device_.FetchParameters(ChunkOf(item));
    return IsUpdated(item) ? device_.FetchGradients(ChunkOf(item)) : true;
  }
  absl::StatusOr<bool> HasCome(const TierItem& item) override {
    return UsesParcel(item) ? device_.HasFetched(ChunkOf(item)) : true;
  }
  absl::Status Leave(const TierItem& item) override {
    return UsesParcel(item) ? device_.SendParameters(ChunkOf(item)) : absl::OkStatus();
  }
  absl::Status Arrive(const TierItem& item) override {
    ZS_RETURN_IF_ERROR(device_.PollUpdates().status());
    return device_.SentParameters(ChunkOf(item));
  }

 private:
  // The parameters of others were sent when their states were updated, or are written of masters on
  // the host or on the device.
  static bool IsUpdated(const TierItem& item) { return item.read != kNoImage; }
  bool IsMadeThere(const TierItem& item) const {
    return !IsUpdated(item) && device_.Holds(ChunkOf(item));
  }
  bool UsesParcel(const TierItem& item) const { return IsUpdated(item) || IsMadeThere(item); }
  static uint32_t ChunkOf(const TierItem& item) { return static_cast<uint32_t>(item.tag); }

  DeviceShard& device_;
};

}  // namespace

bool Shard::ParametersOnDevice() const {
  return tiers_->device() != nullptr && HasDeviceParameters(memory_->config());
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

void Shard::CompleteParameters(const UnitUpdate& update, const UnitState& state, uint32_t chunk,
                               uint64_t computed) const {
  if (!ParametersOnDevice()) return;
  const ChunkPlan& plan = memory_->plan().chunks()[chunk];
  const uint64_t end = plan.begin + plan.elements;
  const bool all = std::any_of(update.segments.begin(), update.segments.end(),
                               [&](const UpdateSegment& segment) {
                                 return segment.begin <= plan.begin && segment.end >= end;
                               });
  if (all && computed == plan.elements) return;
  ParametersOfMaster(state, plan.begin, plan.elements, tiers_->device()->parcel(chunk).parameters);
}

UpdatePass Shard::PassOfParcel(const UnitUpdate& update, const UpdateArrays& arrays,
                               uint32_t chunk) const {
  const bool silent = ParameterImageHeld(chunk) != kNoImage;
  const ChunkPlan& plan = memory_->plan().chunks()[chunk];
  const DeviceShard::Parcel parcel = tiers_->device()->parcel(chunk);
  UpdatePass pass = update.pass;
  const DType grad_dtype = pass.arrays.grad_dtype;
  pass.arrays = arrays;
  pass.arrays.grad_dtype = grad_dtype;
  pass.arrays.grad = parcel.gradients - plan.begin * SizeOf(grad_dtype);
  if (silent) return pass;
  pass.arrays.out =
      ParametersOnDevice()
          ? parcel.parameters - plan.begin * SizeOf(memory_->layout().units()[plan.unit].dtype)
          : memory_->parameters_at_rest(plan.unit);
  return pass;
}

DeviceUpdate Shard::UpdateOnDevice(const UnitUpdate& update, uint32_t chunk) const {
  const ChunkPlan& plan = memory_->plan().chunks()[chunk];
  const UnitState& state = states_[plan.unit];
  DeviceUpdate on_device{.chunk = chunk, .master = state.arrays.master};
  on_device.random_key = update.pass.random_key;
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
  if (HasNvmeParameters(memory_->config())) {
    ZS_RETURN_IF_ERROR(WriteParametersOf(job, updates, touched.on_device));
  }
  return device.SentParameters();
}

// Images on the NVMe tier in a pass, others where they are. Each is its rounded master, also when
// it is made again.
absl::Status Shard::WriteParametersOf(const ApplyJob& job, std::span<const UnitUpdate> updates,
                                      std::span<const uint32_t> chunks) const {
  if (chunks.empty()) return absl::OkStatus();
  DeviceShard& device = *tiers_->device();
  ZS_RETURN_IF_ERROR(device.OpenRing(RingLanes()).status());
  std::vector<uint32_t> on_host, on_nvme;
  for (const uint32_t chunk : chunks) {
    (ParameterImageHeld(chunk) == kNoImage ? on_host : on_nvme).push_back(chunk);
  }
  size_t fetched = 0;
  for (const uint32_t chunk : on_host) {
    for (; fetched < on_host.size(); ++fetched) {
      ZS_ASSIGN_OR_RETURN(const bool begun, device.FetchParameters(on_host[fetched]));
      if (!begun) break;
    }
    ZS_RETURN_IF_ERROR(device.AwaitFetched(chunk));
    ZS_FAULT_POINT("worker.device.parameters.before_host");
    const ChunkPlan& plan = memory_->plan().chunks()[chunk];
    const uint64_t bytes = SizeOf(memory_->layout().units()[plan.unit].dtype);
    std::memcpy(memory_->parameters_at_rest(plan.unit) + plan.begin * bytes,
                device.parcel(chunk).parameters, plan.elements * bytes);
    ZS_RETURN_IF_ERROR(device.SendParameters(chunk));
  }
  if (on_nvme.empty()) return absl::OkStatus();
  DeviceFeed feed(device);
  return ApplyOnTier(job, updates, on_nvme, &feed);
}

uint32_t Shard::RingLanes() const {
  return std::max(static_cast<uint32_t>(pool_->lanes()), accumulators_.undo().lanes());
}

void Shard::ApplyParcels(const ApplyJob& job, std::span<const UnitUpdate> updates,
                         std::span<const uint32_t> chunks) const {
  std::vector<PreparedUpdate> prepared;
  std::vector<uint32_t> place(memory_->plan().chunks().size());
  std::vector<uint64_t> computed(chunks.size());
  const auto unit_of = [&](uint32_t chunk) { return memory_->plan().chunks()[chunk].unit; };
  for (const uint32_t chunk : chunks) {
    const uint32_t unit = unit_of(chunk);
    place[chunk] = static_cast<uint32_t>(prepared.size());
    prepared.emplace_back(PassOfParcel(updates[unit], states_[unit].arrays, chunk));
  }
  RunApply(job, chunks, [&](uint32_t chunk, uint64_t begin, uint64_t end) {
    prepared[place[chunk]].Apply(begin, end);
    computed[place[chunk]] += end - begin;
  });
  // What a predecessor has computed it may not have sent.
  pool_->ParallelFor(chunks.size(), [&](size_t item, int) {
    const uint32_t unit = unit_of(chunks[item]);
    CompleteParameters(updates[unit], states_[unit], chunks[item], computed[item]);
  });
}

size_t Shard::TornFirst(const ApplyJob& job, std::vector<uint32_t>& chunks) const {
  const ProtectedPass pass = ProtectedApply(job);
  std::vector<bool> torn(memory_->plan().chunks().size());
  for (uint32_t lane = 0; lane < pass.area.lanes(); ++lane) {
    const std::optional<UndoResume> in_flight = pass.area.InFlight(lane);
    if (in_flight.has_value() && in_flight->key == pass.key) torn[in_flight->chunk] = true;
  }
  const auto rest = std::stable_partition(chunks.begin(), chunks.end(),
                                          [&](uint32_t chunk) { return torn[chunk]; });
  return static_cast<size_t>(rest - chunks.begin());
}

absl::Status Shard::ApplyOffDevice(const ApplyJob& job, std::span<const UnitUpdate> updates,
                                   const TouchedChunks& touched) const {
  DeviceShard& device = *tiers_->device();
  if (touched.on_host.empty() && touched.on_nvme.empty()) return absl::OkStatus();
  ZS_ASSIGN_OR_RETURN(const uint32_t parcels, device.OpenRing(RingLanes()));
  std::vector<uint32_t> chunks = touched.on_host;
  const size_t torn = TornFirst(job, chunks);
  const size_t group = std::max<size_t>(1, parcels / 3);
  size_t fetched = 0;
  // While a group is computed, gradients of the next one come and parameters of the one before go.
  for (size_t begin = 0; begin < chunks.size();) {
    size_t end = std::min(chunks.size(), begin + (begin == 0 ? std::max(group, torn) : group));
    for (; fetched < std::min(chunks.size(), end + group); ++fetched) {
      ZS_ASSIGN_OR_RETURN(const bool begun, device.FetchGradients(chunks[fetched]));
      if (!begun) break;
    }
    end = std::min(end, fetched);
    if (end == begin) {
      ZS_RETURN_IF_ERROR(device.SentParameters());
      continue;
    }
    const auto part = std::span<const uint32_t>(chunks).subspan(begin, end - begin);
    for (const uint32_t chunk : part) ZS_RETURN_IF_ERROR(device.AwaitFetched(chunk));
    ApplyParcels(job, updates, part);
    for (const uint32_t chunk : part) ZS_RETURN_IF_ERROR(device.SendParameters(chunk));
    ZS_RETURN_IF_ERROR(device.PollUpdates().status());
    begin = end;
  }
  if (touched.on_nvme.empty()) return absl::OkStatus();
  DeviceFeed feed(device);
  return ApplyOnTier(job, updates, touched.on_nvme, &feed);
}

}  // namespace zeroshard
