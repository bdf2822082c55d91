// WorkerWatch: tells workers that are stuck from workers that are slow.
//
// A worker shows progress (storage/board.h, WorkerSlot::beats; messages) that is looked at every
// interval(). One that shows none over `bound` is stuck. Looks are counted, not time: a daemon that
// was itself suspended finds nobody guilty. Pure; decision thread.
#ifndef ZEROSHARD_SERVER_WORKER_WATCH_H_
#define ZEROSHARD_SERVER_WORKER_WATCH_H_

#include <cstdint>
#include <vector>

#include "absl/time/time.h"

namespace zeroshard {

class WorkerWatch {
 public:
  WorkerWatch(absl::Duration bound, uint32_t workers);

  // How long a worker of a job with this collective timeout may show no progress: a part of it, so
  // that the others still wait when its successor is there.
  static absl::Duration BoundFor(absl::Duration collective_timeout);

  struct Look {
    uint32_t incarnation = 0;
    uint64_t progress = 0;  // any other value than last time is progress
    bool starting = false;  // has more time
    bool excused = false;   // is at something that shows no progress
  };
  // Whether the worker is stuck. Then it gets as much time again.
  bool IsStuck(uint32_t worker, const Look& look);

  absl::Duration bound() const { return bound_; }
  absl::Duration interval() const;

 private:
  struct State {
    uint32_t incarnation = 0;
    uint64_t progress = 0;
    uint32_t idle = 0;  // looks without progress
  };

  absl::Duration bound_;
  std::vector<State> workers_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_WORKER_WATCH_H_
