// Story: the life of a job of one daemon.
#ifndef ZEROSHARD_TESTS_SERVER_JOB_LIFE_H_
#define ZEROSHARD_TESTS_SERVER_JOB_LIFE_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>

#include "tests/server/job_story.h"

namespace zeroshard {

inline JobSpec Spec(uint32_t world_size) {
  JobSpec spec;
  spec.world_size = world_size;
  spec.local_ranks = world_size;
  spec.parameters = {"'w': float32[4,2], trainable", "'b': float32[2], trainable"};
  spec.config = {"optimizer.type = \"AdamW\"", "zero_optimization.stage = 3"};
  return spec;
}

// One job with its actions as they come; every method is one thing that happens in the world.
class Story : public JobStory {
 public:
  explicit Story(uint32_t world_size, uint32_t workers = 2)
      : Story(world_size, workers, JobLimits{.rejoin_timeout = absl::Seconds(60)}) {}
  Story(uint32_t world_size, uint32_t workers, const JobLimits& limits) {
    spec_ = Spec(world_size);
    state_ = NewJob("gpt", spec_, workers, limits);
  }

  uint64_t Attach(uint32_t rank, int64_t pid) { return Attach(rank, pid, spec_); }
  uint64_t Attach(uint32_t rank, int64_t pid, const JobSpec& spec) {
    const uint64_t id = next_attach_++;
    Feed(AttachRequested{id, rank, pid, std::make_shared<JobSpec>(spec), now_ + absl::Seconds(30)});
    return id;
  }
  void Cancel(uint64_t id) { Feed(AttachCancelled{id}); }
  void Die(uint32_t rank) { Feed(RankGone{rank, state_.ranks[rank].attach_id}); }
  void Detach(uint32_t rank, bool keep) { Feed(DetachRequested{rank, keep}); }
  void WorkerEnds(uint32_t worker, absl::Status fatal = absl::OkStatus()) {
    Feed(WorkerDied{worker, state_.workers[worker].incarnation, "killed by signal 9", fatal});
  }
  // Time passes; the host ticks when the job asked for it.
  void Wait(absl::Duration duration) {
    const Instant end = now_ + duration;
    while (NextDeadline(state_) <= end) {
      now_ = std::max(now_, NextDeadline(state_));
      Feed(Tick{});
      if (state_.phase == JobPhase::kEnded) break;
    }
    now_ = end;
  }
  // A job of `world_size` ranks with processes 100, 101, ... that runs.
  void Start() {
    for (uint32_t r = 0; r < spec_.world_size; ++r) Attach(r, 100 + r);
    for (uint32_t w = 0; w < state_.workers.size(); ++w) Ready(w);
    ASSERT_EQ(state_.phase, JobPhase::kReady);
  }
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_SERVER_JOB_LIFE_H_
