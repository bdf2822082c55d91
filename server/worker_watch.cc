#include "server/worker_watch.h"

#include <algorithm>

namespace zeroshard {
namespace {

// Many, so that a few that come late change little.
constexpr int kLooks = 8;
constexpr absl::Duration kShortest = absl::Seconds(2);
constexpr absl::Duration kLongest = absl::Seconds(30);
// For mapping memory, connecting, and repairing what a predecessor left.
constexpr absl::Duration kStartTime = absl::Seconds(60);

}  // namespace

WorkerWatch::WorkerWatch(absl::Duration bound, uint32_t workers)
    : bound_(bound), workers_(workers) {}

absl::Duration WorkerWatch::BoundFor(absl::Duration collective_timeout) {
  return std::clamp(collective_timeout / 4, kShortest, kLongest);
}

absl::Duration WorkerWatch::interval() const { return bound_ / kLooks; }

bool WorkerWatch::IsStuck(uint32_t worker, const Look& look) {
  State& state = workers_[worker];
  const bool same = state.incarnation == look.incarnation && state.progress == look.progress;
  state.incarnation = look.incarnation;
  state.progress = look.progress;
  state.idle = same && !look.excused ? state.idle + 1 : 0;
  const absl::Duration patience = look.starting ? std::max(kStartTime, bound_) : bound_;
  if (interval() * static_cast<int64_t>(state.idle) < patience) return false;
  state.idle = 0;
  return true;
}

}  // namespace zeroshard
