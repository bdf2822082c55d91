#include "server/job.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace zeroshard {
namespace {

// Between the n-th death of a worker and its next start.
absl::Duration BackOff(size_t deaths) {
  return deaths <= 1 ? absl::ZeroDuration() : absl::Milliseconds(100) * (1 << (deaths - 2));
}

std::string RankList(const std::vector<uint32_t>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

// One run of Decide.
class Decider {
 public:
  Decider(const JobState& state, Instant now) : next_(state), now_(now) {}

  void On(const AttachRequested& in);
  void On(const AttachCancelled& in);
  void On(const RankGone& in);
  void On(const DetachRequested& in);
  void On(const StartFailed& in);
  void On(const WorkerReady& in);
  void On(const WorkerDied& in);
  void On(const GenerationPoisoned& in);
  void On(const RemoveRequested& in);
  void On(const Tick&);

  JobDecision Take() && {
    if (!reason_.empty()) next_.reason = reason_;
    return {std::move(next_), std::move(actions_), std::move(reason_)};
  }

 private:
  // Why `in` may not attach; OK when it may.
  absl::Status Refusal(const AttachRequested& in) const;
  void Disagree(const AttachRequested& in, const std::string& difference);
  void Admit(const AttachRequested& in);
  void AttachWaiting();
  void Leave(uint32_t rank, RankPhase phase, const std::string& why);
  void CheckAllGone();
  void FailWaiting(const absl::Status& status);
  void Fail(const absl::Status& status);
  void Poison(const absl::Status& status);
  void End(const std::string& why);
  void StartWorkerNow(uint32_t worker);
  void CheckWaitDeadlines();
  void CheckRejoinDeadlines();

  std::vector<uint32_t> Ranks(RankPhase phase) const {
    std::vector<uint32_t> ranks;
    for (uint32_t r = 0; r < next_.ranks.size(); ++r) {
      if (next_.ranks[r].phase == phase) ranks.push_back(r);
    }
    return ranks;
  }
  bool WorkersReady() const {
    return std::all_of(next_.workers.begin(), next_.workers.end(),
                       [](const WorkerState& w) { return w.phase == WorkerPhase::kReady; });
  }
  // "rank 1 (process 4711)".
  std::string Describe(uint32_t rank) const {
    return absl::StrCat("rank ", rank, " (process ", next_.ranks[rank].pid, ")");
  }
  std::string Job() const { return absl::StrCat("job '", next_.name, "'"); }
  std::string WorkersNotReady() const;
  void Say(const std::string& sentence) { reason_ = sentence; }
  void Emit(const char* kind, const std::string& text) { actions_.push_back(EmitEvent{kind, text}); }

  JobState next_;
  const Instant now_;
  std::vector<JobAction> actions_;
  std::string reason_;
};

std::string Decider::WorkersNotReady() const {
  std::vector<std::string> lines;
  for (size_t w = 0; w < next_.workers.size(); ++w) {
    const WorkerState& worker = next_.workers[w];
    if (worker.phase == WorkerPhase::kReady) continue;
    lines.push_back(absl::StrCat("worker ", w, " is ", WorkerPhaseName(worker.phase),
                                 worker.last_exit.empty() ? "" : " (before: ", worker.last_exit,
                                 worker.last_exit.empty() ? "" : ")"));
  }
  return absl::StrJoin(lines, "; ");
}

absl::Status Decider::Refusal(const AttachRequested& in) const {
  if (next_.phase == JobPhase::kFailed) {
    return absl::FailedPreconditionError(
        absl::StrCat(Job(), " has failed: ", next_.reason, "; `zeroshard remove ", next_.name,
                     "` frees its memory and its name"));
  }
  if (in.rank >= next_.ranks.size()) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", in.rank, " is outside the world of ",
                                                   next_.ranks.size(), " ranks of ", Job()));
  }
  const RankState& holder = next_.ranks[in.rank];
  const bool held = holder.phase == RankPhase::kAttached || holder.phase == RankPhase::kWaiting;
  const std::string difference =
      Difference(next_.spec, "the job", *in.spec, absl::StrCat("rank ", in.rank, " now"));
  if (!difference.empty() && (next_.started || held)) {
    return absl::AlreadyExistsError(absl::StrCat(
        Job(), " exists and is another one: ", difference, "; use another job name, or end that one",
        " with `zeroshard remove ", next_.name, "`"));
  }
  if (held) {
    return absl::AlreadyExistsError(absl::StrCat("rank ", in.rank, " of ", Job(),
                                                 " is held by process ", holder.pid,
                                                 "; two processes cannot be the same rank"));
  }
  if (!next_.poison.ok()) {
    return absl::FailedPreconditionError(absl::StrCat(
        Job(), " takes new ranks once ", RankList(Ranks(RankPhase::kAttached)),
        " ended, because its generation is dead: ", next_.poison.message()));
  }
  return absl::OkStatus();
}

