#include "worker/shard.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status.h"
#include "device/cpu/stream_copy.h"
#include "storage/layout_proto.h"
#include "worker/optim/kernels.h"

namespace zeroshard {
namespace {

constexpr uint32_t kApplyOp = 1;
// A unit of this many bytes leaves the caches anyway; each worker copies only a part of it.
constexpr uint64_t kStreamedUnitBytes = uint64_t{64} << 20;
// Micro-step number of the apply pass's tag: above every real one.
constexpr uint32_t kApplyMicroStep = kMaxMicroSteps;

OptimizerKind KindOf(const model::v1::EngineConfig& config) {
  switch (config.optimizer()) {
    case model::v1::OPTIMIZER_ADAM:
      return OptimizerKind::kAdam;
    case model::v1::OPTIMIZER_SGD:
      return config.state_slots_size() > 0 ? OptimizerKind::kSgdMomentum : OptimizerKind::kSgd;
    default:
      return OptimizerKind::kAdamW;
  }
}

}  // namespace

absl::StatusOr<Shard> Shard::Open(JobMemory& memory, ThreadPool& pool) {
  ZS_ASSIGN_OR_RETURN(const DType dtype, DTypeFromProto(memory.config().accumulator_dtype()));
  ZS_ASSIGN_OR_RETURN(
      AccumulatorSpace accumulators,
      AccumulatorSpace::Open(memory.layout(), memory.plan(), memory.partition(), dtype));
  return Shard(memory, pool, accumulators);
}

float* Shard::master(uint32_t unit) const {
  const UnitPlan& plan = memory_->plan().unit(unit);
  if (plan.master == kAbsent) return reinterpret_cast<float*>(memory_->parameters_at_rest(unit));
  return reinterpret_cast<float*>(memory_->partition() + plan.master) - plan.slice.first_element();
}

float* Shard::state(uint32_t unit, uint32_t slot) const {
  const UnitPlan& plan = memory_->plan().unit(unit);
  return reinterpret_cast<float*>(memory_->partition() + plan.state[slot]) -
         plan.slice.first_element();
}

UndoChunk Shard::ApplyUndo(uint32_t chunk) const {
  const ChunkPlan& chunk_plan = memory_->plan().chunks()[chunk];
  UndoChunk undo;
  undo.elements = chunk_plan.elements;
  auto add = [&](float* array) {
    undo.arrays[undo.array_count++] = {reinterpret_cast<std::byte*>(array + chunk_plan.begin),
                                       sizeof(float)};
  };
  add(master(chunk_plan.unit));
  for (uint32_t slot = 0; slot < memory_->plan().state_slots(); ++slot) {
    add(state(chunk_plan.unit, slot));
  }
  return undo;
}

absl::Status Shard::Recover() const {
  return accumulators_.undo()
      .Recover([&](const UndoKey& key, uint32_t chunk) -> absl::StatusOr<UndoChunk> {
        if (chunk >= memory_->plan().chunks().size()) {
          return absl::DataLossError(
              absl::StrCat("undo record of chunk ", chunk, ", which is none"));
        }
        if (key.op == kAccumulateOp) return accumulators_.UndoOf(chunk);
        if (key.op == kApplyOp) return ApplyUndo(chunk);
        return absl::DataLossError(absl::StrCat("undo record of operation ", key.op));
      })
      .status();
}

bool Shard::Put(uint32_t unit, uint64_t offset, uint64_t elements, const std::byte* values) const {
  const UnitPlan& plan = memory_->plan().unit(unit);
  const uint64_t element_bytes = SizeOf(memory_->layout().units()[unit].dtype);
  auto clip = [&](GrainRange grains) {
    return ElementRange{std::max(offset, grains.first_element()),
                        std::min(offset + elements, grains.end * kGrainElements)};
  };
  const bool whole = plan.resident && !memory_->one_island();
  const ElementRange copied = whole ? ElementRange{offset, offset + elements} : clip(plan.shard);
  if (copied.begin < copied.end) {
    std::memcpy(memory_->parameters_at_rest(unit) + copied.begin * element_bytes,
                values + (copied.begin - offset) * element_bytes,
                (copied.end - copied.begin) * element_bytes);
  }
  const ElementRange mastered = clip(plan.slice);
  if (plan.master != kAbsent && mastered.begin < mastered.end) {
    CopyToMaster(unit, mastered.begin, mastered.end,
                 values + (mastered.begin - offset) * element_bytes);
  }
  return MarkPut(unit, offset, offset + elements);
}

void Shard::CopyToMaster(uint32_t unit, uint64_t begin, uint64_t end,
                         const std::byte* values) const {
  const DType dtype = memory_->layout().units()[unit].dtype;
  if (dtype == DType::kFloat32) {
    ConvertElements(values, dtype, master(unit) + begin, DType::kFloat32, end - begin);
    return;
  }
  // A 16-bit value that is already the rounded master leaves the master as it is: whoever changes
  // one parameter puts its neighbours in the grain, too.
  for (uint64_t at = begin; at < end; at += kGrainElements) {
    const uint64_t count = std::min(kGrainElements, end - at);
    const std::byte* given = values + (at - begin) * SizeOf(dtype);
    std::array<uint16_t, kGrainElements> rounded, wanted;
    std::array<float, kGrainElements> widened;
    std::memcpy(wanted.data(), given, count * SizeOf(dtype));
    ConvertElements(master(unit) + at, DType::kFloat32, rounded.data(), dtype, count);
    ConvertElements(wanted.data(), dtype, widened.data(), DType::kFloat32, count);
    for (uint64_t i = 0; i < count; ++i) {
      if (rounded[i] != wanted[i]) master(unit)[at + i] = widened[i];
    }
  }
}

bool Shard::MarkPut(uint32_t unit, uint64_t begin, uint64_t end) const {
  auto* bitmap =
      reinterpret_cast<uint64_t*>(memory_->partition() + memory_->plan().put_bitmap_offset());
  const uint64_t first = memory_->plan().unit(unit).put_bit;
  for (uint64_t grain = begin / kGrainElements; grain * kGrainElements < end; ++grain) {
    bitmap[(first + grain) / 64] |= uint64_t{1} << ((first + grain) % 64);
  }
  for (uint64_t bit = first; bit < first + memory_->layout().units()[unit].grains; ++bit) {
    if ((bitmap[bit / 64] >> (bit % 64) & 1) == 0) return false;
  }
  return true;
}

void Shard::MarkLoaded(uint32_t unit) const {
  MarkPut(unit, 0, memory_->layout().units()[unit].elements());
}

void Shard::AddSquares(uint32_t unit, const Presence& present, ExactSum& sum) const {
  const GrainRange shard = memory_->plan().unit(unit).shard;
  const uint64_t first = shard.first_element();
  std::vector<ElementRange> included =
      PresentRanges(memory_->layout(), unit, present, first, shard.end * kGrainElements);
  if (included.empty()) return;
  for (ElementRange& range : included) range = {range.begin - first, range.end - first};
  const DType dtype = accumulators_.dtype();
  const NormInput input{accumulators_.data(unit) + first * SizeOf(dtype), dtype, shard.elements()};
  std::vector<ExactSum> sums(pool_->lanes());
  pool_->ParallelFor(sums.size(), [&](size_t item, int) {
    const ItemRange grains = ItemsOfLane(shard.size(), static_cast<int>(item), pool_->lanes());
    zeroshard::AddSquares(input, included, grains.begin, grains.end, sums[item]);
  });
  for (const ExactSum& part : sums) sum.Merge(part);
}

namespace {

// One unit's part of an update, made before the first chunk.
struct UnitUpdate {
  std::vector<UpdateSegment> segments;
  UpdatePass pass;
};

std::vector<UpdateSegment> SegmentsOf(const Layout& layout, uint32_t unit, const ApplyJob& job) {
  std::vector<UpdateSegment> segments;
  for (uint32_t parameter : layout.units()[unit].parameters) {
    const ParameterPlace& place = layout.place(parameter);
    if (job.args_of[parameter] == kNotUpdated || place.elements == 0) continue;
    segments.push_back({place.offset, place.offset + place.elements, job.args_of[parameter]});
  }
  return segments;
}

bool Touches(const std::vector<UpdateSegment>& segments, const ChunkPlan& chunk) {
  const uint64_t end = chunk.begin + chunk.elements;
  auto after = std::partition_point(segments.begin(), segments.end(),
                                    [&](const UpdateSegment& s) { return s.end <= chunk.begin; });
  return after != segments.end() && after->begin < end;
}

}  // namespace

void Shard::Apply(const ApplyJob& job) const {
  const Layout& layout = memory_->layout();
  const PartitionPlan& plan = memory_->plan();
  std::vector<UnitUpdate> updates(layout.units().size());
  for (uint32_t u = 0; u < updates.size(); ++u) {
    if (!plan.unit(u).has_optimizer) continue;
    UnitUpdate& update = updates[u];
    update.segments = SegmentsOf(layout, u, job);
    UpdateArrays& arrays = update.pass.arrays;
    arrays.grad = accumulators_.data(u);
    arrays.grad_dtype = accumulators_.dtype();
    arrays.param = master(u);
    for (uint32_t slot = 0; slot < plan.state_slots(); ++slot) arrays.state[slot] = state(u, slot);
    arrays.out_dtype = layout.units()[u].dtype;
    update.pass.kind = KindOf(memory_->config());
    update.pass.segments = update.segments;
    update.pass.args = absl::MakeConstSpan(job.args.data(), job.args.size());
    update.pass.grad_scale = job.grad_scale;
  }
  std::vector<uint32_t> chunks;
  for (uint32_t chunk = 0; chunk < plan.chunks().size(); ++chunk) {
    if (Touches(updates[plan.chunks()[chunk].unit].segments, plan.chunks()[chunk])) {
      chunks.push_back(chunk);
    }
  }
  const ProtectedPass pass{accumulators_.undo(),
                           {.tag = MakeTag(job.attempt, kApplyMicroStep) << 1 | 1, .op = kApplyOp}};
  RunProtected(
      pass, chunks, [&](size_t items, auto fn) { pool_->ParallelFor(items, fn); },
      [&](uint32_t chunk) { return ApplyUndo(chunk); },
      [&](uint32_t chunk, uint64_t begin, uint64_t end) {
        ZS_FAULT_POINT("worker.apply.group");
        const ChunkPlan& chunk_plan = plan.chunks()[chunk];
        ApplyRange(updates[chunk_plan.unit].pass, chunk_plan.unit, chunk_plan.begin + begin,
                   chunk_plan.begin + end);
      });
}

void Shard::ApplyRange(const UpdatePass& pass, uint32_t unit, uint64_t begin, uint64_t end) const {
  const UnitPlan& plan = memory_->plan().unit(unit);
  if (plan.master == kAbsent) {
    ApplyUpdate(pass, begin, end);
    return;
  }
  // At stage 0 a worker updates whole units but writes only its shard of the parameters.
  const uint64_t first = std::clamp(plan.shard.first_element(), begin, end);
  const uint64_t last = std::clamp(plan.shard.end * kGrainElements, first, end);
  UpdatePass writing = pass;
  writing.arrays.out = memory_->parameters_at_rest(unit);
  if (begin < first) ApplyUpdate(pass, begin, first);
  if (first < last) ApplyUpdate(writing, first, last);
  if (last < end) ApplyUpdate(pass, last, end);
}

void Shard::FillWindow(uint32_t unit) const {
  const GrainRange shard = memory_->plan().unit(unit).shard;
  const uint64_t element_bytes = SizeOf(memory_->layout().units()[unit].dtype);
  const std::byte* source = memory_->parameters_at_rest(unit);
  std::byte* target = memory_->unit_window(unit);
  const bool streamed = memory_->layout().units()[unit].bytes() >= kStreamedUnitBytes;
  pool_->ParallelFor(pool_->lanes(), [&](size_t item, int) {
    const ItemRange grains = ItemsOfLane(shard.size(), static_cast<int>(item), pool_->lanes());
    const uint64_t begin = (shard.begin + grains.begin) * kGrainElements * element_bytes;
    const uint64_t bytes = (grains.end - grains.begin) * kGrainElements * element_bytes;
    if (streamed) {
      StreamCopy(target + begin, source + begin, bytes);
    } else {
      std::memcpy(target + begin, source + begin, bytes);
    }
  });
}

std::vector<Shard::StateArray> Shard::StateArrays(uint32_t unit, Extent extent) const {
  const UnitPlan& plan = memory_->plan().unit(unit);
  const DType dtype = memory_->layout().units()[unit].dtype;
  std::vector<StateArray> arrays;
  auto add = [&](std::string kind, DType type, GrainRange grains, std::byte* element0) {
    if (grains.size() == 0) return;
    std::byte* data = element0 + grains.first_element() * SizeOf(type);
    arrays.push_back({std::move(kind), type, grains, {data, grains.elements() * SizeOf(type)}});
  };
  // An island's own window holds resident units whole.
  const bool whole = extent == Extent::kSlice && plan.resident && !memory_->one_island();
  add("parameter", dtype,
      whole ? GrainRange{0, memory_->layout().units()[unit].grains} : plan.shard,
      memory_->parameters_at_rest(unit));
  if (!plan.has_optimizer) return arrays;
  const GrainRange grains = extent == Extent::kShard ? plan.shard : plan.slice;
  // The replica that stage 0 keeps of an fp32 parameter is not written a second time.
  if (plan.master != kAbsent && (extent == Extent::kSlice || dtype != DType::kFloat32)) {
    add("master", DType::kFloat32, grains, reinterpret_cast<std::byte*>(master(unit)));
  }
  for (uint32_t slot = 0; slot < memory_->plan().state_slots(); ++slot) {
    add(memory_->config().state_slots(static_cast<int>(slot)), DType::kFloat32, grains,
        reinterpret_cast<std::byte*>(state(unit, slot)));
  }
  return arrays;
}

}  // namespace zeroshard
