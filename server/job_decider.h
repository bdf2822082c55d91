// Decider: one run of Decide (server/job.h). Takes the state by value, changes it, and collects
// actions.
//
// Internal to the job's state machine: job_ranks.cc has what ranks do, job_workers.cc what workers,
// operators and time do.

#ifndef ZEROSHARD_SERVER_JOB_DECIDER_H_
#define ZEROSHARD_SERVER_JOB_DECIDER_H_

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/job.h"

namespace zeroshard {

// "rank 1", "ranks 0, 2".
std::string RankList(const std::vector<uint32_t>& ranks);

class Decider {
 public:
  Decider(const JobState& state, Instant now)
      : next_(state), now_(now), had_failed_(state.phase == JobPhase::kFailed) {}

  void On(const AttachRequested& in);
  void On(const AttachCancelled& in);
  void On(const RankGone& in);
  void On(const DetachRequested& in);
  void On(const StartFailed& in);
  void On(const WorkerReady& in);
  void On(const WorkerDied& in);
  void On(const GenerationPoisoned& in);
  void On(const DeviceLost& in);
  void On(const GoBackAgreed& in);
  void On(const WentBack&);
  void On(const RemoveRequested& in);
  void On(const NodesMissing& in);
  void On(const NodesLeft&);
  void On(const GenerationAgreed& in);
  void On(const NodeLost& in);
  void On(const Tick&);

  JobDecision Take() && {
    // Why a job has failed is said for as long as it is there.
    const bool failed = had_failed_ && next_.phase == JobPhase::kFailed;
    if (!reason_.empty() && !failed) next_.reason = reason_;
    return {std::move(next_), std::move(actions_), std::move(reason_)};
  }

 private:
  // Why `in` may not attach; OK when it may.
  absl::Status Refusal(const AttachRequested& in) const;
  void Disagree(const AttachRequested& in, const std::string& difference);
  void Admit(const AttachRequested& in);
  void CheckFormed();
  void AttachWaiting();
  void Leave(uint32_t rank, RankPhase phase, const std::string& why, uint64_t step);
  void CheckAllGone();
  // Data planes. Whether the rank's own process attaches anew.
  bool Returns(const AttachRequested& in) const;
  void LeaveDeadGeneration(const AttachRequested& in);
  void Abort(uint64_t step, const std::string& why);
  void CheckNextGeneration();
  void OnAgreedGenerationDead(const GenerationPoisoned& in);
  // Of a job that spans daemons; also when what it goes back to is damaged.
  void LoseOnOneNode(const std::string& lost, const std::string& why);
  std::string StillInside() const;
  void Part() { next_.parted = true; }
  // Nobody is left in the generation: the step in flight is dropped; when the job goes back, after
  // that.
  void DropGeneration();
  void FailWaiting(const absl::Status& status);
  void Fail(const absl::Status& status);
  void Poison(const absl::Status& status);
  void End(const std::string& why);
  void StartWorkerNow(uint32_t worker);
  // Whether the worker, which just died, gets stuck wherever it is started again.
  bool AlwaysHangs(WorkerState& worker, const WorkerDied& in) const;
  void CheckWaitDeadlines();
  void CheckRejoinDeadlines();

  std::vector<uint32_t> Ranks(RankPhase phase) const {
    std::vector<uint32_t> ranks;
    for (uint32_t r = 0; r < next_.ranks.size(); ++r) {
      if (next_.ranks[r].phase == phase) ranks.push_back(r);
    }
    return ranks;
  }
  // Those of this node, and all other nodes are there.
  bool WorkersReady() const {
    return next_.missing_nodes.empty() &&
           std::all_of(next_.workers.begin(), next_.workers.end(),
                       [](const WorkerState& w) { return w.phase == WorkerPhase::kReady; });
  }
  // As the job numbers it.
  std::string WorkerName(size_t worker) const {
    return absl::StrCat("worker ", next_.first_worker + worker);
  }
  // "rank 1 (process 4711)".
  std::string Describe(uint32_t rank) const {
    return absl::StrCat("rank ", rank, " (process ", next_.ranks[rank].pid, ")");
  }
  std::string Job() const { return absl::StrCat("job '", next_.name, "'"); }
  std::string WorkersNotReady() const;
  void Say(const std::string& sentence) { reason_ = sentence; }
  void Emit(const char* kind, const std::string& text) {
    actions_.push_back(EmitEvent{kind, text});
  }

  JobState next_;
  const Instant now_;
  const bool had_failed_;
  std::vector<JobAction> actions_;
  std::string reason_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_JOB_DECIDER_H_
