// What workers, operators and the clock do to a job.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/job_decider.h"

namespace zeroshard {
namespace {

// Between the n-th death of a worker and its next start.
absl::Duration BackOff(size_t deaths) {
  return deaths <= 1 ? absl::ZeroDuration() : absl::Milliseconds(100) * (1 << (deaths - 2));
}

}  // namespace

std::string Decider::WorkersNotReady() const {
  if (!next_.missing_nodes.empty()) {
    return absl::StrCat("no ranks have attached yet at ", absl::StrJoin(next_.missing_nodes, ", "));
  }
  std::vector<std::string> lines;
  for (size_t w = 0; w < next_.workers.size(); ++w) {
    const WorkerState& worker = next_.workers[w];
    if (worker.phase == WorkerPhase::kReady) continue;
    lines.push_back(absl::StrCat(WorkerName(w), " is ", WorkerPhaseName(worker.phase),
                                 worker.last_exit.empty() ? "" : " (before: ", worker.last_exit,
                                 worker.last_exit.empty() ? "" : ")"));
  }
  return absl::StrJoin(lines, "; ");
}

void Decider::Poison(const absl::Status& status) {
  if (!next_.poison.ok()) return;
  if (!next_.data_plane) FailWaiting(status);  // else they are of the next generation
  next_.poison = status;
  Say(absl::StrCat("generation ", next_.generation, " is dead: ", status.message()));
  actions_.push_back(PoisonGeneration{status});
  Emit(absl::IsAborted(status) ? "aborted" : "failed", std::string(status.message()));
}

void Decider::Fail(const absl::Status& status) {
  FailWaiting(status);
  if (!next_.ever_ready) return End(std::string(status.message()));
  Poison(status);
  next_.phase = JobPhase::kFailed;
  Say(std::string(status.message()));
}

void Decider::End(const std::string& why) {
  next_.phase = JobPhase::kEnded;
  Say(why);
  Emit("ended", why);
  actions_.push_back(EndJob{});
}

void Decider::On(const StartFailed& in) {
  const bool starting =
      next_.phase == JobPhase::kStarting || (next_.phase == JobPhase::kForming && next_.started);
  if (!starting || next_.ever_ready) return;
  Fail(in.status);
}

void Decider::On(const WorkerReady& in) {
  WorkerState& worker = next_.workers[in.worker];
  if (worker.incarnation != in.incarnation || worker.phase != WorkerPhase::kStarting) return;
  worker.phase = WorkerPhase::kReady;
  worker.was_ready = true;
  Say(absl::StrCat(WorkerName(in.worker), " is ready"));
  Emit("worker-ready", reason_);
  if (next_.going_back.has_value()) {
    if (WorkersReady()) actions_.push_back(GoBack{*next_.going_back, next_.goes_back_as});
    return;
  }
  // What its predecessor was told is told to the workers of other nodes by this one.
  if (next_.spans && next_.data_plane && !next_.poison.ok()) {
    actions_.push_back(PoisonGeneration{next_.poison});
  }
  const bool wanted = next_.phase == JobPhase::kStarting || next_.phase == JobPhase::kReady;
  if (wanted && !Ranks(RankPhase::kWaiting).empty()) AttachWaiting();
}

void Decider::StartWorkerNow(uint32_t index) {
  WorkerState& worker = next_.workers[index];
  worker.phase = WorkerPhase::kStarting;
  ++worker.incarnation;
  ++worker.restarts;
  worker.start_at = absl::InfiniteDuration();
  actions_.push_back(StartWorker{index, worker.incarnation, worker.was_ready});
}

bool Decider::AlwaysHangs(WorkerState& worker, const WorkerDied& in) const {
  if (!in.stuck) return false;
  std::erase_if(worker.hangs, [&](Instant at) {
    return at + kHangWindow <= now_ || worker.hung_step != in.step;
  });
  worker.hung_step = in.step;
  worker.hangs.push_back(now_);
  return worker.hangs.size() > kMaxHangs;
}

void Decider::On(const WorkerDied& in) {
  WorkerState& worker = next_.workers[in.worker];
  if (worker.incarnation != in.incarnation || worker.phase == WorkerPhase::kDead ||
      next_.phase == JobPhase::kFailed || next_.phase == JobPhase::kEnded) {
    return;
  }
  worker.phase = WorkerPhase::kDead;
  worker.last_exit = in.reason;
  std::erase_if(worker.deaths, [&](Instant at) { return at + kRestartWindow <= now_; });
  worker.deaths.push_back(now_);
  const std::string sentence = absl::StrCat(WorkerName(in.worker), " died: ", in.reason);
  Say(sentence);
  Emit("worker-died", sentence);
  if (!in.fatal.ok()) {
    return Fail(absl::Status(in.fatal.code(), absl::StrCat(WorkerName(in.worker), " of ", Job(),
                                                           ": ", in.fatal.message())));
  }
  if (AlwaysHangs(worker, in)) {
    return Fail(absl::DeadlineExceededError(
        absl::StrCat(WorkerName(in.worker), " of ", Job(), " got stuck ", worker.hangs.size(),
                     " times at step ", in.step, ", last: ", in.reason)));
  }
  if (worker.deaths.size() > kMaxRestarts) {
    return Fail(absl::InternalError(absl::StrCat(
        WorkerName(in.worker), " of ", Job(), " died ", worker.deaths.size(), " times within ",
        absl::FormatDuration(kRestartWindow), ", last: ", in.reason)));
  }
  const absl::Duration wait = BackOff(worker.deaths.size());
  worker.start_at = now_ + wait;
  if (wait == absl::ZeroDuration()) return StartWorkerNow(in.worker);
  Say(absl::StrCat(sentence, "; starting it again in ", absl::FormatDuration(wait)));
}

void Decider::On(const GenerationPoisoned& in) {
  if (in.generation < next_.alive_since || next_.going_back.has_value()) return;
  if (next_.data_plane && next_.spans && next_.ever_ready) return OnAgreedGenerationDead(in);
  if (next_.phase == JobPhase::kReady) return Poison(in.status);
  if (next_.phase == JobPhase::kStarting) return Fail(in.status);
  if (next_.phase == JobPhase::kLeaving) return End(std::string(in.status.message()));
  if (next_.phase == JobPhase::kIdle && next_.spans) Fail(in.status);
}

void Decider::On(const NodesMissing& in) {
  if (next_.missing_nodes == in.nodes) return;
  next_.missing_nodes = in.nodes;
  Say(in.nodes.empty() ? std::string("all nodes are here")
                       : absl::StrCat("waits for ", absl::StrJoin(in.nodes, ", ")));
  if (next_.phase == JobPhase::kStarting) AttachWaiting();
}

void Decider::On(const NodesLeft&) {
  if (next_.phase == JobPhase::kLeaving) End("the ranks of all nodes detached");
}

// One that spans daemons dies on all of them, whatever this one's ranks do.
void Decider::OnAgreedGenerationDead(const GenerationPoisoned& in) {
  if (next_.phase == JobPhase::kLeaving) return End(std::string(in.status.message()));
  if (next_.phase == JobPhase::kFailed || next_.phase == JobPhase::kEnded) return;
  // What was lost there does not come back, nor does a node that could not be reached for long.
  if (absl::IsDataLoss(in.status) || in.nodes_lost) return Fail(in.status);
  if (next_.parted) return;
  Poison(in.status);
  if (next_.phase != JobPhase::kReady) next_.parted = true;
}

void Decider::On(const GenerationAgreed& in) {
  if (!next_.parted || next_.phase == JobPhase::kFailed) return;
  next_.parted = false;
  next_.missing_nodes.clear();
  next_.poison = absl::OkStatus();
  next_.generation = in.generation;
  next_.alive_since = in.generation;
  actions_.push_back(DropAttempt{});
  Say(absl::StrCat("all nodes agree on generation ", in.generation));
  // Lost since this node was asked; the others begin what cannot go on.
  if (!next_.lost.empty()) return LoseOnOneNode(next_.lost, "before the generation began");
  if (next_.phase == JobPhase::kStarting) AttachWaiting();
}

void Decider::On(const NodeLost& in) {
  if (next_.phase == JobPhase::kLeaving) return End(std::string(in.status.message()));
  if (next_.phase == JobPhase::kFailed || next_.phase == JobPhase::kEnded) return;
  Fail(in.status);
}

bool WantsGeneration(const JobState& state) {
  return state.parted && state.phase == JobPhase::kStarting && !state.going_back.has_value();
}

void Decider::On(const RemoveRequested& in) {
  if (PresentRanks(next_) > 0 && !in.force) {
    std::vector<std::string> present;
    for (uint32_t rank = 0; rank < next_.ranks.size(); ++rank) {
      const RankPhase phase = next_.ranks[rank].phase;
      if (phase == RankPhase::kAttached || phase == RankPhase::kWaiting) {
        present.push_back(Describe(rank));
      }
    }
    actions_.push_back(RefuseRemove{absl::FailedPreconditionError(
        absl::StrCat(Job(), " is in use by ", absl::StrJoin(present, ", "),
                     "; end them first, or remove it with --force"))});
    return Say("refused to remove the job while ranks are attached");
  }
  const absl::Status removed = absl::CancelledError(absl::StrCat(Job(), " was removed"));
  FailWaiting(removed);
  if (!Ranks(RankPhase::kAttached).empty()) Poison(removed);
  End("removed by an operator");
}

void Decider::CheckWaitDeadlines() {
  const std::vector<uint32_t> waiting = Ranks(RankPhase::kWaiting);
  const bool late = std::any_of(waiting.begin(), waiting.end(),
                                [&](uint32_t r) { return next_.ranks[r].deadline <= now_; });
  if (!late) return;
  if (next_.phase == JobPhase::kForming) {
    std::vector<uint32_t> missing;
    for (uint32_t i = 0; i < next_.spec.local_ranks; ++i) {
      const uint32_t r = next_.first_rank + i;
      if (next_.ranks[r].phase != RankPhase::kWaiting) missing.push_back(r);
    }
    const std::string text =
        absl::StrCat(Job(), ": only ", waiting.size(), " of ", next_.spec.local_ranks,
                     " ranks attached in time; missing: ", RankList(missing));
    FailWaiting(absl::DeadlineExceededError(text));
    Say(text);
    if (!next_.ever_ready) return End(text);
    next_.phase = JobPhase::kIdle;
    return;
  }
  if (next_.data_plane && next_.phase == JobPhase::kReady) {
    const std::string held =
        absl::StrCat(Job(), ": the next generation cannot form: ", StillInside(),
                     " neither attached again nor ended");
    Say(held);
    return FailWaiting(absl::DeadlineExceededError(held));
  }
  const std::string text =
      absl::StrCat(Job(), ": the workers were not ready in time: ", WorkersNotReady(),
                   next_.ever_ready || next_.limits.first_work.empty() ? "" : "; they first ",
                   next_.ever_ready ? "" : next_.limits.first_work);
  FailWaiting(absl::DeadlineExceededError(text));
  Say(text);
  CheckAllGone();
}

void Decider::CheckRejoinDeadlines() {
  // Nobody is kept waiting by a dead rank of a job without ranks, unless they are on other nodes.
  const bool awaited = next_.phase == JobPhase::kIdle ? next_.spans && !next_.data_plane
                                                      : next_.phase == JobPhase::kReady &&
                                                            !Ranks(RankPhase::kAttached).empty();
  if (!awaited) return;
  std::vector<std::string> late;
  for (const uint32_t rank : Ranks(RankPhase::kDead)) {
    if (next_.ranks[rank].deadline <= now_) late.push_back(Describe(rank));
  }
  if (late.empty()) return;
  const absl::Status status = absl::UnavailableError(absl::StrCat(
      absl::StrJoin(late, ", "), " of ", Job(), " died and no successor attached within ",
      absl::FormatDuration(next_.limits.rejoin_timeout)));
  next_.phase == JobPhase::kIdle ? Fail(status) : Poison(status);
}

void Decider::On(const Tick&) {
  if (next_.phase == JobPhase::kLeaving && next_.leave_deadline <= now_) {
    return End(absl::StrCat("the ranks of this node detached; those of others did not within ",
                            absl::FormatDuration(next_.limits.rejoin_timeout)));
  }
  for (uint32_t w = 0; w < next_.workers.size(); ++w) {
    if (next_.workers[w].phase == WorkerPhase::kDead && next_.workers[w].start_at <= now_ &&
        next_.phase != JobPhase::kFailed) {
      StartWorkerNow(w);
      Say(absl::StrCat("starting ", WorkerName(w), " again (number ", next_.workers[w].restarts,
                       ")"));
    }
  }
  CheckWaitDeadlines();
  if (next_.phase != JobPhase::kEnded && next_.poison.ok()) CheckRejoinDeadlines();
}

}  // namespace zeroshard
