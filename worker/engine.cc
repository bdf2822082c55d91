#include "worker/engine.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status.h"
#include "worker/step_decision.h"

namespace zeroshard {

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(JobMemory& memory, ThreadPool& pool,
                                                       Clock& clock, EngineOutput& output) {
  ZS_ASSIGN_OR_RETURN(Shard shard, Shard::Open(memory, pool));
  ZS_ASSIGN_OR_RETURN(
      const ReductionTree tree,
      ReductionTree::Create(memory.ranks(), std::max(1u, memory.config().reduction_group())));
  ZS_ASSIGN_OR_RETURN(const ReductionTree single, ReductionTree::Create(1, 1));
  std::unique_ptr<Engine> engine(new Engine(memory, clock, output, std::move(shard), pool,
                                            tree.RankPlan(), single.RankPlan()));
  ZS_RETURN_IF_ERROR(engine->OpenLocalAccumulators());
  return engine;
}

Engine::Engine(JobMemory& memory, Clock& clock, EngineOutput& output, Shard shard, ThreadPool& pool,
               ReductionPlan plan, ReductionPlan single)
    : context_(memory, clock, output),
      pool_(pool),
      shard_(std::move(shard)),
      plan_(std::move(plan)),
      single_(std::move(single)),
      ports_(memory.ranks()),
      local_(memory.ranks()),
      keeper_(context_),
      unfinished_local_(memory.ranks()) {
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
  unfinished_ = UnfinishedUnit(shard_.accumulators().undo(), context_.memory().plan());
  for (uint32_t rank = 0; rank < local_.size(); ++rank) {
    if (!local_[rank].has_value()) continue;
    ZS_ASSIGN_OR_RETURN(unfinished_local_[rank], RecoverLocal(rank));
  }
  keeper_.Recover();
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
  if (!context_.is_island_leader()) return;
  BoardHeader& header = context_.board().header();
  header.generation.store(generation);
  header.poisoned.store(0);
  header.poison_claim.store(0);
  const uint64_t attempt = header.attempt.load();
  if (header.decision.attempt.load() != attempt) header.attempt.store(attempt + 1);
  context_.RingAll();
}

absl::Status Engine::Connect(Mesh& mesh) {
  ZS_ASSIGN_OR_RETURN(bridge_, Bridge::Create(context_, shard_, mesh,
                                              [this](uint32_t rank, uint32_t unit, Tag tag) {
                                                return SourceOf(rank, unit, tag);
                                              }));
  return absl::OkStatus();
}

void Engine::Advance() {
  while (AdvanceOnce()) {
  }
}

bool Engine::AdvanceOnce() {
  const Board& board = context_.board();
  board.worker(context_.me()).fence.store(board.header().fence.load());
  if (const absl::Status poison = context_.poison(); !poison.ok()) {
    if (bridge_ != nullptr) bridge_->Advance();
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
  attempt_ = attempt;
  waiting_since_.reset();
  for (std::atomic<uint64_t>& word : context_.board().dirty(context_.me()))
    word.store(~uint64_t{0});
  return true;
}

bool Engine::MergeDirty() {
  bool progress = false;
  bool evict = false;
  std::span<std::atomic<uint64_t>> dirty = context_.board().dirty(context_.me());
  const size_t units = context_.layout().units().size();
  for (size_t word = 0; word < dirty.size(); ++word) {
    uint64_t bits = dirty[word].exchange(0, std::memory_order_acq_rel);
    for (; bits != 0; bits &= bits - 1) {
      const size_t unit = word * 64 + std::countr_zero(bits);
      if (unit >= units) break;
      const auto u = static_cast<uint32_t>(unit);
      for (uint32_t rank = 0; rank < ports_.size(); ++rank) {
        while (local_[rank].has_value() && MergeLocal(rank, u)) progress = true;
      }
      while (MergeUnit(u)) progress = true;
      progress |= keeper_.Fill(u, shard_);
      evict |= !context_.memory().plan().unit(u).resident;
    }
  }
  if (evict) keeper_.Evict();
  if (progress) context_.RingAll();
  return progress;
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

namespace {

// The presence that `record` holds for the attempt of `tag`; nothing is present at its first
// micro-step.
Presence PresenceBefore(const MergeRecord& record, Tag tag) {
  const Tag done = record.tag.load(std::memory_order_acquire);
  if (AttemptOf(done) != AttemptOf(tag)) return {};
  return record.states[record.states[0].tag == done ? 0 : 1].present;
}

void Advance(MergeRecord& record, Tag tag, const Presence& present) {
  const Tag done = record.tag.load(std::memory_order_acquire);
  MergeRecord::State& state = record.states[record.states[0].tag == done ? 1 : 0];
  state.tag = 0;
  state.present = present;
  std::atomic_thread_fence(std::memory_order_release);
  state.tag = tag;
  ZS_FAULT_POINT("worker.merge.before_record");
  record.tag.store(tag, std::memory_order_release);
  ZS_FAULT_POINT("worker.merge.after_record");
}

Tag NextTag(const MergeRecord& record, uint64_t attempt) {
  const Tag done = record.tag.load(std::memory_order_acquire);
  return AttemptOf(done) == attempt ? done + 1 : MakeTag(attempt, 0);
}

}  // namespace

// What waited for the unfinished unit is looked at again.
void Engine::FinishUnit(std::optional<uint32_t>& unfinished) {
  if (!unfinished.has_value()) return;
  unfinished.reset();
  for (std::atomic<uint64_t>& word : context_.board().dirty(context_.me()))
    word.store(~uint64_t{0});
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
  zeroshard::Advance(record, tag, local_[rank]->Accumulate(job, pool_));
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
                          .before = PresenceBefore(record, tag)};
  zeroshard::Advance(record, tag, shard_.accumulators().Accumulate(job, pool_));
  if (bridge_ != nullptr) bridge_->Forget(unit, tag);
  FinishUnit(unfinished_);
  return true;
}

bool Engine::CopyPuts() {
  bool progress = false;
  const Board& board = context_.board();
  for (uint32_t rank = 0; rank < context_.memory().ranks(); ++rank) {
    // Puts of other islands' ranks come through the bridge.
    if (!context_.memory().in_island(context_.memory().start().ranks(rank).home_worker())) continue;
    const RankSlot& slot = board.rank(rank);
    const uint64_t tag = slot.put_tag.load(std::memory_order_acquire);
    std::atomic<uint64_t>& done = board.put_done(context_.me(), rank);
    if (done.load(std::memory_order_acquire) >= tag) continue;
    const std::byte* values =
        context_.memory().gradient_window(rank).data() + slot.put_window_offset;
    if (shard_.Put(slot.put_unit, slot.put_offset, slot.put_elements, values)) {
      SetInitialized(slot.put_unit);
    }
    board.fill(context_.me(), slot.put_unit).store(0);
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

bool Engine::AllArrived() const {
  for (uint32_t rank = 0; rank < context_.memory().ranks(); ++rank) {
    if (context_.board().rank(rank).arrival.load(std::memory_order_acquire) != attempt_)
      return false;
  }
  return true;
}

bool Engine::AnnounceReady() {
  WorkerSlot& slot = context_.board().worker(context_.me());
  if (slot.ready.load() == attempt_ || !AllArrived()) return false;
  const Tag last = MakeTag(attempt_, context_.board().rank(0).input.micro_steps - 1);
  const PartitionPlan& plan = context_.memory().plan();
  const size_t units = context_.layout().units().size();
  for (uint32_t unit = 0; unit < units; ++unit) {
    if (!plan.unit(unit).has_optimizer) continue;
    if (context_.board().merged(context_.me(), unit).tag.load(std::memory_order_acquire) < last)
      return false;
  }
  ExactSum sum;
  for (uint32_t unit = 0; unit < units; ++unit) {
    if (!plan.unit(unit).has_optimizer || plan.unit(unit).shard.size() == 0) continue;
    const MergeRecord& record = context_.board().merged(context_.me(), unit);
    shard_.AddSquares(unit, PresenceBefore(record, last), sum);
  }
  sum.Normalize();
  static_assert(sizeof(sum) == sizeof(slot.norm));
  std::memcpy(slot.norm, &sum, sizeof(sum));
  ZS_FAULT_POINT("worker.step.before_ready");
  slot.ready.store(attempt_, std::memory_order_release);
  ZS_FAULT_POINT("worker.step.after_ready");
  context_.RingAll();
  return true;
}

bool Engine::Decide() {
  const Board& board = context_.board();
  Decision& decision = board.header().decision;
  if (decision.attempt.load() == attempt_) return false;
  ExactSum total;
  for (uint32_t worker = 0; worker < context_.memory().workers(); ++worker) {
    if (board.worker(worker).ready.load(std::memory_order_acquire) != attempt_) return false;
    ExactSum part;
    std::memcpy(&part, board.worker(worker).norm, sizeof(part));
    total.Merge(part);
  }
  std::vector<const StepInput*> inputs;
  for (uint32_t rank = 0; rank < context_.memory().ranks(); ++rank) {
    inputs.push_back(&board.rank(rank).input);
  }
  const absl::StatusOr<StepVerdict> verdict =
      DecideStep(context_.memory().config(), inputs, total, board.numbers());
  if (!verdict.ok()) {
    context_.Poison(verdict.status());
    return false;
  }
  decision.skip = verdict->skip ? 1 : 0;
  decision.micro_steps = inputs[0]->micro_steps;
  decision.grad_scale = verdict->grad_scale;
  decision.groups = inputs[0]->groups;
  decision.next = verdict->next;
  std::memcpy(decision.group, inputs[0]->group, sizeof(decision.group));
  ZS_FAULT_POINT("worker.step.before_decision");
  decision.attempt.store(attempt_, std::memory_order_release);
  ZS_FAULT_POINT("worker.step.after_decision");
  context_.RingAll();
  return true;
}

// The parameter's updates before the step in flight.
uint64_t Engine::CountBefore(uint32_t parameter) const {
  const uint64_t word = context_.board().update_count(parameter).load(std::memory_order_acquire);
  const uint64_t count = word & 0xffffffff;
  return word >> 32 == (attempt_ & 0xffffffff) && count > 0 ? count - 1 : count;
}

bool Engine::Apply() {
  const Board& board = context_.board();
  const Decision& decision = board.header().decision;
  std::atomic<uint64_t>& applied = board.worker(context_.me()).applied;
  if (decision.attempt.load(std::memory_order_acquire) != attempt_ || applied.load() == attempt_) {
    return false;
  }
  if (decision.skip == 0) {
    std::vector<uint32_t> args_of(context_.layout().parameters().size(), kNotUpdated);
    std::vector<UpdateArgs> args;
    std::map<std::pair<uint32_t, uint64_t>, uint32_t> known;  // (group, update) -> index
    const std::span<const Unit> units = context_.layout().units();
    for (uint32_t u = 0; u < units.size(); ++u) {
      if (!context_.memory().plan().unit(u).has_optimizer) continue;
      const Presence present = PresenceBefore(board.merged(context_.me(), u), MakeTag(attempt_, 0));
      for (uint32_t position = 0; position < units[u].parameters.size(); ++position) {
        if (!IsPresent(present, position)) continue;
        const uint32_t parameter = units[u].parameters[position];
        const uint32_t group = context_.layout().parameters()[parameter].group;
        const uint64_t count = CountBefore(parameter) + 1;
        auto [entry, fresh] = known.try_emplace({group, count}, static_cast<uint32_t>(args.size()));
        if (fresh) args.push_back(ArgsFor(decision.group[group], count));
        args_of[parameter] = entry->second;
      }
    }
    ZS_FAULT_POINT("worker.apply.before");
    shard_.Apply({attempt_, decision.grad_scale, args_of, args});
  }
  ZS_FAULT_POINT("worker.apply.before_applied");
  applied.store(attempt_, std::memory_order_release);
  ZS_FAULT_POINT("worker.apply.after_applied");
  context_.RingAll();
  return true;
}

bool Engine::Commit() {
  const Board& board = context_.board();
  BoardHeader& header = board.header();
  if (header.decision.attempt.load() != attempt_) return false;
  for (uint32_t worker = 0; worker < context_.memory().workers(); ++worker) {
    if (board.worker(worker).applied.load(std::memory_order_acquire) != attempt_) return false;
  }
  if (header.decision.skip == 0) {
    const std::span<const Unit> units = context_.layout().units();
    for (uint32_t u = 0; u < units.size(); ++u) {
      if (!context_.memory().plan().unit(u).has_optimizer) continue;
      const Presence present = PresenceBefore(board.merged(context_.me(), u), MakeTag(attempt_, 0));
      for (uint32_t position = 0; position < units[u].parameters.size(); ++position) {
        if (!IsPresent(present, position)) continue;
        const uint32_t parameter = units[u].parameters[position];
        board.update_count(parameter).store((attempt_ & 0xffffffff) << 32 |
                                            (CountBefore(parameter) + 1));
      }
    }
  }
  const uint64_t spare = (header.commit.load() & 1) ^ 1;
  header.numbers[spare] = header.decision.next;
  header.epoch.fetch_add(1);
  ZS_FAULT_POINT("worker.commit.before");
  header.commit.store(attempt_ << 1 | spare, std::memory_order_release);
  ZS_FAULT_POINT("worker.commit.after");
  header.attempt.store(attempt_ + 1, std::memory_order_release);
  context_.RingAll();
  return true;
}

bool Engine::AtBoundary() const {
  const Board& board = context_.board();
  return board.header().decision.attempt.load() != board.attempt();
}

}  // namespace zeroshard
