#include <algorithm>
#include <utility>

#include "base/fault_point.h"
#include "worker/shard.h"

namespace zeroshard {
namespace {

// Inputs that have a gradient for the parameter at `position`.
std::vector<bool> PresentInputs(std::span<const GradientInput> inputs, uint32_t position) {
  std::vector<bool> present(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    present[i] = inputs[i].data != nullptr && IsPresent(inputs[i].present, position);
  }
  return present;
}

ReductionProgram MakeProgram(const ReductionPlan& plan, const std::vector<bool>& present) {
  const auto flags = std::make_unique<bool[]>(present.size());
  std::copy(present.begin(), present.end(), flags.get());
  return plan.Program(absl::MakeConstSpan(flags.get(), present.size()));
}

// A stretch of a unit whose elements have the same inputs and the same mode.
struct Run {
  uint64_t begin = 0;
  uint64_t end = 0;
  std::vector<bool> inputs;
  AccumulateMode mode = AccumulateMode::kStore;
  ReductionProgram program;
};

// The stretches that get anything, in increasing order.
std::vector<Run> PlanRuns(const Layout& layout, const AccumulateJob& job) {
  const Unit& unit = layout.units()[job.unit];
  std::vector<Run> runs;
  for (uint32_t position = 0; position < unit.parameters.size(); ++position) {
    const ParameterPlace& place = layout.place(unit.parameters[position]);
    // The padding after a parameter goes with it: what it holds is never read.
    const bool last = position + 1 == unit.parameters.size();
    const uint64_t end =
        last ? unit.elements() : layout.place(unit.parameters[position + 1]).offset;
    if (end == place.offset) continue;
    std::vector<bool> present = PresentInputs(job.inputs, position);
    const AccumulateMode mode =
        IsPresent(job.before, position) ? AccumulateMode::kAdd : AccumulateMode::kStore;
    if (!runs.empty() && runs.back().mode == mode && runs.back().inputs == present) {
      runs.back().end = end;
      continue;
    }
    runs.push_back({place.offset, end, std::move(present), mode, {}});
  }
  for (Run& run : runs) run.program = MakeProgram(*job.plan, run.inputs);
  std::erase_if(runs, [](const Run& run) { return run.program.steps.empty(); });
  return runs;
}

std::vector<ReduceSource> ToSources(std::span<const GradientInput> inputs) {
  std::vector<ReduceSource> sources;
  for (const GradientInput& input : inputs) {
    sources.push_back({input.data, input.dtype, input.weight != 1.0f, input.weight});
  }
  return sources;
}

// Sums the elements [begin, end) of the unit that lie in a run.
void ReduceRange(std::span<const Run> runs, absl::Span<const ReduceSource> sources, void* element0,
                 DType dtype, uint64_t begin, uint64_t end) {
  auto run = std::partition_point(runs.begin(), runs.end(),
                                  [&](const Run& candidate) { return candidate.end <= begin; });
  for (; run != runs.end() && run->begin < end; ++run) {
    Reduce(run->program, sources, {element0, dtype, run->mode}, std::max(begin, run->begin),
           std::min(end, run->end));
  }
}

}  // namespace

void SumInputs(const Layout& layout, const AccumulateJob& job, GrainRange grains, float* element0) {
  const std::vector<Run> runs = PlanRuns(layout, job);
  const std::vector<ReduceSource> sources = ToSources(job.inputs);
  ReduceRange(runs, sources, element0, DType::kFloat32, grains.first_element(),
              grains.end * kGrainElements);
}

absl::StatusOr<AccumulatorSpace> AccumulatorSpace::Open(const Layout& layout,
                                                        const PartitionPlan& plan,
                                                        std::byte* memory, DType dtype) {
  absl::StatusOr<UndoArea> undo = UndoArea::Adopt(memory + plan.undo_offset(), plan.undo_bytes());
  if (!undo.ok()) return undo.status();
  return AccumulatorSpace(layout, plan, memory, dtype, *undo);
}

std::byte* AccumulatorSpace::data(uint32_t unit) const {
  const UnitPlan& unit_plan = plan_->unit(unit);
  return memory_ + unit_plan.accumulator - unit_plan.slice.first_element() * SizeOf(dtype_);
}

UndoChunk AccumulatorSpace::UndoOf(uint32_t chunk) const {
  const ChunkPlan& chunk_plan = plan_->chunks()[chunk];
  UndoChunk undo;
  undo.array_count = 1;
  undo.elements = chunk_plan.elements;
  undo.arrays[0] = {data(chunk_plan.unit) + chunk_plan.begin * SizeOf(dtype_),
                    static_cast<uint32_t>(SizeOf(dtype_))};
  return undo;
}

Presence AccumulatorSpace::Accumulate(const AccumulateJob& job, ThreadPool& pool) const {
  Presence after = job.before;
  for (const GradientInput& input : job.inputs) {
    if (input.data == nullptr) continue;
    for (uint32_t word = 0; word < kPresenceWords; ++word) after[word] |= input.present[word];
  }
  const UnitPlan& unit_plan = plan_->unit(job.unit);
  const std::vector<Run> runs = PlanRuns(*layout_, job);
  if (runs.empty() || unit_plan.chunks == 0) return after;
  const std::vector<ReduceSource> sources = ToSources(job.inputs);
  auto reduce = [&](uint64_t begin, uint64_t end) {
    ReduceRange(runs, sources, data(job.unit), dtype_, begin, end);
  };
  const bool in_place = std::any_of(
      runs.begin(), runs.end(), [](const Run& run) { return run.mode == AccumulateMode::kAdd; });
  auto parallel_for = [&](size_t items, auto fn) { pool.ParallelFor(items, fn); };
  if (!in_place) {
    pool.ParallelFor(unit_plan.chunks, [&](size_t item, int) {
      const ChunkPlan& chunk = plan_->chunks()[unit_plan.first_chunk + item];
      reduce(chunk.begin, chunk.begin + chunk.elements);
    });
    return after;
  }
  std::vector<uint32_t> chunks(unit_plan.chunks);
  for (uint32_t i = 0; i < unit_plan.chunks; ++i) chunks[i] = unit_plan.first_chunk + i;
  const ProtectedPass pass{undo_, {.tag = job.tag << 1, .op = kAccumulateOp}};
  RunProtected(
      pass, chunks, parallel_for, [&](uint32_t chunk) { return UndoOf(chunk); },
      [&](uint32_t chunk, uint64_t begin, uint64_t end) {
        ZS_FAULT_POINT("worker.merge.group");
        const uint64_t base = plan_->chunks()[chunk].begin;
        reduce(base + begin, base + end);
      });
  return after;
}

std::vector<ElementRange> PresentRanges(const Layout& layout, uint32_t unit,
                                        const Presence& present, uint64_t first, uint64_t last) {
  std::vector<ElementRange> ranges;
  const std::vector<uint32_t>& parameters = layout.units()[unit].parameters;
  for (uint32_t position = 0; position < parameters.size(); ++position) {
    if (!IsPresent(present, position)) continue;
    const ParameterPlace& place = layout.place(parameters[position]);
    const uint64_t begin = std::max(first, place.offset);
    const uint64_t end = std::min(last, place.offset + place.elements);
    if (begin >= end) continue;
    if (!ranges.empty() && ranges.back().end == begin) {
      ranges.back().end = end;
    } else {
      ranges.push_back({begin, end});
    }
  }
  return ranges;
}

Presence FullPresence(const Unit& unit) {
  Presence presence = {};
  for (uint32_t position = 0; position < unit.parameters.size(); ++position) {
    presence[position / 64] |= uint64_t{1} << (position % 64);
  }
  return presence;
}

}  // namespace zeroshard
