// The part of JobHost that concerns lost GPUs and mirrors of what they held.
#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "server/job_host.h"
#include "server/job_metrics.h"

namespace zeroshard {

// What the last restore left behind is no place to go back to: until the first step after it all
// that counts are mirrors of what was restored.
//
// A job that is going back already goes to that mirror, or, when that is damaged, to an earlier one
// that all workers have: what they took since is of the same history, and earlier ones of another
// history are gone by then. The same holds after it has gone back, and in jobs that span daemons,
// which do nothing else that is a restore.
std::vector<MirrorPoint> JobHost::CommonMirrors() const {
  if (!regions_) return {};
  std::vector<MirrorPoint> common = CommonPoints(regions_->Mirrors());
  if (state_.going_back.has_value()) {
    std::erase_if(common, [&](const MirrorPoint& point) {
      return point.attempt > state_.going_back->attempt;
    });
    return common;
  }
  const Board& board = regions_->board();
  const uint64_t committed = board.committed_attempt();
  const bool restored = board.header().decision.attempt.load() < committed;
  if (restored && committed != went_back_as_ && !plan_->placement.spans()) {
    std::erase_if(common, [&](const MirrorPoint& point) { return point.attempt < committed; });
  }
  return common;
}

void JobHost::OnDeviceLost(uint32_t w, uint32_t incarnation,
                           const internal::v1::DeviceLost& message) {
  LogError(absl::StrCat("job ", state_.name, ": worker ", Global(w), ": ", message.message()));
  if (!data_plane() || !regions_) return;
  workers_[w].fatal = absl::AbortedError(message.message());
  // Its successor makes new memory, and has nothing in it yet.
  regions_->ForgetDevice(Global(w));
  workers_[w].went_back = 0;
  DeviceLost lost;
  lost.worker = w;
  lost.incarnation = incarnation;
  lost.why = message.message();
  lost.mirror = NewestOf(CommonMirrors());
  const std::string remove = absl::StrCat("`zeroshard remove ", state_.name, "`, start it anew");
  lost.advice = last_checkpoint_.empty()
                    ? absl::StrCat(remove, "; it has saved no checkpoint since it began")
                    : absl::StrCat(remove, " and restore its last checkpoint, ", last_checkpoint_);
  if (plan_->config.gpu_mirror_steps() == 0) {
    absl::StrAppend(&lost.advice, " (zeroshard.gpu_mirror_steps keeps mirrors)");
  }
  Feed(std::move(lost));
}

void JobHost::Do(const GoBack& action) {
  go_back_ = next_request_++;
  internal::v1::ToWorker message;
  internal::v1::GoBack& command = *message.mutable_go_back();
  command.set_request(go_back_);
  command.set_attempt(action.mirror.attempt);
  command.set_committed_as(action.committed_as);
  command.mutable_poison()->set_generation(state_.generation);
  command.mutable_poison()->set_code(static_cast<uint32_t>(absl::StatusCode::kAborted));
  command.mutable_poison()->set_message(
      absl::StrCat("device lost: the job goes back to step ", action.mirror.step));
  for (Worker& worker : workers_) ++worker.file_commands;  // it takes its time
  SendToWorkers(message);
}

void JobHost::OnWentBack(uint32_t w, const internal::v1::WentBack& message) {
  if (workers_[w].file_commands > 0) --workers_[w].file_commands;
  workers_[w].went_back = message.request();
  const bool all = std::all_of(workers_.begin(), workers_.end(),
                               [&](const Worker& worker) { return worker.went_back == go_back_; });
  if (!all || !state_.going_back.has_value()) return;
  Feed(WentBack{});
  if (state_.going_back.has_value()) return;  // a worker is gone meanwhile
  ++times_gone_back_;
  went_back_as_ = regions_->board().committed_attempt();
  if (environment_.metrics != nullptr) environment_.metrics->CountGoneBack(state_.name);
}

void JobHost::NoteCheckpoint(const std::string& name, uint64_t step) {
  last_checkpoint_ = absl::StrCat("'", name, "' (step ", step, ")");
}

}  // namespace zeroshard
