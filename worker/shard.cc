#include "worker/shard.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status.h"
#include "device/cpu/stream_copy.h"
#include "storage/layout_proto.h"
#include "storage/shard_format.h"
#include "worker/optim/kernels.h"
#include "worker/optim/random_key.h"
#include "worker/step_input.h"
#include "worker/unit_update.h"

namespace zeroshard {
namespace {

constexpr uint32_t kApplyOp = 1;
// A unit of this many bytes leaves the caches anyway; each worker copies only a part of it.
constexpr uint64_t kStreamedUnitBytes = uint64_t{64} << 20;
// Micro-step number of the apply pass's tag: above every real one.
constexpr uint32_t kApplyMicroStep = kMaxMicroSteps;

}  // namespace

absl::StatusOr<Shard> Shard::Open(JobMemory& memory, ThreadPool& pool, TierSet& tiers) {
  ZS_ASSIGN_OR_RETURN(const DType dtype, DTypeFromProto(memory.config().accumulator_dtype()));
  ZS_ASSIGN_OR_RETURN(
      AccumulatorSpace accumulators,
      AccumulatorSpace::Open(memory.layout(), memory.plan(), memory.partition(), dtype));
  Shard shard(memory, pool, tiers, accumulators);
  if (memory.config().optimizer() != model::v1::OPTIMIZER_NONE) {
    ZS_ASSIGN_OR_RETURN(shard.kind_, OptimizerKindOf(memory.config()));
  }
  for (uint32_t unit = 0; unit < memory.layout().units().size(); ++unit) {
    const bool has_optimizer = memory.plan().unit(unit).has_optimizer;
    shard.states_.push_back(has_optimizer ? MakeUnitState(memory, unit) : UnitState());
  }
  return shard;
}

UndoChunk Shard::ApplyUndo(uint32_t chunk) const {
  const ChunkPlan& chunk_plan = memory_->plan().chunks()[chunk];
  return UndoOfUpdate(states_[chunk_plan.unit], chunk_plan);
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

absl::StatusOr<bool> Shard::Put(uint32_t unit, uint64_t offset, uint64_t elements,
                                const std::byte* values) const {
  const uint64_t element_bytes = SizeOf(memory_->layout().units()[unit].dtype);
  const uint64_t end = offset + elements;
  const GrainRange touched{offset / kGrainElements, (end + kGrainElements - 1) / kGrainElements};
  for (const GrainRange& run : Runs(unit, touched)) {
    const uint64_t first = std::max(offset, run.first_element());
    const uint64_t last = std::min(end, run.end * kGrainElements);
    ZS_RETURN_IF_ERROR(OpenRun(unit, run, OldContents::kKept));
    PutOnHost(unit, first, last - first, values + (first - offset) * element_bytes);
    ZS_RETURN_IF_ERROR(SettleRun(unit, run));
  }
  return IsPut(unit);
}

void Shard::PutOnHost(uint32_t unit, uint64_t offset, uint64_t elements,
                      const std::byte* values) const {
  const UnitPlan& plan = memory_->plan().unit(unit);
  const uint64_t element_bytes = SizeOf(memory_->layout().units()[unit].dtype);
  auto clip = [&](GrainRange grains) {
    return ElementRange{std::max(offset, grains.first_element()),
                        std::min(offset + elements, grains.end * kGrainElements)};
  };
  // The master first: it is compared with the parameter as it was.
  const ElementRange mastered = clip(plan.slice);
  if (plan.has_optimizer && mastered.begin < mastered.end) {
    PutMaster(states_[unit], memory_->layout().units()[unit].dtype, mastered.begin, mastered.end,
              values + (mastered.begin - offset) * element_bytes);
  }
  const bool whole = plan.resident && !memory_->one_island();
  const ElementRange copied = whole ? ElementRange{offset, offset + elements} : clip(plan.shard);
  if (copied.begin < copied.end) {
    std::memcpy(memory_->parameters_at_rest(unit) + copied.begin * element_bytes,
                values + (copied.begin - offset) * element_bytes,
                (copied.end - copied.begin) * element_bytes);
  }
  ClearPadding(unit, mastered, copied);
}

// Zeros in the padding of what was put: updates run over it (worker/padding.h).
void Shard::ClearPadding(uint32_t unit, const ElementRange& mastered,
                         const ElementRange& copied) const {
  const Padding& padding = accumulators_.padding();
  auto clear = [&](void* element0, DType dtype, const ElementRange& range) {
    if (element0 == nullptr || range.begin >= range.end) return;
    padding.Clear(unit, static_cast<std::byte*>(element0), dtype, range.begin, range.end);
  };
  const UpdateArrays& arrays = states_[unit].arrays;
  clear(arrays.param, DType::kFloat32, mastered);
  if (arrays.master == MasterKind::kStochastic) clear(arrays.high, DType::kBfloat16, mastered);
  clear(arrays.low, DType::kBfloat16, mastered);
  clear(memory_->parameters_at_rest(unit), memory_->layout().units()[unit].dtype, copied);
}

void Shard::MarkPut(uint32_t unit, GrainRange grains) const {
  auto* bitmap =
      reinterpret_cast<uint64_t*>(memory_->partition() + memory_->plan().put_bitmap_offset());
  const uint64_t first = memory_->plan().unit(unit).put_bit;
  for (uint64_t grain = grains.begin; grain < grains.end; ++grain) {
    bitmap[(first + grain) / 64] |= uint64_t{1} << ((first + grain) % 64);
  }
}

bool Shard::IsPut(uint32_t unit, GrainRange grains) const {
  const auto* bitmap =
      reinterpret_cast<const uint64_t*>(memory_->partition() + memory_->plan().put_bitmap_offset());
  const uint64_t first = memory_->plan().unit(unit).put_bit;
  for (uint64_t bit = first + grains.begin; bit < first + grains.end; ++bit) {
    if ((bitmap[bit / 64] >> (bit % 64) & 1) == 0) return false;
  }
  return true;
}

bool Shard::IsPut(uint32_t unit) const {
  return IsPut(unit, {0, memory_->layout().units()[unit].grains});
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

// Whether an update with gradient 0 of states that are 0 leaves them 0, so that it may run over the
// padding between parameters (worker/padding.h). Blocks of 8-bit states end with their parameters.
bool MayCrossPadding(OptimizerKind kind, const UnitState& state, const ApplyJob& job) {
  const bool divides = (GetOptimizerInfo(kind).parameters & kUsesEps) != 0;
  return state.arrays.state_format != StateFormat::kInt8 &&
         (!divides || std::all_of(job.args.begin(), job.args.end(),
                                  [](const UpdateArgs& args) { return args.eps > 0.0f; }));
}

std::vector<UpdateSegment> SegmentsOf(const Layout& layout, uint32_t unit, OptimizerKind kind,
                                      const UnitState& state, const ApplyJob& job) {
  std::vector<UpdateSegment> segments;
  const std::vector<uint32_t>& parameters = layout.units()[unit].parameters;
  const uint32_t of_all = job.args_of_unit[unit];
  if (of_all != kByParameter && MayCrossPadding(kind, state, job)) {
    return {{.begin = 0, .end = layout.units()[unit].elements(), .args = of_all}};
  }
  for (uint32_t position = 0; position < parameters.size(); ++position) {
    const uint32_t args = of_all != kByParameter ? of_all : job.args_of[parameters[position]];
    const ParameterPlace& place = layout.place(parameters[position]);
    if (args == kNotUpdated || place.elements == 0) continue;
    const uint64_t shift = state.blocks->shift.empty() ? 0 : state.blocks->shift[position];
    segments.push_back(
        {place.offset, place.offset + place.elements, args, static_cast<uint32_t>(shift)});
  }
  return segments;
}

// Whether the optimizer updates an array of its own, and the parameter is made of it.
bool HasMasterBeside(const UnitPlan& plan) {
  return plan.master != kAbsent && plan.master_form != MasterForm::kSplit;
}

bool Touches(const std::vector<UpdateSegment>& segments, const ChunkPlan& chunk) {
  const uint64_t end = chunk.begin + chunk.elements;
  auto after = std::partition_point(segments.begin(), segments.end(),
                                    [&](const UpdateSegment& s) { return s.end <= chunk.begin; });
  return after != segments.end() && after->begin < end;
}

}  // namespace

std::vector<UnitUpdate> Shard::PrepareUpdates(const ApplyJob& job) const {
  const Layout& layout = memory_->layout();
  const PartitionPlan& plan = memory_->plan();
  std::vector<UnitUpdate> updates(layout.units().size());
  for (uint32_t u = 0; u < updates.size(); ++u) {
    if (!plan.unit(u).has_optimizer) continue;
    UnitUpdate& update = updates[u];
    update.segments = SegmentsOf(layout, u, kind_, states_[u], job);
    UpdatePass& pass = update.pass;
    pass.arrays = states_[u].arrays;
    pass.arrays.grad = accumulators_.data(u);
    pass.arrays.grad_dtype = accumulators_.dtype();
    pass.random_key = RandomKey(memory_->config().rounding_seed(), job.step, u);
    pass.kind = kind_;
    pass.segments = update.segments;
    pass.args = absl::MakeConstSpan(job.args.data(), job.args.size());
    pass.grad_scale = job.grad_scale;
    pass.stream_output = plan.totals().master >= kStreamedUnitBytes;
    update.silent.emplace(pass);
    // Elsewhere the parameter is the master, or a part of it.
    if (HasMasterBeside(plan.unit(u))) pass.arrays.out = memory_->parameters_at_rest(u);
    update.writing.emplace(pass);
  }
  return updates;
}

Shard::TouchedChunks Shard::FindTouched(std::span<const UnitUpdate> updates) const {
  const PartitionPlan& plan = memory_->plan();
  TouchedChunks touched;
  touched.silent.resize(plan.chunks().size());
  for (uint32_t chunk = 0; chunk < plan.chunks().size(); ++chunk) {
    if (!Touches(updates[plan.chunks()[chunk].unit].segments, plan.chunks()[chunk])) continue;
    const ChunkTier* const holder = tiers_->HolderOf(chunk);
    touched.silent[chunk] = ParameterImageHeld(chunk) != kNoImage;
    if (holder == nullptr) touched.on_host.push_back(chunk);
    if (holder != nullptr && holder == tiers_->device()) {
      touched.on_device.push_back(chunk);
    } else if (holder != nullptr || touched.silent[chunk]) {
      touched.on_nvme.push_back(chunk);
    }
  }
  return touched;
}

absl::Status Shard::Apply(const ApplyJob& job) const {
  const std::vector<UnitUpdate> updates = PrepareUpdates(job);
  const TouchedChunks touched = FindTouched(updates);
  if (tiers_->device() != nullptr) return ApplyWithDevice(job, updates, touched);
  ApplyOnHost(job, updates, touched.on_host, touched.silent);
  if (touched.on_nvme.empty()) return absl::OkStatus();
  return ApplyOnTier(job, updates, touched.on_nvme);
}

ProtectedPass Shard::ProtectedApply(const ApplyJob& job) const {
  return {accumulators_.undo(),
          {.tag = MakeTag(job.attempt, kApplyMicroStep) << 1 | 1, .op = kApplyOp}};
}

void Shard::RunApply(const ApplyJob& job, std::span<const uint32_t> chunks,
                     absl::FunctionRef<void(uint32_t, uint64_t, uint64_t)> update) const {
  RunProtected(
      ProtectedApply(job), absl::MakeConstSpan(chunks.data(), chunks.size()),
      [&](size_t items, auto fn) { pool_->ParallelFor(items, fn); },
      [&](uint32_t chunk) { return ApplyUndo(chunk); },
      [&](uint32_t chunk, uint64_t begin, uint64_t end) {
        ZS_FAULT_POINT("worker.apply.group");
        const uint64_t first = memory_->plan().chunks()[chunk].begin;
        update(chunk, first + begin, first + end);
      });
}

void Shard::ApplyOnHost(const ApplyJob& job, std::span<const UnitUpdate> updates,
                        std::span<const uint32_t> chunks, const std::vector<bool>& silent) const {
  RunApply(job, chunks, [&](uint32_t chunk, uint64_t begin, uint64_t end) {
    const uint32_t unit = memory_->plan().chunks()[chunk].unit;
    const UnitUpdate& update = updates[unit];
    ApplyRange(*update.silent, silent[chunk] ? *update.silent : *update.writing, unit, begin, end);
  });
}

void Shard::ApplyRange(const PreparedUpdate& silent, const PreparedUpdate& writing, uint32_t unit,
                       uint64_t begin, uint64_t end) const {
  const UnitPlan& plan = memory_->plan().unit(unit);
  if (!HasMasterBeside(plan)) {
    writing.Apply(begin, end);
    return;
  }
  // At stage 0 a worker updates whole units but writes only its shard of the parameters.
  const uint64_t first = std::clamp(plan.shard.first_element(), begin, end);
  const uint64_t last = std::clamp(plan.shard.end * kGrainElements, first, end);
  if (begin < first) silent.Apply(begin, first);
  if (first < last) writing.Apply(first, last);
  if (last < end) silent.Apply(last, end);
}

void Shard::CopyOut(uint32_t unit, std::byte* target, const std::byte* values,
                    uint64_t bytes) const {
  if (memory_->layout().units()[unit].bytes() >= kStreamedUnitBytes) {
    StreamCopy(target, values, bytes);
  } else {
    std::memcpy(target, values, bytes);
  }
}

void Shard::CopyWhole(const Target& target) const {
  const GrainRange shard = memory_->plan().unit(target.unit).shard;
  const uint64_t grain_bytes =
      kGrainElements * SizeOf(memory_->layout().units()[target.unit].dtype);
  const std::byte* source = memory_->parameters_at_rest(target.unit) + shard.begin * grain_bytes;
  pool_->ParallelFor(pool_->lanes(), [&](size_t item, int) {
    const ItemRange grains = ItemsOfLane(shard.size(), static_cast<int>(item), pool_->lanes());
    CopyOut(target.unit, target.shard + grains.begin * grain_bytes,
            source + grains.begin * grain_bytes, (grains.end - grains.begin) * grain_bytes);
  });
}

std::vector<StateArray> Shard::StateArrays(uint32_t unit, Extent extent) const {
  const UnitPlan& plan = memory_->plan().unit(unit);
  const DType dtype = memory_->layout().units()[unit].dtype;
  std::vector<StateArray> arrays;
  // An island's own window holds resident units whole.
  const bool whole = extent == Extent::kSlice && plan.resident && !memory_->one_island();
  const GrainRange held =
      whole ? GrainRange{0, memory_->layout().units()[unit].grains} : plan.shard;
  if (held.size() > 0) {
    const RecordType type = dtype;
    arrays.push_back({std::string(kKindParameter),
                      type,
                      held,
                      {memory_->parameters_at_rest(unit) + held.begin * type.grain_bytes(),
                       held.size() * type.grain_bytes()}});
  }
  if (!plan.has_optimizer) return arrays;
  // The replica that stage 0 keeps of an fp32 parameter is not written a second time.
  const bool master =
      plan.master != kAbsent && (extent == Extent::kSlice || dtype != DType::kFloat32);
  const auto& slots = memory_->config().state_slots();
  const std::vector<std::string> names(slots.begin(), slots.end());
  AppendStateArrays(states_[unit], names, master,
                    extent == Extent::kShard ? plan.shard : plan.slice, arrays);
  return arrays;
}

void Shard::MasterOfParameters(uint32_t unit, GrainRange run) const {
  const UnitPlan& plan = memory_->plan().unit(unit);
  if (plan.master == kAbsent || plan.master_form != MasterForm::kNone) return;
  const uint64_t begin = std::max(run.begin, plan.slice.begin) * kGrainElements;
  const uint64_t end = std::min(run.end, plan.slice.end) * kGrainElements;
  if (begin >= end) return;
  PutMaster(states_[unit], DType::kBfloat16, begin, end,
            memory_->parameters_at_rest(unit) + begin * sizeof(uint16_t));
}

void Shard::WriteArray(uint32_t unit, const StateArray& array, GrainRange grains,
                       std::span<const std::byte> in) const {
  WriteStateArray(memory_->layout(), unit, states_[unit], array, grains, in);
}

}  // namespace zeroshard