// A rank of a job that has nothing yet says something else than those who wait: all of them hear it now.
void Decider::Disagree(const AttachRequested& in, const std::string& difference) {
  const absl::Status status = absl::InvalidArgumentError(
      absl::StrCat("the ranks of ", Job(), " disagree: ", difference));
  actions_.push_back(FailAttach{in.attach_id, status});
  FailWaiting(status);
  End(std::string(status.message()));
}

void Decider::On(const AttachRequested& in) {
  if (absl::Status refusal = Refusal(in); !refusal.ok()) {
    actions_.push_back(FailAttach{in.attach_id, refusal});
    return Say(absl::StrCat("refused rank ", in.rank, ": ", refusal.message()));
  }
  const std::vector<uint32_t> waiting = Ranks(RankPhase::kWaiting);
  const std::string first = waiting.empty() ? "the job" : absl::StrCat("rank ", waiting.front());
  const std::string difference =
      Difference(next_.spec, first, *in.spec, absl::StrCat("rank ", in.rank));
  if (!difference.empty()) return Disagree(in, difference);
  Admit(in);
}

void Decider::Admit(const AttachRequested& in) {
  RankState& rank = next_.ranks[in.rank];
  rank = RankState{};
  rank.phase = RankPhase::kWaiting;
  rank.pid = in.pid;
  rank.attach_id = in.attach_id;
  rank.deadline = in.deadline;
  if (next_.phase == JobPhase::kIdle) next_.phase = JobPhase::kForming;
  if (next_.phase != JobPhase::kForming) {
    Say(absl::StrCat(Describe(in.rank), " waits for the workers"));
    return AttachWaiting();
  }
  const size_t present = PresentRanks(next_);
  Say(absl::StrCat(present, " of ", next_.spec.local_ranks, " ranks are here"));
  if (present < next_.spec.local_ranks) return;
  next_.phase = JobPhase::kStarting;
  if (!next_.started) {
    next_.started = true;
    next_.generation = 1;
    next_.alive_since = 1;
    for (WorkerState& worker : next_.workers) {
      worker.phase = WorkerPhase::kStarting;
      worker.incarnation = 1;
    }
    Say(absl::StrCat("all ", present, " ranks are here; starting ", next_.workers.size(),
                     " workers"));
    actions_.push_back(CreateJob{});
    return;
  }
  AttachWaiting();
}

// Once the workers are ready, whoever waits is in.
void Decider::AttachWaiting() {
  if (!WorkersReady()) return;
  const std::vector<uint32_t> waiting = Ranks(RankPhase::kWaiting);
  if (next_.ever_ready && !waiting.empty()) ++next_.generation;
  for (const uint32_t rank : waiting) {
    next_.ranks[rank].phase = RankPhase::kAttached;
    next_.ranks[rank].deadline = absl::InfiniteDuration();
    actions_.push_back(AnnounceRank{rank});
    Emit("attached", absl::StrCat(Describe(rank), " attached"));
  }
  for (const uint32_t rank : waiting) {
    actions_.push_back(ReplyAttached{rank, next_.ranks[rank].attach_id, next_.ever_ready});
  }
  next_.phase = JobPhase::kReady;
  next_.ever_ready = true;
  Say(absl::StrCat(RankList(waiting), " attached in generation ", next_.generation));
}

