#include "worker/engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status.h"
#include "worker/merge_records.h"

namespace zeroshard {
absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(JobMemory& memory, ThreadPool& pool,
                                                       Clock& clock, EngineOutput& output,
                                                       std::unique_ptr<NvmeTier> nvme,
                                                       std::unique_ptr<DeviceShard> device) {
  if (memory.config().data_plane() != (device != nullptr)) {
    return absl::InvalidArgumentError("a worker of a job with a data plane has a device");
  }
  std::unique_ptr<StateTier> tier;
  if (nvme != nullptr) tier = std::make_unique<StateTier>(memory, std::move(nvme));
  auto tiers = std::make_unique<TierSet>(memory, std::move(tier), std::move(device));
  ZS_ASSIGN_OR_RETURN(Shard shard, Shard::Open(memory, pool, *tiers));
  ZS_ASSIGN_OR_RETURN(
      const ReductionTree tree,
      ReductionTree::Create(memory.ranks(), std::max(1u, memory.config().reduction_group())));
  ZS_ASSIGN_OR_RETURN(const ReductionTree single, ReductionTree::Create(1, 1));
  std::unique_ptr<Engine> engine(new Engine(memory, clock, output, std::move(tiers),
                                            std::move(shard), pool, tree.RankPlan(),
                                            single.RankPlan()));
  ZS_RETURN_IF_ERROR(engine->OpenLocalAccumulators());
  return engine;
}

Engine::Engine(JobMemory& memory, Clock& clock, EngineOutput& output,
               std::unique_ptr<TierSet> tiers, Shard shard, ThreadPool& pool, ReductionPlan plan,
               ReductionPlan single)
    : context_(memory, clock, output),
      pool_(pool),
      tiers_(std::move(tiers)),
      tier_(tiers_->nvme()),
      device_(tiers_->device()),
      shard_(std::move(shard)),
      plan_(std::move(plan)),
      single_(std::move(single)),
      ports_(memory.ranks()),
      local_(memory.ranks()),
      keeper_(context_),
      unfinished_local_(memory.ranks()),
      squares_(memory.layout().units().size()) {
  if (!tiers_->empty()) mover_.emplace(*tiers_, shard_, context_);
  for (uint32_t rank = 0; rank < memory.ranks(); ++rank) {
    if (memory.is_home_of(rank)) ports_[rank] = std::make_unique<RankPort>(context_, rank, device_);
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
  if (tier_ != nullptr) ZS_RETURN_IF_ERROR(tier_->Recover());
  if (mover_.has_value()) mover_->LookAgain();
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

// All workers have applied it, as the leader has committed it.
bool Engine::CommitsBeforeDrop() const {
  const BoardHeader& header = context_.board().header();
  const uint64_t attempt = header.attempt.load();
  return !context_.is_leader() && context_.is_island_leader() &&
         header.drop_generation.load() > header.generation.load() &&
         attempt <= header.drop_after.load() && attempt < header.drop_until.load();
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
    if (CommitsBeforeDrop()) return FollowAttempt() || Commit();
    // Ranks that come before the leader has dropped the dead generation are of the next one.
    if (!context_.IsDropDone()) return false;
    for (auto& port : ports_) {
      if (port != nullptr) port->Fail(poison);
    }
    return false;
  }
  if (device_ != nullptr && device_->IsBlank()) return false;
  // Another worker may be about to say why: then it rings.
  if (device_ != nullptr && !CheckDataPlane()) return !context_.poison().ok();
  bool progress = FollowAttempt();
  IsMirrored();
  progress |= MergeDirty();
  progress |= CopyPuts();
  progress |= CopyShards();
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
  sums_awaited_since_.reset();
  context_.MarkAllDirty(context_.me());
  return true;
}

bool Engine::CopyPuts() {
  bool progress = false;
  const Board& board = context_.board();
  // What a decided step reads in another tier stays there until it is committed.
  if (!tiers_->empty() && !AtBoundary()) return false;
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

// To ranks whose gathers wait for them.
bool Engine::CopyShards() {
  if (!HasNvmeParameters(context_.memory().config()) || !AtBoundary()) return false;
  bool progress = false;
  for (auto& port : ports_) {
    if (port == nullptr) continue;
    const std::vector<RankPort::WantedShard> wanted = port->WantedShards();
    if (wanted.empty()) continue;
    std::vector<Shard::Target> targets;
    for (const RankPort::WantedShard& shard : wanted) targets.push_back(shard.target);
    if (const absl::Status status = shard_.CopyShards(targets); !status.ok()) {
      context_.Poison(
          Annotate(status, absl::StrCat("parameters of job ", context_.memory().start().job())));
      return progress;
    }
    ZS_FAULT_POINT("worker.device.gather.before_copied");
    port->HasCopied(wanted);
    progress = true;
  }
  return progress;
}

void Engine::SetInitialized(uint32_t unit) {
  context_.board().initialized(context_.me(), unit).store(1, std::memory_order_release);
}

bool Engine::AtBoundary() const {
  const Board& board = context_.board();
  return board.header().decision.attempt.load() != board.attempt() && !mirroring_;
}

}  // namespace zeroshard
