// What ranks do to a job: attach, give up, die, detach.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/job_decider.h"

namespace zeroshard {

std::string RankList(const std::vector<uint32_t>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ", "));
}

absl::Status Decider::Refusal(const AttachRequested& in) const {
  if (next_.phase == JobPhase::kFailed) {
    return absl::FailedPreconditionError(absl::StrCat(Job(), " has failed: ", next_.reason,
                                                      "; `zeroshard remove ", next_.name,
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
    return absl::AlreadyExistsError(absl::StrCat(Job(), " exists and is another one: ", difference,
                                                 "; use another job name, or end that one",
                                                 " with `zeroshard remove ", next_.name, "`"));
  }
  if (held && !Returns(in)) {
    return absl::AlreadyExistsError(absl::StrCat("rank ", in.rank, " of ", Job(),
                                                 " is held by process ", holder.pid,
                                                 "; two processes cannot be the same rank"));
  }
  if (!next_.poison.ok() && !next_.data_plane) {
    return absl::FailedPreconditionError(
        absl::StrCat(Job(), " takes new ranks once ", RankList(Ranks(RankPhase::kAttached)),
                     " ended, because its generation is dead: ", next_.poison.message()));
  }
  return absl::OkStatus();
}

// A rank of a job that has nothing yet says something else than those who wait: all of them hear it
// now.
void Decider::Disagree(const AttachRequested& in, const std::string& difference) {
  const absl::Status status =
      absl::InvalidArgumentError(absl::StrCat("the ranks of ", Job(), " disagree: ", difference));
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
  if (Returns(in)) LeaveDeadGeneration(in);
  Admit(in);
}

void Decider::Admit(const AttachRequested& in) {
  RankState& rank = next_.ranks[in.rank];
  rank = RankState{};
  rank.phase = RankPhase::kWaiting;
  rank.pid = in.pid;
  rank.attach_id = in.attach_id;
  rank.deadline = in.deadline;
  if (next_.data_plane && next_.phase == JobPhase::kReady) {
    Say(absl::StrCat(reason_, reason_.empty() ? "" : "; ", Describe(in.rank),
                     " waits for the next generation"));
    return CheckNextGeneration();
  }
  if (next_.phase == JobPhase::kIdle) next_.phase = JobPhase::kForming;
  if (next_.phase != JobPhase::kForming) {
    Say(absl::StrCat(Describe(in.rank), " waits for the workers"));
    return AttachWaiting();
  }
  CheckFormed();
}

void Decider::CheckFormed() {
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
    const std::string& work = next_.limits.first_work;
    Say(absl::StrCat("all ", present, " ranks are here; starting ", next_.workers.size(),
                     " workers", work.empty() ? "" : ", which first ", work));
    for (const uint32_t waiting_rank : Ranks(RankPhase::kWaiting)) {
      next_.ranks[waiting_rank].deadline += next_.limits.first_work_time;
    }
    actions_.push_back(CreateJob{});
    return;
  }
  AttachWaiting();
}

// Once the workers are ready, whoever waits is in.
void Decider::AttachWaiting() {
  if (!WorkersReady() || next_.going_back.has_value() || next_.parted) return;
  const std::vector<uint32_t> waiting = Ranks(RankPhase::kWaiting);
  if (next_.data_plane && waiting.size() < next_.spec.local_ranks) return;
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
      return Leave(rank, RankPhase::kDead, "gave up attaching", in.step);
    }
  }
}

void Decider::On(const RankGone& in) {
  if (in.rank >= next_.ranks.size() || next_.ranks[in.rank].attach_id != in.attach_id) return;
  const RankPhase phase = next_.ranks[in.rank].phase;
  if (phase == RankPhase::kWaiting || phase == RankPhase::kAttached) {
    Leave(in.rank, RankPhase::kDead, "died", in.step);
  }
}

void Decider::On(const DetachRequested& in) {
  if (in.rank >= next_.ranks.size() || next_.ranks[in.rank].phase != RankPhase::kAttached) return;
  next_.ranks[in.rank].keep = in.keep;
  Leave(in.rank, RankPhase::kDetached, "detached", 0);
}

