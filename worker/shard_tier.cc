// The parts of a shard that know of other places than the partition.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/log.h"
#include "base/status.h"
#include "device/cpu/stream_copy.h"
#include "storage/shard_format.h"
#include "worker/shard.h"
#include "worker/unit_update.h"

namespace zeroshard {
namespace {

// Chunks of a run, of which memory is taken at a time: at least one, and as many as a record of a
// checkpoint has where chunks are of full size.
uint64_t RunChunks(const model::v1::EngineConfig& config) {
  return kMaxRecordGrains * kGrainElements /
         (config.data_plane() ? kMaxDeviceChunkElements : kMaxChunkElements);
}

GrainRange Intersect(GrainRange a, GrainRange b) {
  const uint64_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

GrainRange GrainsOf(const TierImage& image) {
  return {image.begin / kGrainElements, (image.begin + image.elements) / kGrainElements};
}

// Where a part of an array goes in what its part `grains` is copied to.
std::span<std::byte> PartOf(std::span<std::byte> out, const StateArray& array, GrainRange grains,
                            GrainRange part) {
  const uint64_t bytes = array.type.grain_bytes();
  const GrainRange whole = Intersect(array.grains, grains);
  return out.subspan((part.begin - whole.begin) * bytes, part.size() * bytes);
}

}  // namespace

uint32_t Shard::ParameterImageHeld(uint32_t chunk) const {
  if (tiers_->nvme() == nullptr) return kNoImage;
  const uint32_t image = tiers_->nvme()->plan().parameter_image_of(chunk);
  return tiers_->nvme()->Holds(image) ? image : kNoImage;
}

absl::Status Shard::ApplyOnTier(const ApplyJob& job, std::span<const UnitUpdate> updates,
                                std::span<const uint32_t> chunks, TierFeed* feed) const {
  std::vector<TierItem> items;
  for (const uint32_t chunk : chunks) {
    TierItem item{.write = ParameterImageHeld(chunk), .tag = chunk};
    if (tiers_->nvme()->Holds(chunk)) {
      item.read = chunk;
      item.rewrite = true;
    }
    items.push_back(item);
  }
  ZS_RETURN_IF_ERROR(tiers_->nvme()->Open(job.attempt, job.step + 1));
  const auto update = [&](const TierItem& item, const TierBuffers& buffers) {
    const uint32_t unit = memory_->plan().chunks()[item.tag].unit;
    UpdateImage(updates[unit], item, buffers);
    return absl::OkStatus();
  };
  return tiers_->nvme()->Run(items, update, feed);
}

// One chunk whose states are in an image, or whose parameters are.
void Shard::UpdateImage(const UnitUpdate& update, const TierItem& item,
                        const TierBuffers& buffers) const {
  const ChunkPlan& chunk = memory_->plan().chunks()[item.tag];
  const uint64_t end = chunk.begin + chunk.elements;
  UnitState state = states_[chunk.unit];
  if (item.read != kNoImage) {
    ZS_FAULT_POINT("worker.tier.apply.chunk");
    state = StateInImage(state, chunk, tiers_->shape(item.read), buffers.read);
    if (tiers_->device() != nullptr) {
      const auto number = static_cast<uint32_t>(item.tag);
      PreparedUpdate(PassOfParcel(update, state.arrays, number)).Apply(chunk.begin, end);
      CompleteParameters(update, state, number, chunk.elements);
    } else {
      UpdatePass pass = update.pass;
      UpdateArrays arrays = state.arrays;
      arrays.grad = pass.arrays.grad;
      arrays.grad_dtype = pass.arrays.grad_dtype;
      pass.arrays = arrays;
      const PreparedUpdate silent(pass);
      if (item.write == kNoImage) pass.arrays.out = memory_->parameters_at_rest(chunk.unit);
      ApplyRange(silent, PreparedUpdate(pass), chunk.unit, chunk.begin, end);
    }
    StreamFence();
  }
  if (item.write == kNoImage) return;
  std::byte* const parameters = buffers.write + tiers_->shape(item.write).offset(0);
  const DType dtype = memory_->layout().units()[chunk.unit].dtype;
  if (item.read == kNoImage && tiers_->device() != nullptr &&
      tiers_->device()->Holds(static_cast<uint32_t>(item.tag))) {
    std::memcpy(parameters, tiers_->device()->parcel(static_cast<uint32_t>(item.tag)).parameters,
                chunk.elements * SizeOf(dtype));
  } else {
    // Also those that no segment touches: each is its rounded master.
    ParametersOfMaster(state, chunk.begin, chunk.elements, parameters);
  }
}

absl::Status Shard::RestoreParameters() const {
  std::vector<uint32_t> held;
  for (uint32_t image = 0; image < tiers_->images().size(); ++image) {
    if (tiers_->Holds(image)) held.push_back(image);
  }
  ZS_RETURN_IF_ERROR(tiers_->Read(held, [&](uint32_t image, std::byte* bytes) {
    RestoreFromImage(image, bytes);
    return absl::OkStatus();
  }));
  for (uint32_t unit = 0; unit < memory_->layout().units().size(); ++unit) {
    const GrainRange all{0, memory_->layout().units()[unit].grains};
    ZS_RETURN_IF_ERROR(SettleParameters(unit, all));
    MarkPut(unit, all);
  }
  return absl::OkStatus();
}

absl::Status Shard::ReadImages(std::span<const uint32_t> images, ChunkTier::Reader reader) const {
  const absl::Status status = tiers_->Read(images, reader);
  if (!absl::IsDataLoss(status)) return status;
  ZS_RETURN_IF_ERROR(RebuildParameters(images, status));
  return tiers_->Read(images, reader);
}

absl::Status Shard::RebuildParameters(std::span<const uint32_t> images,
                                      const absl::Status& met) const {
  if (tiers_->nvme() == nullptr) return met;
  const auto intact = [&](uint32_t image) {
    return tiers_->Read({&image, 1}, [](uint32_t, std::byte*) { return absl::OkStatus(); });
  };
  for (const uint32_t image : images) {
    if (!tiers_->Holds(image)) continue;
    const absl::Status status = intact(image);
    if (status.ok()) continue;
    const auto chunks = memory_->plan().chunks();
    uint32_t chunk = 0;
    while (chunk < chunks.size() && tiers_->nvme()->plan().parameter_image_of(chunk) != image) {
      ++chunk;
    }
    // States, and parameters that have no master.
    if (!absl::IsDataLoss(status) || chunk == chunks.size()) return status;
    const absl::Status rebuilt = tiers_->nvme()->Rebuild(
        image, [&]() -> absl::Status { return ParametersFromMaster(chunk); });
    ZS_RETURN_IF_ERROR(Annotate(rebuilt, std::string(met.message())));
    LogWarn(absl::StrCat("parameters were made anew of their master chunk=", chunk, " error=\"",
                         status.message(), "\""));
  }
  return absl::OkStatus();
}

absl::Status Shard::ParametersFromMaster(uint32_t chunk) const {
  if (!tiers_->Holds(chunk)) {
    MakeParameters(states_[memory_->plan().chunks()[chunk].unit], chunk);
    return absl::OkStatus();
  }
  return tiers_->Read({&chunk, 1}, [&](uint32_t, std::byte* image) {
    MakeParameters(StateOfImage(chunk, image), chunk);
    return absl::OkStatus();
  });
}

UnitState Shard::StateOfImage(uint32_t chunk, std::byte* image) const {
  const ChunkPlan& plan = memory_->plan().chunks()[chunk];
  return StateInImage(states_[plan.unit], plan, tiers_->shape(chunk), image);
}

void Shard::MakeParameters(const UnitState& state, uint32_t chunk) const {
  const ChunkPlan& plan = memory_->plan().chunks()[chunk];
  const uint64_t bytes = SizeOf(memory_->layout().units()[plan.unit].dtype);
  ParametersOfMaster(state, plan.begin, plan.elements,
                     memory_->parameters_at_rest(plan.unit) + plan.begin * bytes);
  StreamFence();
}

void Shard::RestoreFromImage(uint32_t chunk, std::byte* image) const {
  if (tiers_->images()[chunk].parameters || ParameterImageHeld(chunk) != kNoImage) return;
  MakeParameters(StateOfImage(chunk, image), chunk);
}

std::vector<uint32_t> Shard::ParameterImages(uint32_t unit) const {
  return tiers_->ParameterImages(unit, 0, memory_->layout().units()[unit].elements());
}

absl::Status Shard::FillWindows(std::span<const uint32_t> units) const {
  std::vector<Target> targets;
  for (const uint32_t unit : units) {
    const uint64_t bytes = SizeOf(memory_->layout().units()[unit].dtype);
    const uint64_t first = memory_->plan().unit(unit).shard.first_element();
    targets.push_back({unit, memory_->unit_window(unit) + first * bytes});
  }
  return CopyShards(targets);
}

absl::Status Shard::CopyShards(std::span<const Target> targets) const {
  std::vector<uint32_t> held;
  std::vector<std::vector<const Target*>> targets_of(memory_->layout().units().size());
  // A part of a shard, [begin, begin + elements) of the unit.
  const auto copy = [&](const Target& target, const TierImage& part, const std::byte* values) {
    const uint64_t bytes = SizeOf(memory_->layout().units()[part.unit].dtype);
    const uint64_t first = memory_->plan().unit(part.unit).shard.first_element();
    CopyOut(part.unit, target.shard + (part.begin - first) * bytes, values, part.elements * bytes);
  };
  for (const Target& target : targets) {
    const uint32_t unit = target.unit;
    if (ParametersOnDevice()) {
      ZS_RETURN_IF_ERROR(
          tiers_->device()->ReadParameters(unit, memory_->plan().unit(unit).shard, target.shard));
      continue;
    }
    const std::vector<uint32_t> images = ParameterImages(unit);
    if (std::none_of(images.begin(), images.end(), [&](uint32_t i) { return tiers_->Holds(i); })) {
      CopyWhole(target);
      continue;
    }
    for (const uint32_t image : images) {
      const TierImage& part = tiers_->images()[image];
      if (tiers_->Holds(image)) {
        if (targets_of[unit].empty()) held.push_back(image);
        continue;
      }
      const uint64_t bytes = SizeOf(memory_->layout().units()[unit].dtype);
      copy(target, part, memory_->parameters_at_rest(unit) + part.begin * bytes);
    }
    targets_of[unit].push_back(&target);
  }
  return ReadImages(held, [&](uint32_t image, std::byte* bytes) {
    const TierImage& part = tiers_->images()[image];
    for (const Target* target : targets_of[part.unit]) {
      copy(*target, part, bytes + tiers_->shape(image).offset(0));
    }
    return absl::OkStatus();
  });
}

absl::Status Shard::ReadParameters(uint32_t unit, std::span<std::byte> out) const {
  std::vector<StateArray> arrays = StateArrays(unit, Extent::kShard);
  std::erase_if(arrays, [](const StateArray& array) { return array.kind != kKindParameter; });
  std::vector<std::vector<std::byte>> outs(arrays.size());
  for (const StateArray& array : arrays) {
    ZS_RETURN_IF_ERROR(ReadArrays(unit, arrays, array.grains, outs));
    std::copy(outs[0].begin(), outs[0].end(), out.begin());
  }
  return absl::OkStatus();
}

bool Shard::OnTier(uint32_t unit) const {
  if (tiers_->device() != nullptr) return true;
  const std::vector<uint32_t> images = ImagesOf(unit, {0, memory_->layout().units()[unit].grains});
  return std::any_of(images.begin(), images.end(),
                     [&](uint32_t image) { return tiers_->Holds(image); });
}

std::vector<uint32_t> Shard::ImagesOf(uint32_t unit, GrainRange run) const {
  const uint64_t end = run.end * kGrainElements;
  std::vector<uint32_t> images = tiers_->StateImages(unit, run.first_element(), end);
  const std::vector<uint32_t> parameters = tiers_->ParameterImages(unit, run.first_element(), end);
  images.insert(images.end(), parameters.begin(), parameters.end());
  return images;
}

std::vector<GrainRange> Shard::Runs(uint32_t unit, GrainRange grains) const {
  std::vector<GrainRange> runs;
  if (tiers_->empty()) {
    runs.push_back(grains);
    return runs;
  }
  const UnitPlan& plan = memory_->plan().unit(unit);
  const GrainRange held = plan.has_optimizer ? plan.slice : plan.shard;
  const uint64_t run_grains =
      RunChunks(memory_->config()) * memory_->plan().chunk_elements() / kGrainElements;
  for (uint64_t begin = grains.begin; begin < grains.end;) {
    uint64_t end = grains.end;
    if (begin < held.begin) {
      end = std::min(end, held.begin);
    } else if (begin < held.end) {
      const uint64_t done = (begin - held.begin) / run_grains;
      end = std::min({end, held.end, held.begin + (done + 1) * run_grains});
    }
    runs.push_back({begin, end});
    begin = end;
  }
  return runs;
}

absl::Status Shard::OpenRun(uint32_t unit, GrainRange run, OldContents old) const {
  const std::vector<uint32_t> images = ImagesOf(unit, run);
  if (old == OldContents::kDropped) return tiers_->Discard(images);
  ZS_RETURN_IF_ERROR(OpenParameters(unit, run));
  const absl::Status status = tiers_->Promote(images);
  if (!absl::IsDataLoss(status)) return status;
  ZS_RETURN_IF_ERROR(RebuildParameters(images, status));
  return tiers_->Promote(images);
}

absl::Status Shard::SettleRun(uint32_t unit, GrainRange run) const {
  ZS_RETURN_IF_ERROR(SettleParameters(unit, run));
  MarkPut(unit, run);
  std::vector<uint32_t> images = ImagesOf(unit, run);
  std::erase_if(images,
                [&](uint32_t image) { return !IsPut(unit, GrainsOf(tiers_->images()[image])); });
  return tiers_->Settle(images);
}

absl::Status Shard::ReadArrays(uint32_t unit, std::span<const StateArray> arrays, GrainRange grains,
                               std::span<std::vector<std::byte>> outs) const {
  // The parts of the arrays in `state` that are in `part`: of parameters, or of all others.
  const auto read = [&](const UnitState& state, std::span<const StateArray> sources,
                        bool parameters, GrainRange part) {
    for (size_t i = 0; i < arrays.size(); ++i) {
      if ((arrays[i].kind == kKindParameter) != parameters) continue;
      const GrainRange wanted = Intersect(Intersect(arrays[i].grains, grains), part);
      const auto source =
          std::find_if(sources.begin(), sources.end(),
                       [&](const StateArray& array) { return array.kind == arrays[i].kind; });
      if (wanted.size() == 0 || source == sources.end()) continue;
      ReadStateArray(memory_->layout(), unit, state, *source, wanted,
                     PartOf(outs[i], arrays[i], grains, wanted));
    }
  };
  for (size_t i = 0; i < arrays.size(); ++i) {
    outs[i].resize(Intersect(arrays[i].grains, grains).size() * arrays[i].type.grain_bytes());
  }
  if (!OnTier(unit)) {
    read(states_[unit], arrays, false, grains);
    read(states_[unit], arrays, true, grains);
    return absl::OkStatus();
  }
  std::vector<uint32_t> held;
  const uint64_t end = grains.end * kGrainElements;
  for (const uint32_t image : ImagesOf(unit, grains)) {
    const TierImage& described = tiers_->images()[image];
    if (tiers_->Holds(image)) {
      held.push_back(image);
    } else {
      read(states_[unit], arrays, described.parameters, GrainsOf(described));
    }
  }
  if (ParametersOnDevice()) {
    ZS_RETURN_IF_ERROR(ReadDeviceParameters(unit, arrays, grains, outs));
  } else if (tiers_->ParameterImages(unit, grains.first_element(), end).empty()) {
    read(states_[unit], arrays, true, grains);
  }
  const auto& slots = memory_->config().state_slots();
  const std::vector<std::string> names(slots.begin(), slots.end());
  return ReadImages(held, [&](uint32_t number, std::byte* bytes) {
    const TierImage& image = tiers_->images()[number];
    const ChunkShape& shape = tiers_->shape(number);
    std::vector<StateArray> sources;
    UnitState state = states_[unit];
    if (image.parameters) {
      sources.push_back({std::string(kKindParameter),
                         memory_->layout().units()[unit].dtype,
                         GrainsOf(image),
                         {bytes + shape.offset(0), shape.arrays()[0].bytes}});
    } else {
      state = StateInImage(state, memory_->plan().chunks()[number], shape, bytes);
      AppendStateArrays(state, names, /*master=*/true, GrainsOf(image), sources);
    }
    read(state, sources, image.parameters, GrainsOf(image));
    return absl::OkStatus();
  });
}

}  // namespace zeroshard
