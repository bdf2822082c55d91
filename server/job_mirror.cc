// A GPU is lost with what it held: the job goes back to its last mirror.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/job_decider.h"

namespace zeroshard {

void Decider::On(const DeviceLost& in) {
  const WorkerState& worker = next_.workers[in.worker];
  if (worker.incarnation != in.incarnation || next_.phase == JobPhase::kFailed) return;
  const std::string lost = absl::StrCat("device lost on ", WorkerName(in.worker));
  // What was never ready held nothing; its successor tries the device again.
  if (!worker.was_ready || (next_.going_back.has_value() && in.mirror == next_.going_back)) {
    return Say(absl::StrCat(lost, ": ", in.why));
  }
  if (!in.mirror.has_value()) {
    return Fail(absl::DataLossError(
        absl::StrCat(lost, " of ", Job(), ": ", in.why,
                     ": what it held is lost, and there is no mirror of it; ", in.advice)));
  }
  if (next_.spans) return LoseOnOneNode(lost, in.why);
  // The one that it was going back to is damaged.
  const bool earlier = next_.going_back.has_value();
  next_.going_back = in.mirror;
  const std::string sentence =
      absl::StrCat(lost, ": the job goes back to step ", in.mirror->step,
                   earlier ? ", the mirror before the last" : ", its last mirror");
  if (!Ranks(RankPhase::kAttached).empty()) Poison(absl::AbortedError(sentence));
  Say(absl::StrCat(sentence, ": ", in.why));
  Emit("going-back", sentence);
}

// Which state the others can go back to is not known here: their generation ends, and the daemons
// agree on it when all ranks wait.
void Decider::LoseOnOneNode(const std::string& lost, const std::string& why) {
  if (next_.phase == JobPhase::kLeaving) return End(absl::StrCat(lost, ": ", why));
  next_.going_back.reset();
  next_.lost = lost;
  const std::string sentence = absl::StrCat(lost, ": the job goes back to its last mirror");
  if (!next_.parted) {
    Poison(absl::AbortedError(sentence));
    if (next_.phase != JobPhase::kReady) Part();
  }
  Say(absl::StrCat(sentence, ": ", why));
}

void Decider::On(const GoBackAgreed& in) {
  if (!next_.parted || next_.phase == JobPhase::kFailed) return;
  next_.missing_nodes.clear();
  next_.going_back = in.mirror;
  next_.goes_back_as = in.committed_as;
  const std::string sentence = absl::StrCat(in.lost, ": the job goes back to step ", in.mirror.step,
                                            ", the newest one that the mirrors of all nodes hold");
  Say(sentence);
  Emit("going-back", sentence);
  if (WorkersReady()) actions_.push_back(GoBack{in.mirror, in.committed_as});
}

void Decider::On(const WentBack&) {
  if (!next_.going_back.has_value() || !WorkersReady()) return;
  const std::string back = absl::StrCat("went back to step ", next_.going_back->step);
  Say(back);
  Emit("went-back", back);
  next_.going_back.reset();
  next_.lost.clear();
  if (next_.spans) return;                           // the daemons agree on what comes next
  if (!Ranks(RankPhase::kAttached).empty()) return;  // their generation is dropped when they left
  DropGeneration();
  const bool wanted = next_.phase == JobPhase::kStarting || next_.phase == JobPhase::kReady;
  if (!wanted || Ranks(RankPhase::kWaiting).empty()) return;
  AttachWaiting();
  if (reason_ != back) Say(absl::StrCat(back, "; ", reason_));
}

}  // namespace zeroshard
