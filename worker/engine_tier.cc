// The engine's part in tiers: what a step seals, what moves between steps, what is counted.
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "base/status.h"
#include "worker/engine.h"

namespace zeroshard {
namespace {

// Worker 0 may wait for the drive before it.
constexpr absl::Duration kResumePatience = absl::Seconds(120);
constexpr uint64_t kNoGeneration = ~uint64_t{0};
constexpr absl::Duration kRestOfFailedStep = absl::Seconds(1);

}  // namespace

bool Engine::IsPowerSafe() const {
  return tier_ != nullptr &&
         context_.memory().config().nvme().durability() == model::v1::DURABILITY_POWER;
}

// Before this worker says that it is ready for the step, so that no worker writes to slots of the
// earlier manifest before all have this one. False when it cannot be done, or not yet.
bool Engine::SealCommitted() {
  const Board& board = context_.board();
  for (uint32_t rank = 0; rank < context_.memory().ranks(); ++rank) {
    const uint64_t posted = board.rank(rank).put_tag.load(std::memory_order_acquire);
    if (board.put_done(context_.me(), rank).load() != posted) return false;
  }
  if (!tier_->NeedsSeal(PutsPosted())) return true;
  NoteAttempt();
  const absl::Status status = tier_->SealCommitted(JobState().SerializeAsString(), PutsPosted());
  if (!status.ok()) FailStep(status);
  return status.ok();
}

// When all ranks have arrived: the same for all workers until the step is committed, because ranks
// that have arrived post no puts.
uint64_t Engine::PutsPosted() const {
  uint64_t puts = 0;
  for (uint32_t rank = 0; rank < context_.memory().ranks(); ++rank) {
    puts += context_.board().rank(rank).put_tag.load(std::memory_order_acquire);
  }
  return puts;
}

absl::Status Engine::Seal() {
  if (!IsPowerSafe()) return absl::OkStatus();
  // Also of a step that changed nothing: its numbers are part of the state.
  ZS_RETURN_IF_ERROR(tier_->Open(attempt_, context_.board().numbers().step + 1));
  return tier_->Seal(StateAfterStep().SerializeAsString(), PutsPosted());
}

// Before ranks are served: the leader sets the board to the resumed state, each worker makes the
// parameters of its shards from their masters, which verifies every image, and then says in its
// manifest that the job goes on from here.
absl::Status Engine::Resume(uint64_t committed) {
  records::v1::JobState state;
  if (!state.ParseFromString(tier_->resumed_extra())) {
    return absl::DataLossError("the job's numbers in the manifest are not readable");
  }
  const Board& board = context_.board();
  if (context_.is_leader()) board.header().attempt.store(committed);
  ZS_RETURN_IF_ERROR(FinishRestore(state, /*parameters_only=*/false));
  const absl::Duration deadline = context_.now() + kResumePatience;
  while (board.committed_attempt() != committed) {
    if (context_.now() > deadline) {
      return absl::UnavailableError("worker 0 has not resumed the job's numbers");
    }
    context_.memory().beats().fetch_add(1, std::memory_order_relaxed);
    context_.SleepFor(absl::Milliseconds(1));
  }
  ZS_RETURN_IF_ERROR(shard_.RestoreParameters());
  return tier_->ConfirmResume();
}

uint64_t Engine::RankActivity() const {
  uint64_t activity = 0;
  for (uint32_t rank = 0; rank < context_.memory().ranks(); ++rank) {
    activity += context_.board().rank(rank).activity.load();
  }
  return activity;
}

// The leader's drop may be seen before the server's word of it.
void Engine::NoteDrop(uint64_t generation) {
  if (generation <= dropped_) return;
  dropped_ = generation;
  activity_at_drop_ = RankActivity();
}

bool Engine::IsAwaited() const {
  const Board& board = context_.board();
  if (RankActivity() != activity_at_drop_) return true;
  for (uint32_t rank = 0; rank < context_.memory().ranks(); ++rank) {
    if (board.rank(rank).attached.load() > dropped_) return true;
  }
  return false;
}

bool Engine::MayApply() {
  NoteDrop(context_.board().header().generation.load());
  const bool may = context_.now() >= retry_at_ || IsAwaited() ||
                   context_.board().header().generation.load() != retrying_;
  if (may) NoteAttempt();
  return may;
}

void Engine::NoteAttempt() { awaited_at_ = IsAwaited() ? dropped_ : kNoGeneration; }

void Engine::FailStep(const absl::Status& status) {
  if (GoesBack()) return;
  const Board& board = context_.board();
  const uint64_t generation = board.header().generation.load();
  NoteDrop(generation);
  // While nobody is there nobody is told: whoever comes next, also during the attempt, is told of a
  // fresh error, or of none.
  if (awaited_at_ != dropped_) {
    retry_at_ = context_.now() + kRestOfFailedStep;
    if (std::exchange(retrying_, generation) == generation) return;
    return LogWarn(absl::StrCat("step ", board.numbers().step + 1, " of job ",
                                context_.memory().start().job(),
                                " is tried again now and then: ", status.message()));
  }
  retrying_ = kNoGeneration;
  context_.Poison(
      Annotate(status, absl::StrCat("step ", context_.board().numbers().step + 1, " of job ",
                                    context_.memory().start().job(), " is not applied by worker ",
                                    context_.me(), "; it is tried again once all ranks are gone")));
}

void Engine::OnMove(const internal::v1::MoveStates& command) {
  // What is on the host does not survive the loss of power.
  if (mover_.has_value() && !IsPowerSafe()) mover_->OnCommand(command);
}

void Engine::MoveStates() {
  if (device_ != nullptr && device_->IsBlank()) return;
  if (mover_.has_value() && AtBoundary()) mover_->Advance();
}

void Engine::AddTierStats(internal::v1::Stats& stats) const {
  if (mover_.has_value()) stats.set_move_left_bytes(mover_->LeftBytes());
  if (device_ != nullptr) {
    const DeviceCountersOfWorker counters = device_->counters();
    stats.set_gpu_state_bytes(tiers_->HeldBytes(*device_));
    stats.set_gpu_free_bytes(counters.free_bytes);
    stats.set_gpu_busy_us(absl::ToInt64Microseconds(counters.busy));
    stats.set_gpu_mirror_us(absl::ToInt64Microseconds(counters.mirror));
    stats.set_gpu_damaged_mirrors(counters.damaged_mirrors);
    stats.set_gpu_mirror_step(device_->LastMirror().value_or(MirrorPoint{}).step);
  }
  if (tier_ == nullptr) return;
  const TierCounters counters = tier_->counters();
  for (const TierPathCounters& path : counters.paths) {
    internal::v1::NvmePathStats& entry = *stats.add_nvme_paths();
    entry.set_read_bytes(path.read_bytes);
    entry.set_written_bytes(path.written_bytes);
    entry.set_busy_us(absl::ToInt64Microseconds(path.busy));
    entry.set_errors(path.errors);
  }
  stats.set_nvme_pass_us(absl::ToInt64Microseconds(counters.passes));
  stats.set_nvme_wait_us(absl::ToInt64Microseconds(counters.waiting));
  stats.set_nvme_seal_us(absl::ToInt64Microseconds(counters.seals));
  stats.set_nvme_compute_us(absl::ToInt64Microseconds(counters.compute));
  stats.set_nvme_retries(counters.retries);
  stats.set_nvme_damaged_images(counters.damaged_images);
  stats.set_nvme_rebuilt_images(counters.rebuilt_images);
  stats.set_nvme_failed_slots(counters.failed_slots);
  stats.set_nvme_state_bytes(tiers_->HeldBytes(*tier_));
}

}  // namespace zeroshard