void Decider::On(const AttachCancelled& in) {
  for (uint32_t rank = 0; rank < next_.ranks.size(); ++rank) {
    const RankState& state = next_.ranks[rank];
    if (state.attach_id != in.attach_id) continue;
    if (state.phase == RankPhase::kWaiting || state.phase == RankPhase::kAttached) {
      return Leave(rank, RankPhase::kDead, "gave up attaching");
    }
  }
}

void Decider::On(const RankGone& in) {
  if (in.rank >= next_.ranks.size() || next_.ranks[in.rank].attach_id != in.attach_id) return;
  const RankPhase phase = next_.ranks[in.rank].phase;
  if (phase == RankPhase::kWaiting || phase == RankPhase::kAttached) {
    Leave(in.rank, RankPhase::kDead, "died");
  }
}

void Decider::On(const DetachRequested& in) {
  if (in.rank >= next_.ranks.size() || next_.ranks[in.rank].phase != RankPhase::kAttached) return;
  next_.ranks[in.rank].keep = in.keep;
  Leave(in.rank, RankPhase::kDetached, "detached");
}

void Decider::Leave(uint32_t rank, RankPhase phase, const std::string& why) {
  RankState& state = next_.ranks[rank];
  const std::string sentence = absl::StrCat(Describe(rank), " ", why);
  const bool was_attached = state.phase == RankPhase::kAttached;
  Say(sentence);
  if (!was_attached) {
    actions_.push_back(FailAttach{state.attach_id, absl::CancelledError(sentence)});
    state.phase = next_.ever_ready ? RankPhase::kDead : RankPhase::kAbsent;
    state.deadline = absl::InfiniteDuration();
    return CheckAllGone();
  }
  state.phase = phase;
  state.deadline = phase == RankPhase::kDead ? now_ + next_.limits.rejoin_timeout
                                             : absl::InfiniteDuration();
  ++next_.generation;
  actions_.push_back(AnnounceRankDied{rank, sentence});
  if (phase == RankPhase::kDead) Emit("rank-died", sentence);
  CheckAllGone();
}

void Decider::CheckAllGone() {
  if (PresentRanks(next_) > 0 || next_.phase == JobPhase::kFailed) return;
  if (!next_.ever_ready) return End(absl::StrCat(reason_, "; nobody is left"));
  const std::vector<uint32_t> detached = Ranks(RankPhase::kDetached);
  const bool keep = std::all_of(detached.begin(), detached.end(),
                                [&](uint32_t r) { return next_.ranks[r].keep; });
  if (detached.size() == next_.spec.local_ranks && !keep) {
    return End("all ranks detached");
  }
  next_.phase = JobPhase::kIdle;
  next_.poison = absl::OkStatus();
  next_.alive_since = ++next_.generation;
  actions_.push_back(DropAttempt{});
  Say(absl::StrCat(reason_, "; no rank is left: the step in flight is dropped, the state is kept"));
}

void Decider::FailWaiting(const absl::Status& status) {
  for (const uint32_t rank : Ranks(RankPhase::kWaiting)) {
    RankState& state = next_.ranks[rank];
    actions_.push_back(FailAttach{state.attach_id, status});
    state.phase = next_.ever_ready ? RankPhase::kDead : RankPhase::kAbsent;
    state.deadline = absl::InfiniteDuration();
  }
}

void Decider::Poison(const absl::Status& status) {
  if (!next_.poison.ok()) return;
  next_.poison = status;
  Say(absl::StrCat("generation ", next_.generation, " is dead: ", status.message()));
  actions_.push_back(PoisonGeneration{status});
  Emit("failed", std::string(status.message()));
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
  if (next_.phase != JobPhase::kStarting || next_.ever_ready) return;
  Fail(in.status);
}

