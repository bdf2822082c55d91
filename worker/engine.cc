#include "worker/engine.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status.h"
#include "worker/merge_records.h"

namespace zeroshard {
namespace {

// So many elements are summed before others learn of it and new requests are looked at: a few tens
// of microseconds of work. After every unit that cost more than the sum of a small one.
constexpr uint64_t kElementsBetweenCompletions = uint64_t{1} << 18;

}  // namespace

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(JobMemory& memory, ThreadPool& pool,
                                                       Clock& clock, EngineOutput& output,
                                                       std::unique_ptr<NvmeTier> nvme) {
  std::unique_ptr<StateTier> tier;
  if (nvme != nullptr) tier = std::make_unique<StateTier>(memory, std::move(nvme));
  ZS_ASSIGN_OR_RETURN(Shard shard, Shard::Open(memory, pool, tier.get()));
  ZS_ASSIGN_OR_RETURN(
      const ReductionTree tree,
      ReductionTree::Create(memory.ranks(), std::max(1u, memory.config().reduction_group())));
  ZS_ASSIGN_OR_RETURN(const ReductionTree single, ReductionTree::Create(1, 1));
  std::unique_ptr<Engine> engine(new Engine(memory, clock, output, std::move(tier),
                                            std::move(shard), pool, tree.RankPlan(),
                                            single.RankPlan()));
  ZS_RETURN_IF_ERROR(engine->OpenLocalAccumulators());
  return engine;
}

Engine::Engine(JobMemory& memory, Clock& clock, EngineOutput& output,
               std::unique_ptr<StateTier> tier, Shard shard, ThreadPool& pool, ReductionPlan plan,
               ReductionPlan single)
    : context_(memory, clock, output),
      pool_(pool),
      tier_(std::move(tier)),
      shard_(std::move(shard)),
      plan_(std::move(plan)),
      single_(std::move(single)),
      ports_(memory.ranks()),
      local_(memory.ranks()),
      keeper_(context_),
      unfinished_local_(memory.ranks()),
      squares_(memory.layout().units().size()) {
  if (tier_ != nullptr) mover_.emplace(*tier_, shard_, context_);
  for (uint32_t rank = 0; rank < memory.ranks(); ++rank) {
    if (memory.is_home_of(rank)) ports_[rank] = std::make_unique<RankPort>(context_, rank);
  }
  for (uint32_t unit = 0; unit < memory.layout().units().size(); ++unit) {
    if (memory.layout().units()[unit].grains == 0) SetInitialized(unit);
  }
}

absl::Status Engine::OpenLocalAccumulators() {
  JobMemory& memory = context_.memory();
  if (!memory.has_local_accumulators()) return absl::OkStatus();
  for (uint32_t rank = 0; rank < memory.ranks(); ++rank) {
    // Others' local accumulators are only read; their undo area is their home worker's.
    if (!memory.is_home_of(rank)) continue;
    ZS_ASSIGN_OR_RETURN(local_[rank],
                        AccumulatorSpace::Open(memory.layout(), memory.local_plan(),
                                               memory.local_accumulator(rank), DType::kFloat32));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> Engine::Recover() {
  ZS_RETURN_IF_ERROR(shard_.Recover());
  if (tier_ != nullptr) {
    ZS_RETURN_IF_ERROR(tier_->Recover());
    mover_->LookAgain();
  }
  unfinished_ = UnfinishedUnit(shard_.accumulators().undo(), context_.memory().plan());
  for (uint32_t rank = 0; rank < local_.size(); ++rank) {
    if (!local_[rank].has_value()) continue;
    ZS_ASSIGN_OR_RETURN(unfinished_local_[rank], RecoverLocal(rank));
  }
  keeper_.Recover();
  // The predecessor may have died between an entry and the word of it.
  context_.MarkAllDirty();
  context_.RingAll();
  const Board& board = context_.board();
  const uint64_t attempt = board.attempt();
  const bool decided = board.header().decision.attempt.load() == attempt;
  const bool applied = board.worker(context_.me()).applied.load() == attempt;
  return absl::StrCat(
      "attempt ", attempt, decided ? ", decided" : ", not decided", applied ? ", applied here" : "",
      unfinished_.has_value() ? absl::StrCat(", in the middle of unit ", *unfinished_) : "",
      ", committed ", board.committed_attempt());
}

absl::StatusOr<std::optional<uint32_t>> Engine::RecoverLocal(uint32_t rank) {
  const AccumulatorSpace& space = *local_[rank];
  ZS_RETURN_IF_ERROR(space.undo()
                         .Recover([&](const UndoKey&, uint32_t chunk) -> absl::StatusOr<UndoChunk> {
                           return space.UndoOf(chunk);
                         })
                         .status());
  return UnfinishedUnit(space.undo(), context_.memory().local_plan());
}

// The unit that a pass of the attempt in flight left in the middle; passes of other attempts are
// forgotten.
std::optional<uint32_t> Engine::UnfinishedUnit(const UndoArea& undo,
                                               const PartitionPlan& plan) const {
  for (uint32_t lane = 0; lane < undo.lanes(); ++lane) {
    const std::optional<UndoResume> resume = undo.InFlight(lane);
    if (!resume.has_value()) continue;
    if (Shard::AttemptOfPass(resume->key) == context_.board().attempt()) {
      return plan.chunks()[resume->chunk].unit;
    }
    undo.Abandon();
    return std::nullopt;
  }
  return std::nullopt;
}

void Engine::OnHello(uint32_t rank, const trainer::v1::Hello& hello) { ports_[rank]->Hello(hello); }

void Engine::OnRequest(uint32_t rank, const trainer::v1::SessionRequest& request) {
  ports_[rank]->Submit(request);
}

void Engine::OnDropAttempt(uint64_t generation) {
  NoteDrop(generation);
  context_.ExpectDrop(generation);
  BoardHeader& header = context_.board().header();
  if (!context_.is_leader() || header.generation.load() >= generation) return;
  const uint64_t attempt = header.attempt.load();
  const uint64_t decided = header.decision.attempt.load();
  const uint64_t until = decided != attempt ? attempt + 1 : attempt;
  header.drop_after.store(decided);
  header.drop_until.store(until);  // before the attempt: see RankPort::Attempt
  header.attempt.store(until);
  ZS_FAULT_POINT("worker.drop.before_generation");
  header.drop_generation.store(generation);
  FinishDrop(generation);
}

// On other islands: what the leader decided is committed first, then its drop is followed.
bool Engine::FollowDrop() {
  BoardHeader& header = context_.board().header();
  const uint64_t generation = header.drop_generation.load();
  if (generation <= header.generation.load()) return false;
  const uint64_t attempt = header.attempt.load();
  const uint64_t until = header.drop_until.load();
  if (attempt <= header.drop_after.load() && attempt < until) return false;
  if (attempt < until) header.attempt.store(until);
  FinishDrop(generation);
  return true;
}

void Engine::FinishDrop(uint64_t generation) {
  context_.board().header().generation.store(generation);
  context_.RingAll();
}

absl::Status Engine::Connect(Mesh& mesh) {
  ZS_ASSIGN_OR_RETURN(bridge_, Bridge::Create(context_, shard_, pool_, mesh,
                                              [this](uint32_t rank, uint32_t unit, Tag tag) {
                                                return SourceOf(rank, unit, tag);
                                              }));
  OnMeshLost(absl::UnavailableError("not connected yet"));
  return absl::OkStatus();
}

void Engine::OnMeshConnected() {
  mesh_lost_at_.reset();
  bridge_->OnConnected();
}

void Engine::OnMeshLost(const absl::Status& reason) {
  if (!mesh_lost_at_.has_value()) mesh_lost_at_ = context_.now();
  mesh_reason_ = reason;
  if (absl::IsFailedPrecondition(reason)) context_.Poison(reason);
}

void Engine::Advance() {
  while (AdvanceOnce()) {
  }
}

bool Engine::AdvanceOnce() {
  const Board& board = context_.board();
  const uint64_t fence = board.header().fence.load();
  if (board.worker(context_.me()).fence.exchange(fence) != fence) context_.RingAll();
  if (context_.is_island_leader() && !context_.is_leader()) FollowDrop();
  if (const absl::Status poison = context_.poison(); !poison.ok()) {
    if (bridge_ != nullptr) bridge_->Advance();
    // Ranks that come before the leader has dropped the dead generation are of the next one.
    if (!context_.IsDropDone()) return false;
    for (auto& port : ports_) {
      if (port != nullptr) port->Fail(poison);
    }
    return false;
  }
  bool progress = FollowAttempt();
  progress |= MergeDirty();
  progress |= CopyPuts();
  progress |= AnnounceReady();
  if (context_.is_leader()) progress |= Decide();
  progress |= Apply();
  if (context_.is_island_leader()) progress |= Commit();
  if (bridge_ != nullptr) progress |= bridge_->Advance();
  for (auto& port : ports_) {
    if (port != nullptr) progress |= port->Poll();
  }
  return progress;
}

// A new attempt begins: committed by the leader, or the last one was dropped.
bool Engine::FollowAttempt() {
  BoardHeader& header = context_.board().header();
  if (context_.is_island_leader() &&
      context_.board().committed_attempt() == header.attempt.load()) {
    header.attempt.fetch_add(1);  // a predecessor died between the two stores of a commit
    context_.RingAll();
  }
  const uint64_t attempt = context_.board().attempt();
  if (attempt == attempt_) return false;
  if (attempt_ != 0 && context_.board().committed_attempt() + 1 != attempt) {
    shard_.Abandon();
    unfinished_.reset();
    std::fill(unfinished_local_.begin(), unfinished_local_.end(), std::nullopt);
    for (uint32_t rank = 0; rank < local_.size(); ++rank) {
      if (local_[rank].has_value()) local_[rank]->undo().Abandon();
    }
  }
  if (tier_ != nullptr) {
    if (const absl::Status status = tier_->FollowCommit(); !status.ok()) {
      context_.Poison(status);
      return false;
    }
  }
  attempt_ = attempt;
  waiting_since_.reset();
  context_.MarkAllDirty(context_.me());
  return true;
}

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
      // Of shards on the NVMe tier as many as there are, so that the drives are kept busy.
      if (tier_ != nullptr) continue;
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
  // While a step is committed the tier has the old parameters, and the board's epoch may be the new
  // one; all units are dirty after it.
  if (tier_ != nullptr && !AtBoundary()) return false;
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

bool Engine::CopyPuts() {
  bool progress = false;
  const Board& board = context_.board();
  // What a decided step reads on the NVMe tier stays there until it is committed.
  if (tier_ != nullptr && !AtBoundary()) return false;
  for (uint32_t rank = 0; rank < context_.memory().ranks(); ++rank) {
    // Puts of other islands' ranks come through the bridge.
    if (!context_.memory().in_island(context_.memory().start().ranks(rank).home_worker())) continue;
    const RankSlot& slot = board.rank(rank);
    const uint64_t tag = slot.put_tag.load(std::memory_order_acquire);
    std::atomic<uint64_t>& done = board.put_done(context_.me(), rank);
    if (done.load(std::memory_order_acquire) >= tag) continue;
    const std::byte* values =
        context_.memory().gradient_window(rank).data() + slot.put_window_offset;
    const absl::StatusOr<bool> whole =
        shard_.Put(slot.put_unit, slot.put_offset, slot.put_elements, values);
    if (!whole.ok()) {
      context_.Poison(
          Annotate(whole.status(), absl::StrCat("values of ", context_.UnitName(slot.put_unit))));
      return progress;
    }
    if (*whole) SetInitialized(slot.put_unit);
    board.fill(context_.me(), slot.put_unit).store(0);
    if (bridge_ != nullptr) bridge_->ForgetShards(slot.put_unit);
    context_.MarkDirty(slot.put_unit);  // somebody may want it in the window already
    ZS_FAULT_POINT("worker.put.before_done");
    done.store(tag, std::memory_order_release);
    progress = true;
  }
  if (progress) context_.RingAll();
  return progress;
}

void Engine::SetInitialized(uint32_t unit) {
  context_.board().initialized(context_.me(), unit).store(1, std::memory_order_release);
}

bool Engine::AtBoundary() const {
  const Board& board = context_.board();
  return board.header().decision.attempt.load() != board.attempt();
}

}  // namespace zeroshard
