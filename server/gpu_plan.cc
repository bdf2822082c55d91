#include "server/gpu_plan.h"

#include <algorithm>
#include <set>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "storage/bytes.h"
#include "storage/device_counters.h"
#include "storage/device_mirror.h"
#include "storage/layout_proto.h"

namespace zeroshard {
namespace {

using internal::v1::WorkerRegion;

constexpr uint64_t kPage = 4096;

// Whole pages of [begin, begin + bytes).
uint64_t WholePages(uint64_t begin, uint64_t bytes) {
  const uint64_t from = RoundUpTo(begin, kPage);
  const uint64_t to = (begin + bytes) / kPage * kPage;
  return to > from ? to - from : 0;
}

bool OnGpu(const JobPlan& plan, const DeviceImage& image) {
  const auto moved = plan.moved.find(image.unit);
  return moved == plan.moved.end() ? image.home : moved->second == model::v1::TIER_GPU;
}

// Pages of an array of the whole `range` of a unit, `element_bytes` each, from `offset` on, that
// belong to `runs` alone.
uint64_t PagesOf(const std::vector<GrainRange>& runs, GrainRange range, uint64_t offset,
                 uint64_t element_bytes) {
  uint64_t bytes = 0;
  if (offset == kAbsent) return 0;
  for (const GrainRange& run : runs) {
    const uint64_t from = run.first_element() - range.first_element();
    bytes += WholePages(offset + from * element_bytes, run.elements() * element_bytes);
  }
  return bytes;
}

// Segments of device pages that hold units which are never released.
uint64_t ResidentBytes(const Layout& layout, const model::v1::EngineConfig& config) {
  std::set<uint64_t> segments;
  for (uint32_t u = 0; u < layout.units().size(); ++u) {
    const Unit& unit = layout.units()[u];
    if (!layout.persistent(u, config.persistence_threshold()) || unit.bytes() == 0) continue;
    const uint64_t last = (unit.window_offset + unit.bytes() - 1) / kDevicePage;
    for (uint64_t s = unit.window_offset / kDevicePage; s <= last; ++s) segments.insert(s);
  }
  return segments.size() * kDevicePage;
}

}  // namespace

TrainerGpuBytes TrainerGpuBytesOf(const Layout& layout, const model::v1::EngineConfig& config) {
  TrainerGpuBytes bytes;
  const bool local_sums = SumsMicroStepsFirst(config);
  const uint64_t ranks = config.world_size();
  uint64_t largest = 0;  // trainable
  uint64_t widest = 1;
  uint64_t live = config.max_live_elements();
  uint64_t slice = 0;  // the largest of a rank, as it is exchanged
  uint64_t sums = 0;
  for (const Unit& unit : layout.units()) {
    widest = std::max<uint64_t>(widest, SizeOf(unit.dtype));
    live = std::max(live, unit.elements());
    if (!unit.trainable || config.forward_only()) continue;
    largest = std::max(largest, unit.bytes());
    const uint64_t elements = (unit.grains + ranks - 1) / ranks * kGrainElements;
    slice = std::max(slice, elements * (local_sums ? sizeof(float) : SizeOf(unit.dtype)));
    if (local_sums) sums += unit.elements() * sizeof(float);
  }
  const auto pages = [](uint64_t of) { return RoundUpTo(of, kDevicePage); };
  bytes.parameters = pages(layout.window_bytes());
  if (config.stage() == 3 && live < layout.window_bytes()) {
    // A unit begins and ends within a page; what one gives back is kept for the next.
    const uint64_t gathered = pages(live * widest) + pages(largest) + 4 * kDevicePage;
    bytes.parameters = std::min(bytes.parameters, ResidentBytes(layout, config) + gathered);
  }
  if (largest == 0) return bytes;
  bytes.gradients = pages(std::max(GradientWindowBytes(layout, config), 2 * largest)) +
                    pages(ranks > 1 ? slice * ranks : 0) + pages(sums) + 2 * kDevicePage;
  return bytes;
}

GpuHomes GpuHomesOf(const JobPlan& plan, const PartitionPlan& partition, const DevicePlan& device) {
  const Layout& layout = plan.layout.front();
  GpuHomes homes;
  homes.offloads = HasNvmeParameters(plan.config);  // they come through the ring
  homes.states.resize(layout.units().size());
  for (const DeviceImage& image : device.images()) {
    if (image.elements == 0) continue;
    if (!OnGpu(plan, image)) {
      homes.offloads = true;
      continue;
    }
    const uint64_t begin = image.begin / kGrainElements;
    const GrainRange run = {begin, begin + image.elements / kGrainElements};
    std::vector<GrainRange>& runs = homes.states[image.unit];
    if (!runs.empty() && runs.back().end == run.begin) {
      runs.back().end = run.end;
    } else {
      runs.push_back(run);
    }
    for (const PartitionArray& array : image.arrays) {
      homes.bytes += array.array.bytes;
      homes.unbacked_bytes += WholePages(array.offset, array.array.bytes);
      const ChunkArrayKind kind = array.array.kind;
      const bool scale = kind == ChunkArrayKind::kScales0 || kind == ChunkArrayKind::kScales1;
      if (scale) homes.scales += array.array.bytes;
    }
  }
  const auto accumulator = DTypeFromProto(plan.config.accumulator_dtype());
  const uint64_t g = accumulator.ok() ? SizeOf(*accumulator) : sizeof(float);
  for (uint32_t u = 0; u < layout.units().size(); ++u) {
    const UnitPlan& unit = partition.unit(u);
    homes.unbacked_bytes += PagesOf({unit.slice}, unit.slice, unit.accumulator, g);
    if (!HasDeviceParameters(plan.config)) continue;
    homes.unbacked_bytes +=
        PagesOf({unit.shard}, unit.shard, unit.shard_data, SizeOf(layout.units()[u].dtype));
  }
  return homes;
}

absl::Status AddGpu(const PartitionPlan& partition, size_t own, JobPlan& plan) {
  ZS_ASSIGN_OR_RETURN(const DevicePlan device, plan.DevicePlanOf(partition));
  const GpuHomes homes = GpuHomesOf(plan, partition, device);
  plan.regions[own].memory -= homes.unbacked_bytes;
  const uint32_t w = plan.regions[own].index;
  const uint32_t island = plan.regions[own].island;
  const auto add = [&](WorkerRegion::Kind kind, uint64_t bytes) {
    plan.regions.push_back({kind, w, island, bytes, bytes});
  };
  add(WorkerRegion::KIND_DEVICE_TABLE, device.table_bytes());
  add(WorkerRegion::KIND_DEVICE_COUNTERS, kDeviceCounterBytes);
  if (MirrorPlan::Exists(plan.config)) {
    add(WorkerRegion::KIND_DEVICE_MIRROR,
        MirrorPlan::Create(plan.layout.front(), partition, device, plan.config).bytes());
  }
  const uint64_t ring =
      homes.offloads ? DeviceRingOf(plan.layout.front(), partition, plan.config, plan.lanes).bytes()
                     : 0;
  plan.staging_bytes += ring;
  const TrainerGpuBytes trainer = TrainerGpuBytesOf(plan.layout.front(), plan.config);
  plan.gpus.push_back({.shared = device.shared_bytes(),
                       .states = device.states_bytes(),
                       .trainer = trainer.parameters + trainer.gradients,
                       .home = homes.bytes,
                       .ring = ring});
  return absl::OkStatus();
}

std::string GpuProtection(const JobPlan& plan) {
  const bool states = plan.config.optimizer() != model::v1::OPTIMIZER_NONE;
  const bool gpu = states && (plan.config.optimizer_tier() == model::v1::TIER_GPU ||
                              plan.config.optimizer_ratio() < 1);
  if (MirrorPlan::Exists(plan.config)) {
    const uint32_t steps = plan.config.gpu_mirror_steps();
    return absl::StrCat(
        "the states in GPU memory survive the death of trainers and workers; when a GPU is lost "
        "the job goes back to its last mirror in host memory, taken ",
        steps == 1 ? "every step" : absl::StrCat("every ", steps, " steps"),
        "; with the daemon or the power all is lost since the last checkpoint");
  }
  if (plan.config.nvme().durability() == model::v1::DURABILITY_POWER) {
    return "the states are on nvme and survive the death of trainers, workers and daemon, and the "
           "loss of power: who attaches under the job's name goes on from the last committed step";
  }
  if (!gpu) {
    return "parameters and gradients in GPU memory survive the death of trainers and workers; "
           "after "
           "the loss of a GPU the job goes on from its last checkpoint";
  }
  return "the optimizer states in GPU memory survive the death of trainers and workers; they are "
         "lost with a GPU, the daemon or the power: the job then goes on from its last checkpoint";
}

}  // namespace zeroshard