void Decider::Leave(uint32_t rank, RankPhase phase, const std::string& why, uint64_t step) {
  RankState& state = next_.ranks[rank];
  const std::string sentence = absl::StrCat(Describe(rank), " ", why);
  const bool was_attached = state.phase == RankPhase::kAttached;
  Say(sentence);
  if (!was_attached) {
    actions_.push_back(FailAttach{state.attach_id, absl::CancelledError(sentence)});
    state.phase = next_.ever_ready ? RankPhase::kDead : RankPhase::kAbsent;
    state.deadline = absl::InfiniteDuration();
    // All of a data plane's ranks attach, or none.
    if (next_.data_plane && next_.phase == JobPhase::kStarting) next_.phase = JobPhase::kForming;
    return CheckAllGone();
  }
  state.phase = phase;
  state.deadline =
      phase == RankPhase::kDead ? now_ + next_.limits.rejoin_timeout : absl::InfiniteDuration();
  ++next_.generation;
  actions_.push_back(AnnounceRankDied{rank, sentence});
  if (phase == RankPhase::kDead) Emit("rank-died", sentence);
  // Also when the last one of this node died: ranks of others are in the generation.
  const bool dies = next_.data_plane && next_.phase == JobPhase::kReady;
  if (dies && next_.spans && phase == RankPhase::kDead) Abort(step, sentence);
  CheckAllGone();
  if (!next_.data_plane || next_.phase != JobPhase::kReady) return;
  if (phase == RankPhase::kDead) Abort(step, sentence);
  CheckNextGeneration();
}

bool Decider::Returns(const AttachRequested& in) const {
  const RankState& holder = next_.ranks[in.rank];
  return next_.data_plane && next_.phase == JobPhase::kReady &&
         holder.phase == RankPhase::kAttached && holder.pid == in.pid &&
         (!next_.poison.ok() || !in.gave_up.empty());
}

void Decider::LeaveDeadGeneration(const AttachRequested& in) {
  const std::string who = Describe(in.rank);
  next_.ranks[in.rank] = RankState{};
  ++next_.generation;
  actions_.push_back(AnnounceRankDied{in.rank, absl::StrCat(who, " attaches again")});
  if (!in.gave_up.empty()) Abort(in.step, absl::StrCat(who, ": ", in.gave_up));
}

// For whoever is left in the generation.
void Decider::Abort(uint64_t step, const std::string& why) {
  if (Ranks(RankPhase::kAttached).empty() && !next_.spans) return;
  const std::string what = step == 0 ? "the step in flight" : absl::StrCat("step ", step);
  Poison(absl::AbortedError(absl::StrCat(what, " aborted: ", why)));
}

// The next generation forms when nobody is left in the one before.
void Decider::CheckNextGeneration() {
  if (!next_.data_plane || next_.phase != JobPhase::kReady ||
      !Ranks(RankPhase::kAttached).empty() || PresentRanks(next_) == 0) {
    return;
  }
  next_.phase = JobPhase::kForming;
  next_.spans ? Part() : DropGeneration();
  CheckFormed();
}

void Decider::DropGeneration() {
  next_.poison = absl::OkStatus();
  next_.alive_since = ++next_.generation;
  if (!next_.going_back.has_value()) actions_.push_back(DropAttempt{});
}

// "rank 0 (process 100)": attached ranks that keep the next generation waiting.
std::string Decider::StillInside() const {
  std::vector<std::string> names;
  for (const uint32_t rank : Ranks(RankPhase::kAttached)) names.push_back(Describe(rank));
  return absl::StrJoin(names, ", ");
}

void Decider::CheckAllGone() {
  if (PresentRanks(next_) > 0 || next_.phase == JobPhase::kFailed) return;
  if (!next_.ever_ready) return End(absl::StrCat(reason_, "; nobody is left"));
  const std::vector<uint32_t> detached = Ranks(RankPhase::kDetached);
  const bool keep = std::all_of(detached.begin(), detached.end(),
                                [&](uint32_t r) { return next_.ranks[r].keep; });
  if (detached.size() == next_.spec.local_ranks && !keep) {
    if (!next_.spans || !next_.poison.ok()) return End("all ranks detached");
    next_.phase = JobPhase::kLeaving;
    next_.leave_deadline = now_ + next_.limits.rejoin_timeout;
    return Say("all ranks of this node detached; waiting for those of the other nodes");
  }
  if (next_.spans && next_.data_plane) {
    next_.phase = JobPhase::kIdle;
    Part();
    return Say(absl::StrCat(reason_, "; no rank of this node is left"));
  }
  if (next_.spans) {
    next_.phase = next_.poison.ok() ? JobPhase::kIdle : JobPhase::kFailed;
    return Say(next_.poison.ok()
                   ? absl::StrCat(reason_,
                                  "; no rank of this node is left: the step in flight "
                                  "waits for their successors")
                   : absl::StrCat("its generation is dead: ", next_.poison.message()));
  }
  next_.phase = JobPhase::kIdle;
  DropGeneration();
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

}  // namespace zeroshard