void Decider::On(const WorkerReady& in) {
  WorkerState& worker = next_.workers[in.worker];
  if (worker.incarnation != in.incarnation || worker.phase != WorkerPhase::kStarting) return;
  worker.phase = WorkerPhase::kReady;
  worker.was_ready = true;
  Say(absl::StrCat("worker ", in.worker, " is ready"));
  Emit("worker-ready", reason_);
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
  const std::string sentence = absl::StrCat("worker ", in.worker, " died: ", in.reason);
  Say(sentence);
  Emit("worker-died", sentence);
  if (!in.fatal.ok()) {
    return Fail(absl::Status(in.fatal.code(), absl::StrCat("worker ", in.worker, " of ", Job(), ": ",
                                                           in.fatal.message())));
  }
  if (worker.deaths.size() > kMaxRestarts) {
    return Fail(absl::InternalError(absl::StrCat("worker ", in.worker, " of ", Job(), " died ",
                                                 worker.deaths.size(), " times within ",
                                                 absl::FormatDuration(kRestartWindow),
                                                 ", last: ", in.reason)));
  }
  const absl::Duration wait = BackOff(worker.deaths.size());
  worker.start_at = now_ + wait;
  if (wait == absl::ZeroDuration()) return StartWorkerNow(in.worker);
  Say(absl::StrCat(sentence, "; starting it again in ", absl::FormatDuration(wait)));
}

void Decider::On(const GenerationPoisoned& in) {
  const bool alive = next_.phase == JobPhase::kReady || next_.phase == JobPhase::kStarting;
  if (alive && in.generation >= next_.alive_since) Poison(in.status);
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
    for (uint32_t r = 0; r < next_.ranks.size(); ++r) {
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
  const std::string text =
      absl::StrCat(Job(), ": the workers were not ready in time: ", WorkersNotReady());
  FailWaiting(absl::DeadlineExceededError(text));
  Say(text);
  CheckAllGone();
}

void Decider::CheckRejoinDeadlines() {
  if (next_.phase != JobPhase::kReady || Ranks(RankPhase::kAttached).empty()) return;
  std::vector<std::string> late;
  for (const uint32_t rank : Ranks(RankPhase::kDead)) {
    if (next_.ranks[rank].deadline <= now_) late.push_back(Describe(rank));
  }
  if (late.empty()) return;
  Poison(absl::UnavailableError(absl::StrCat(
      absl::StrJoin(late, ", "), " of ", Job(), " died and no successor attached within ",
      absl::FormatDuration(next_.limits.rejoin_timeout))));
}

void Decider::On(const Tick&) {
  for (uint32_t w = 0; w < next_.workers.size(); ++w) {
    if (next_.workers[w].phase == WorkerPhase::kDead && next_.workers[w].start_at <= now_ &&
        next_.phase != JobPhase::kFailed) {
      StartWorkerNow(w);
      Say(absl::StrCat("starting worker ", w, " again (number ", next_.workers[w].restarts, ")"));
    }
  }
  CheckWaitDeadlines();
  if (next_.phase != JobPhase::kEnded && next_.poison.ok()) CheckRejoinDeadlines();
}

}  // namespace

JobDecision Decide(const JobState& state, const JobInput& input, Instant now) {
  Decider decider(state, now);
  if (state.phase != JobPhase::kEnded) {
    std::visit([&](const auto& in) { decider.On(in); }, input);
  }
  return std::move(decider).Take();
}

JobState NewJob(const std::string& name, const JobSpec& spec, uint32_t workers,
                const JobLimits& limits) {
  JobState state;
  state.name = name;
  state.spec = spec;
  state.limits = limits;
  state.ranks.resize(spec.world_size);
  state.workers.resize(workers);
  return state;
}

Instant NextDeadline(const JobState& state) {
  Instant next = absl::InfiniteDuration();
  if (state.phase == JobPhase::kEnded) return next;
  bool attached = false;
  for (const RankState& rank : state.ranks) attached |= rank.phase == RankPhase::kAttached;
  for (const RankState& rank : state.ranks) {
    const bool rejoin = rank.phase == RankPhase::kDead && attached && state.poison.ok() &&
                        state.phase == JobPhase::kReady;
    if (rank.phase == RankPhase::kWaiting || rejoin) next = std::min(next, rank.deadline);
  }
  if (state.phase == JobPhase::kFailed) return next;
  for (const WorkerState& worker : state.workers) {
    if (worker.phase == WorkerPhase::kDead) next = std::min(next, worker.start_at);
  }
  return next;
}

uint32_t PresentRanks(const JobState& state) {
  return static_cast<uint32_t>(
      std::count_if(state.ranks.begin(), state.ranks.end(), [](const RankState& rank) {
        return rank.phase == RankPhase::kAttached || rank.phase == RankPhase::kWaiting;
      }));
}

}  // namespace zeroshard
