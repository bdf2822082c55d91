#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "base/fault_point.h"
#include "worker/shard.h"

namespace zeroshard {
namespace {

// Accumulators of this many bytes have left the caches before the step boundary reads them.
constexpr uint64_t kStreamedBytes = uint64_t{64} << 20;
// Elements of one group of an undo record; whole grains, so that squares can be taken per group.
constexpr uint32_t kUndoGroup = kUndoPayloadBytes / sizeof(float);
static_assert(kUndoGroup % kGrainElements == 0 && kNormGrain == kGrainElements);

// Elements that are summed, cleared and squared together, in the first-level cache.
constexpr uint64_t kBlockElements = 4096;
static_assert(kBlockElements % kGrainElements == 0);

// Whether an input has a gradient for the parameter at `position`.
bool TakesPart(const GradientInput& input, uint32_t position) {
  return input.data != nullptr && IsPresent(input.present, position);
}

// A stretch of a unit whose elements have the same inputs and the same mode.
struct Run {
  uint64_t begin = 0;
  uint64_t end = 0;
  uint32_t position = 0;  // its first parameter
  AccumulateMode mode = AccumulateMode::kStore;
  ReductionProgram program;
};

AccumulateMode ModeOf(const AccumulateJob& job, uint32_t position) {
  return IsPresent(job.before, position) ? AccumulateMode::kAdd : AccumulateMode::kStore;
}

bool AreAlike(const AccumulateJob& job, uint32_t a, uint32_t b) {
  return ModeOf(job, a) == ModeOf(job, b) &&
         std::all_of(job.inputs.begin(), job.inputs.end(), [&](const GradientInput& input) {
           return TakesPart(input, a) == TakesPart(input, b);
         });
}

ReductionProgram ProgramOf(const AccumulateJob& job, uint32_t position) {
  const auto present = std::make_unique<bool[]>(job.inputs.size());
  for (size_t i = 0; i < job.inputs.size(); ++i) present[i] = TakesPart(job.inputs[i], position);
  return job.plan->Program(absl::MakeConstSpan(present.get(), job.inputs.size()));
}

// Whether all parameters of the unit have the same inputs and the same mode.
bool IsUniform(const Unit& unit, const AccumulateJob& job) {
  const Presence full = FullPresence(unit);
  return (job.before == Presence{} || job.before == full) &&
         std::all_of(job.inputs.begin(), job.inputs.end(), [&](const GradientInput& input) {
           return input.data == nullptr || input.present == full || input.present == Presence{};
         });
}

// The stretches that get anything, in increasing order.
std::vector<Run> PlanRuns(const Layout& layout, const AccumulateJob& job) {
  const Unit& unit = layout.units()[job.unit];
  std::vector<Run> runs;
  if (!unit.parameters.empty() && IsUniform(unit, job)) {
    runs.push_back({0, unit.elements(), 0, ModeOf(job, 0), ProgramOf(job, 0)});
    std::erase_if(runs, [](const Run& run) { return run.program.steps.empty(); });
    return runs;
  }
  for (uint32_t position = 0; position < unit.parameters.size(); ++position) {
    const ParameterPlace& place = layout.place(unit.parameters[position]);
    // The padding after a parameter goes with it: what it holds is never read.
    const bool last = position + 1 == unit.parameters.size();
    const uint64_t end =
        last ? unit.elements() : layout.place(unit.parameters[position + 1]).offset;
    if (end == place.offset) continue;
    if (!runs.empty() && AreAlike(job, runs.back().position, position)) {
      runs.back().end = end;
    } else {
      runs.push_back({place.offset, end, position, ModeOf(job, position), {}});
    }
  }
  for (Run& run : runs) run.program = ProgramOf(job, run.position);
  std::erase_if(runs, [](const Run& run) { return run.program.steps.empty(); });
  return runs;
}

}  // namespace

// What one sum does with any range of its unit, made before the first one; any thread.
class UnitSum {
 public:
  // The squares of the elements of `included` are taken (increasing; none: no squares at all).
  // The target's padding is cleared; null: it may hold anything. It is there when `included` runs
  // over padding.
  UnitSum(const Layout& layout, const AccumulateJob& job, Accumulator target,
          std::vector<ElementRange> included, const Padding* padding)
      : runs_(PlanRuns(layout, job)),
        target_(target),
        included_(std::move(included)),
        padding_(padding),
        unit_(job.unit) {
    for (const GradientInput& input : job.inputs) {
      sources_.push_back({input.data, input.dtype, input.weight != 1.0f, input.weight});
    }
    elements_ = layout.units()[job.unit].elements();
    FindWholeGrains();
  }

