// Waiting for work of a device by asking for it, so that a device that hangs never holds a thread.
#ifndef ZEROSHARD_DEVICE_CUDA_POLL_H_
#define ZEROSHARD_DEVICE_CUDA_POLL_H_

#include <algorithm>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/deadline.h"
#include "base/status.h"
#include "base/strings.h"

namespace zeroshard {

// Calls `done` (which returns absl::StatusOr<bool>) until it says true, with pauses that grow from
// none to a millisecond. DeadlineExceeded "`what` is not done after ..." where it takes longer.
template <typename Done>
absl::Status PollUntil(Done done, absl::Duration limit, std::string_view what) {
  constexpr int kEagerPolls = 64;
  constexpr absl::Duration kLongestPause = absl::Milliseconds(1);
  const Deadline deadline = Deadline::After(limit);
  absl::Duration pause = absl::Microseconds(5);
  for (int polls = 0;; ++polls) {
    ZS_ASSIGN_OR_RETURN(const bool is_done, done());
    if (is_done) return absl::OkStatus();
    if (deadline.Passed()) {
      return absl::DeadlineExceededError(
          absl::StrCat(Abs(what), " is not done after ", absl::FormatDuration(limit)));
    }
    if (polls < kEagerPolls) continue;
    absl::SleepFor(std::min(pause, deadline.Remaining()));
    pause = std::min(pause * 2, kLongestPause);
  }
}

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CUDA_POLL_H_
