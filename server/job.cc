#include "server/job.h"

#include <algorithm>
#include <utility>

#include "server/job_decider.h"

namespace zeroshard {

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
    const bool awaited = (state.phase == JobPhase::kReady && attached) ||
                         (state.phase == JobPhase::kIdle && state.spans && !state.data_plane);
    const bool rejoin = rank.phase == RankPhase::kDead && awaited && state.poison.ok();
    if (rank.phase == RankPhase::kWaiting || rejoin) next = std::min(next, rank.deadline);
  }
  if (state.phase == JobPhase::kFailed) return next;
  if (state.phase == JobPhase::kLeaving) next = std::min(next, state.leave_deadline);
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