  bool empty() const { return runs_.empty(); }
  bool adds() const {
    return std::any_of(runs_.begin(), runs_.end(),
                       [](const Run& run) { return run.mode == AccumulateMode::kAdd; });
  }

  // Sums the elements [begin, end), whole grains, and adds the squares of what is there afterwards.
  void Sum(uint64_t begin, uint64_t end, ExactSum& squares) const {
    auto whole = std::partition_point(whole_.begin(), whole_.end(),
                                      [&](const WholeGrains& w) { return w.end <= begin; });
    for (uint64_t at = begin; at < end;) {
      uint64_t stop = end;
      if (whole != whole_.end() && whole->begin <= at) {
        stop = std::min(end, whole->end);
        ReduceGrains(whole->run->program, sources_, TargetOf(*whole->run), at, stop, squares);
        ++whole;
      } else {
        if (whole != whole_.end()) stop = std::min(end, whole->begin);
        stop = std::min(stop, at + kBlockElements);
        SumElements(at, stop);
        if (padding_ != nullptr) {
          padding_->Clear(unit_, static_cast<std::byte*>(target_.data), target_.dtype, at, stop);
        }
        Square(at, stop, squares);
      }
      at = stop;
    }
  }

  // Adds the squares of what is there now.
  void Square(uint64_t begin, uint64_t end, ExactSum& squares) const {
    AddSquares({target_.data, target_.dtype, elements_}, included_, begin / kGrainElements,
               end / kGrainElements, squares);
  }

 private:
  // Grains of one run whose elements' squares all count.
  struct WholeGrains {
    uint64_t begin = 0;
    uint64_t end = 0;
    const Run* run = nullptr;
  };

  void FindWholeGrains() {
    auto range = included_.begin();
    for (const Run& run : runs_) {
      while (range != included_.end() && range->end <= run.begin) ++range;
      for (auto r = range; r != included_.end() && r->begin < run.end; ++r) {
        const uint64_t first =
            (std::max(run.begin, r->begin) + kGrainElements - 1) / kGrainElements * kGrainElements;
        const uint64_t last = std::min(run.end, r->end) / kGrainElements * kGrainElements;
        if (first < last) whole_.push_back({first, last, &run});
      }
    }
  }

  Accumulator TargetOf(const Run& run) const {
    Accumulator target = target_;
    target.mode = run.mode;
    if (padding_ != nullptr) target.used = padding_->used(unit_);
    return target;
  }

  void SumElements(uint64_t begin, uint64_t end) const {
    auto run = std::partition_point(runs_.begin(), runs_.end(),
                                    [&](const Run& r) { return r.end <= begin; });
    for (; run != runs_.end() && run->begin < end; ++run) {
      Reduce(run->program, sources_, TargetOf(*run), std::max(begin, run->begin),
             std::min(end, run->end));
    }
  }

