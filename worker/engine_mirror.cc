// Mirrors of what the devices hold: when they are taken, and how the job goes back to one.
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/log.h"
#include "base/status.h"
#include "worker/engine.h"

namespace zeroshard {

// After every k-th step; at the first boundary at which there is none; and after a restore, since
// the job will not go back to what it had before.
//
// A worker says that it is ready for a step only with its mirror whole, so all workers have it once
// a step is decided, and what changes states (a decided step, puts, moves, restores) finds no
// mirror under way. While a step is decided nothing is due: a predecessor may have applied a part
// of it.
bool Engine::IsMirrorDue() const {
  const Board& board = context_.board();
  const uint64_t committed = board.committed_attempt();
  const uint64_t decided = board.header().decision.attempt.load();
  const uint64_t step = board.numbers().step;
  if (step == 0 || decided == board.attempt() || committed == unmirrored_) return false;
  const std::optional<MirrorPoint> last = device_->LastMirror();
  if (!last.has_value()) return true;
  const bool restored = decided < committed;
  return last->attempt != committed &&
         (restored || step % context_.memory().config().gpu_mirror_steps() == 0);
}

bool Engine::IsMirrored() {
  if (context_.memory().mirror_plan() == nullptr) return true;
  const Board& board = context_.board();
  if (!mirroring_) {
    if (!IsMirrorDue()) return true;
    const MirrorPoint point = {board.committed_attempt(), board.numbers().step};
    mirrors_anew_ = board.header().decision.attempt.load() < point.attempt && !went_back_;
    std::string numbers;
    if (context_.is_island_leader()) numbers = JobState().SerializeAsString();
    // Another commit in between: what was read is of neither.
    if (board.committed_attempt() != point.attempt) return false;
    if (const absl::Status status = device_->StartMirror(point, std::move(numbers), pool_);
        !status.ok()) {
      FailMirror(status);
      return device_->health().ok();
    }
    mirroring_ = true;
  }
  const absl::StatusOr<bool> done = device_->PollMirror();
  if (done.ok() && !*done) return false;
  mirroring_ = false;
  if (!done.ok()) FailMirror(done.status());
  if (done.ok() && mirrors_anew_) {
    device_->ForgetMirrorsBefore(device_->LastMirror().value_or(MirrorPoint{}).attempt);
  }
  return device_->health().ok();
}

// The job goes on without this mirror, unless the device is lost.
void Engine::FailMirror(const absl::Status& status) {
  unmirrored_ = context_.board().committed_attempt();
  LogWarn(absl::StrCat("no mirror of step ", context_.board().numbers().step, " job=",
                       context_.memory().start().job(), " error=\"", status.message(), "\""));
}

absl::Status Engine::GoBack(const internal::v1::GoBack& command) {
  OnPoison(absl::Status(static_cast<absl::StatusCode>(command.poison().code()),
                        command.poison().message()),
           command.poison().generation());
  mirroring_ = false;
  ZS_ASSIGN_OR_RETURN(const std::string numbers, device_->LoadMirror(command.attempt(), pool_));
  records::v1::JobState state;
  if (context_.is_island_leader() && !state.ParseFromString(numbers)) {
    return absl::DataLossError("the job's numbers in the mirror are not readable");
  }
  ZS_FAULT_POINT("worker.device.mirror.before_numbers");
  ZS_RETURN_IF_ERROR(FinishRestore(state, /*parameters_only=*/false, command.committed_as()));
  went_back_ = true;
  LogInfo(absl::StrCat("went back job=", context_.memory().start().job(), " worker=", context_.me(),
                       " attempt=", command.attempt()));
  return absl::OkStatus();
}

}  // namespace zeroshard
