// The engine in jobs with a data plane: the ranks sum on their GPUs, the worker waits for them and
// steps (docs/device.md).
#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status.h"
#include "worker/engine.h"
#include "worker/merge_records.h"

namespace zeroshard {

// The ranks' gradients of the next micro-step, once all of them have said what they have.
bool Engine::MergePresence(uint32_t unit) {
  MergeRecord& record = context_.board().merged(context_.me(), unit);
  const Tag tag = NextTag(record, attempt_);
  Presence present = PresenceBefore(record, tag);
  for (uint32_t rank = 0; rank < context_.memory().ranks(); ++rank) {
    // The order of the two reads matters: contributions are posted before the micro end.
    const Tag end = context_.board().rank(rank).micro_end.load(std::memory_order_acquire);
    const Contribution& contribution = context_.board().contribution(unit, rank);
    if (contribution.tag.load(std::memory_order_acquire) == tag) {
      for (uint32_t word = 0; word < kPresenceWords; ++word) {
        present[word] |= contribution.present[word];
      }
    } else if (AttemptOf(end) != AttemptOf(tag) || end < tag) {
      return false;
    }
  }
  AdvanceRecord(record, tag, present);
  return true;
}

bool Engine::HasSums() {
  if (device_->HasSums(attempt_)) {
    sums_awaited_since_.reset();
    return true;
  }
  if (awaited_sums_ == attempt_) return false;
  awaited_sums_ = attempt_;
  sums_awaited_since_ = context_.now();
  if (const absl::Status status = device_->AwaitSums(attempt_); !status.ok()) {
    Abort(std::string(status.message()));
  }
  return false;
}

absl::StatusOr<ExactSum> Engine::SquaresOnDevice(Tag last) {
  std::vector<DeviceSquares> units;
  const PartitionPlan& plan = context_.memory().plan();
  for (uint32_t unit = 0; unit < context_.layout().units().size(); ++unit) {
    if (!plan.unit(unit).has_optimizer || plan.unit(unit).slice.size() == 0) continue;
    const Presence present = PresenceBefore(context_.board().merged(context_.me(), unit), last);
    if (present != Presence{}) units.push_back({unit, present});
  }
  ExactSum sum;
  ZS_RETURN_IF_ERROR(device_->AddSquares(units, pool_, sum));
  sum.Normalize();
  return sum;
}

void Engine::Abort(const std::string& why) {
  if (GoesBack()) return;
  context_.Poison(absl::AbortedError(
      absl::StrCat("step ", context_.board().numbers().step + 1, " aborted: ", why)));
}

bool Engine::HasBegun(uint32_t rank) const {
  const Board& board = context_.board();
  const uint64_t attempt = board.attempt();
  if (AttemptOf(board.rank(rank).micro_end.load()) == attempt ||
      board.rank(rank).arrival.load() == attempt) {
    return true;
  }
  for (uint32_t unit = 0; unit < context_.layout().units().size(); ++unit) {
    if (AttemptOf(board.contribution(unit, rank).tag.load()) == attempt) return true;
  }
  return false;
}

// Whether the data plane of this worker's rank is well. What it said in a generation that is over
// does not count.
bool Engine::CheckDataPlane() {
  const absl::StatusCode error = device_->RankError();
  if (error == absl::StatusCode::kOk) return true;
  const Board& board = context_.board();
  if (board.rank(context_.me()).attached.load() <= board.header().generation.load()) return true;
  Abort(absl::StrCat("the data plane of rank ", context_.me(),
                     " failed: ", absl::StatusCodeToString(error)));
  return false;
}

// The rank has arrived, and its device does not come to an end.
void Engine::CheckSums(absl::Duration timeout) {
  if (!sums_awaited_since_.has_value() || awaited_sums_ != attempt_) return;
  if (context_.now() - *sums_awaited_since_ < timeout) return;
  sums_awaited_since_.reset();
  Abort(absl::StrCat("the device of rank ", context_.me(), " has not summed its gradients within ",
                     absl::FormatDuration(timeout)));
}

}  // namespace zeroshard
