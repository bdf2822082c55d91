// The engine's part in the NVMe tier: what a step seals, what moves between steps, what is counted.
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/engine.h"

namespace zeroshard {

bool Engine::IsPowerSafe() const {
  return tier_ != nullptr &&
         context_.memory().config().nvme().durability() == model::v1::DURABILITY_POWER;
}

absl::Status Engine::SealCommitted() {
  if (!IsPowerSafe() || !tier_->NeedsSeal()) return absl::OkStatus();
  return tier_->SealCommitted(JobState().SerializeAsString());
}

absl::Status Engine::Seal() {
  if (!IsPowerSafe()) return absl::OkStatus();
  // Also of a step that changed nothing: its numbers are part of the state.
  ZS_RETURN_IF_ERROR(tier_->Open(attempt_, context_.board().numbers().step + 1));
  return tier_->Seal(StateAfterStep().SerializeAsString());
}

void Engine::FailStep(const absl::Status& status) {
  context_.Poison(
      Annotate(status, absl::StrCat("step ", context_.board().numbers().step + 1, " of job ",
                                    context_.memory().start().job(), " is not applied by worker ",
                                    context_.me(), "; it is tried again once all ranks are gone")));
}

void Engine::OnMove(const internal::v1::MoveStates& command) {
  if (mover_.has_value()) mover_->OnCommand(command);
}

void Engine::MoveStates() {
  if (mover_.has_value() && AtBoundary()) mover_->Advance();
}

void Engine::AddTierStats(internal::v1::Stats& stats) const {
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
  stats.set_nvme_compute_us(absl::ToInt64Microseconds(counters.compute));
  stats.set_nvme_retries(counters.retries);
  stats.set_nvme_damaged_images(counters.damaged_images);
  stats.set_nvme_failed_slots(counters.failed_slots);
  stats.set_nvme_state_bytes(tier_->HeldBytes());
  stats.set_move_left_bytes(mover_->LeftBytes());
}

}  // namespace zeroshard
