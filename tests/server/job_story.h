// JobStory: one job with its actions as they come, for tests of Decide. What happens in the world
// is a method of the story that is derived from this.
#ifndef ZEROSHARD_TESTS_SERVER_JOB_STORY_H_
#define ZEROSHARD_TESTS_SERVER_JOB_STORY_H_

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/job.h"

namespace zeroshard {

template <typename Action>
std::vector<Action> ActionsOf(const std::vector<JobAction>& actions) {
  std::vector<Action> found;
  for (const JobAction& action : actions) {
    if (const Action* one = std::get_if<Action>(&action)) found.push_back(*one);
  }
  return found;
}

class JobStory {
 public:
  void Feed(const JobInput& input) {
    JobDecision decision = Decide(state_, input, now_);
    state_ = std::move(decision.next);
    actions_ = std::move(decision.actions);
    reason_ = decision.reason;
  }
  void Ready(uint32_t worker) { Feed(WorkerReady{worker, state_.workers[worker].incarnation}); }
  void TickAtDeadline() {
    now_ = NextDeadline(state_);
    ASSERT_LT(now_, absl::InfiniteDuration());
    Feed(Tick{});
  }

  // Of the last decision.
  template <typename Action>
  std::vector<Action> All() const {
    return ActionsOf<Action>(actions_);
  }
  template <typename Action>
  size_t Count() const {
    return All<Action>().size();
  }
  // The error of the one Attach that it failed.
  std::string Refused() const {
    const auto failed = All<FailAttach>();
    return failed.size() == 1 ? std::string(failed[0].status.message())
                              : absl::StrCat(failed.size(), " calls failed");
  }

  JobSpec spec_;
  JobState state_;
  Instant now_ = absl::Seconds(1000);
  uint64_t next_attach_ = 1;
  std::vector<JobAction> actions_;
  std::string reason_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_SERVER_JOB_STORY_H_
