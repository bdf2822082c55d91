// Sums of gradients: what contributions came in, merged unit by unit.
#include <bit>
#include <utility>

#include "base/status.h"
#include "worker/engine.h"
#include "worker/merge_records.h"

namespace zeroshard {
namespace {

// So many elements are summed before others learn of it and new requests are looked at: a few tens
// of microseconds of work. After every unit that cost more than the sum of a small one.
constexpr uint64_t kElementsBetweenCompletions = uint64_t{1} << 18;

}  // namespace

bool Engine::MergeDirty() {
  bool progress = false;
  bool evict = false;
  std::vector<uint32_t> touched;
  uint64_t summed_elements = 0;  // since the last CompleteScatters
  std::span<std::atomic<uint64_t>> dirty = context_.board().dirty(context_.me());
  const size_t units = context_.layout().units().size();
  for (size_t word = 0; word < dirty.size(); ++word) {
    uint64_t bits = dirty[word].exchange(0, std::memory_order_acq_rel);
    for (; bits != 0; bits &= bits - 1) {
      const size_t unit = word * 64 + std::countr_zero(bits);
      if (unit >= units) break;
      const auto u = static_cast<uint32_t>(unit);
      bool local = false;
      for (uint32_t rank = 0; rank < ports_.size(); ++rank) {
        while (local_[rank].has_value() && MergeLocal(rank, u)) local = true;
      }
      // Whose sum over the ranks waits for this one may have looked at the unit already.
      if (local) context_.MarkDirty(u);
      bool summed = local;
      while (MergeUnit(u)) summed = true;
      if (summed) summed_elements += context_.layout().units()[u].elements();
      if (summed_elements >= kElementsBetweenCompletions) {
        CompleteScatters();
        summed_elements = 0;
      }
      progress |= summed;
      if (context_.memory().plan().unit(u).resident) continue;
      evict = true;
      touched.push_back(u);
      // Of shards in another tier as many as there are, so that it is kept busy.
      if (!tiers_->empty()) continue;
      progress |= FillWanted(touched);
      touched.clear();
    }
  }
  if (!touched.empty()) progress |= FillWanted(touched);
  if (evict) keeper_.Evict();
  if (summed_elements > 0) CompleteScatters();
  if (progress) context_.RingAll();
  return progress;
}

bool Engine::FillWanted(std::span<const uint32_t> units) {
  // While a step is committed a tier has the old parameters, and the board's epoch may be the new
  // one; all units are dirty after it.
  const BoardHeader& header = context_.board().header();
  const bool decided = header.decision.attempt.load() == context_.board().attempt();
  if (tiers_->device() != nullptr ? decided : !tiers_->empty() && !AtBoundary()) return false;
  const absl::StatusOr<bool> filled = keeper_.Fill(units, shard_);
  if (!filled.ok()) {
    context_.Poison(Annotate(filled.status(),
                             absl::StrCat("parameters of job ", context_.memory().start().job())));
  }
  return filled.value_or(false);
}

// Between two sums: slots of the gradient windows are free as soon as they were read, and what came
// in meanwhile is on the board for the other workers.
void Engine::CompleteScatters() {
  context_.RingAll();
  pump_();
  for (auto& port : ports_) {
    if (port != nullptr) port->Poll();
  }
}

// The rank's gradient for `tag`; an input without data when the rank has none; nothing while it may
// still come.
std::optional<GradientInput> Engine::InputOf(uint32_t rank, uint32_t unit, Tag tag) const {
  const Board& board = context_.board();
  // The order of the two reads matters: contributions are posted before the micro end.
  const Tag end = board.rank(rank).micro_end.load(std::memory_order_acquire);
  const Contribution& contribution = board.contribution(unit, rank);
  GradientInput input;
  if (contribution.tag.load(std::memory_order_acquire) == tag) {
    const std::span<const std::byte> window = context_.memory().gradient_window(rank);
    input.data = window.data() + contribution.window_offset;
    input.dtype = context_.layout().units()[unit].dtype;
    input.weight = contribution.weight;
    input.present = contribution.present;
    return input;
  }
  if (AttemptOf(end) == AttemptOf(tag) && end >= tag) return input;
  return std::nullopt;
}

std::optional<std::vector<GradientInput>> Engine::Inputs(uint32_t unit, Tag tag) const {
  if (bridge_ != nullptr) return bridge_->Inputs(unit, tag);
  std::vector<GradientInput> inputs;
  for (uint32_t rank = 0; rank < context_.memory().ranks(); ++rank) {
    std::optional<GradientInput> input = SourceOf(rank, unit, tag);
    if (!input.has_value()) return std::nullopt;
    inputs.push_back(*input);
  }
  return inputs;
}

// What a rank of this island gives to the sum over ranks: its gradient of the micro-step, or at
// stage 1 with local accumulators its own sum over all micro-steps.
std::optional<GradientInput> Engine::SourceOf(uint32_t rank, uint32_t unit, Tag tag) const {
  if (!context_.memory().has_local_accumulators()) return InputOf(rank, unit, tag);
  const MergeRecord& record = context_.board().local(rank, unit);
  if (record.tag.load(std::memory_order_acquire) != tag) return std::nullopt;
  GradientInput input;
  input.data = context_.memory().local_unit(rank, unit);
  input.dtype = DType::kFloat32;
  input.present = record.states[record.states[0].tag == tag ? 0 : 1].present;
  return input;
}

// What waited for the unfinished unit is looked at again.
void Engine::FinishUnit(std::optional<uint32_t>& unfinished) {
  if (!unfinished.has_value()) return;
  unfinished.reset();
  context_.MarkAllDirty(context_.me());
}

bool Engine::MergeLocal(uint32_t rank, uint32_t unit) {
  if (!context_.memory().plan().unit(unit).has_optimizer) return false;
  if (unfinished_local_[rank].value_or(unit) != unit) return false;
  MergeRecord& record = context_.board().local(rank, unit);
  const Tag tag = NextTag(record, attempt_);
  const std::optional<GradientInput> input = InputOf(rank, unit, tag);
  if (!input.has_value()) return false;
  const AccumulateJob job{.unit = unit,
                          .tag = tag,
                          .plan = &single_,
                          .inputs = {&*input, 1},
                          .before = PresenceBefore(record, tag)};
  AdvanceRecord(record, tag, local_[rank]->Accumulate(job, pool_).present);
  FinishUnit(unfinished_local_[rank]);
  return true;
}

bool Engine::MergeUnit(uint32_t unit) {
  if (!context_.memory().plan().unit(unit).has_optimizer) return false;
  if (device_ != nullptr) return MergePresence(unit);
  if (unfinished_.value_or(unit) != unit) return false;
  MergeRecord& record = context_.board().merged(context_.me(), unit);
  Tag tag = NextTag(record, attempt_);
  if (context_.memory().has_local_accumulators()) {
    // One sum a step, at the boundary.
    if (AttemptOf(record.tag.load()) == attempt_ || !AllArrived()) return false;
    tag = MakeTag(attempt_, context_.board().rank(0).input.micro_steps - 1);
  }
  const std::optional<std::vector<GradientInput>> inputs = Inputs(unit, tag);
  if (!inputs.has_value()) return false;
  const AccumulateJob job{.unit = unit,
                          .tag = tag,
                          .plan = bridge_ != nullptr ? &bridge_->plan() : &plan_,
                          .inputs = *inputs,
                          .before = PresenceBefore(record, tag),
                          .squared = context_.memory().plan().unit(unit).shard};
  const Accumulated sum = shard_.accumulators().Accumulate(job, pool_);
  AdvanceRecord(record, tag, sum.present);
  squares_[unit] = {tag, sum.present, sum.squares};
  if (bridge_ != nullptr) bridge_->Forget(unit, tag);
  FinishUnit(unfinished_);
  return true;
}

}  // namespace zeroshard