  const std::vector<Run> runs_;
  const Accumulator target_;
  const std::vector<ElementRange> included_;
  std::vector<ReduceSource> sources_;
  const Padding* const padding_;
  const uint32_t unit_;
  std::vector<WholeGrains> whole_;  // increasing
  uint64_t elements_ = 0;
};

namespace {

Presence PresenceAfter(const AccumulateJob& job) {
  Presence after = job.before;
  for (const GradientInput& input : job.inputs) {
    if (input.data == nullptr) continue;
    for (uint32_t word = 0; word < kPresenceWords; ++word) after[word] |= input.present[word];
  }
  return after;
}

}  // namespace

void SumInputs(const Layout& layout, const AccumulateJob& job, GrainRange grains, float* element0,
               ThreadPool& pool) {
  const UnitSum sum(layout, job, {.data = element0}, {}, nullptr);
  pool.ParallelFor(pool.lanes(), [&](size_t item, int) {
    const ItemRange part = ItemsOfLane(grains.size(), static_cast<int>(item), pool.lanes());
    ExactSum unused;
    sum.Sum((grains.begin + part.begin) * kGrainElements,
            (grains.begin + part.end) * kGrainElements, unused);
  });
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
  undo.group_elements = kUndoGroup;
  return undo;
}

Accumulated AccumulatorSpace::Accumulate(const AccumulateJob& job, ThreadPool& pool) const {
  Accumulated result;
  result.present = PresenceAfter(job);
  const UnitPlan& unit = plan_->unit(job.unit);
  const Accumulator target{.data = data(job.unit),
                           .dtype = dtype_,
                           .streamed = plan_->totals().accumulator >= kStreamedBytes};
  const UnitSum sum(*layout_, job, target, Squared(job, result.present), padding_.get());
  if (unit.chunks == 0 || result.present == Presence{}) return result;
  std::vector<ExactSum> squares(std::max<size_t>(pool.lanes(), undo_.lanes()));
  if (sum.adds()) {
    AddProtected(job, sum, pool, squares);
  } else {
    pool.ParallelFor(unit.chunks, [&](size_t item, int lane) {
      const ChunkPlan& chunk = plan_->chunks()[unit.first_chunk + item];
      sum.Sum(chunk.begin, chunk.begin + chunk.elements, squares[lane]);
    });
  }
  for (ExactSum& part : squares) {
    part.Normalize();
    result.squares.Merge(part);
  }
  result.squares.Normalize();
  return result;
}

// The elements whose squares count: of a unit that is all there also the padding, which holds
// zeros.
std::vector<ElementRange> AccumulatorSpace::Squared(const AccumulateJob& job,
                                                    const Presence& present) const {
  const uint64_t first = job.squared.first_element();
  const uint64_t last = job.squared.end * kGrainElements;
  if (padding_->used(job.unit) != nullptr && present == FullPresence(layout_->units()[job.unit])) {
    return {{first, last}};
  }
  return PresentRanges(*layout_, job.unit, present, first, last);
}

void AccumulatorSpace::AddProtected(const AccumulateJob& job, const UnitSum& sum, ThreadPool& pool,
                                    std::span<ExactSum> squares) const {
  const UnitPlan& unit = plan_->unit(job.unit);
  std::vector<uint32_t> chunks(unit.chunks);
  std::iota(chunks.begin(), chunks.end(), unit.first_chunk);
  // By chunk: the first element that was summed here. What lies before it, a killed process summed.
  std::vector<uint64_t> first(unit.chunks, kAbsent);
  const ProtectedPass pass{undo_, {.tag = job.tag << 1, .op = kAccumulateOp}};
  RunProtected(
      pass, chunks, [&](size_t items, auto fn) { pool.ParallelFor(items, fn); },
      [&](uint32_t chunk) { return UndoOf(chunk); },
      [&](uint32_t lane, uint32_t chunk, uint64_t begin, uint64_t end) {
        ZS_FAULT_POINT("worker.merge.group");
        const uint64_t base = plan_->chunks()[chunk].begin;
        uint64_t& start = first[chunk - unit.first_chunk];
        start = std::min(start, begin);
        sum.Sum(base + begin, base + end, squares[lane]);
      });
  pool.ParallelFor(unit.chunks, [&](size_t item, int lane) {
    const ChunkPlan& chunk = plan_->chunks()[unit.first_chunk + item];
    const uint64_t before = std::min(first[item], chunk.elements);
    if (before > 0) sum.Square(chunk.begin, chunk.begin + before, squares[lane]);
  });
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
  const size_t positions = unit.parameters.size();
  std::fill_n(presence.begin(), positions / 64, ~uint64_t{0});
  if (positions % 64 != 0) presence[positions / 64] = (uint64_t{1} << (positions % 64)) - 1;
  return presence;
}

}  // namespace zeroshard
