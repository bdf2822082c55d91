// StateMover: states that are not where they shall rest are moved while the job trains.
//
// A few chunks at a time, between two steps, at a bounded rate; where each one shall rest outlives
// the process (docs/nvme.md), the rate does not: a successor moves as fast as it goes. Owned by the
// engine; loop thread only.
#ifndef ZEROSHARD_WORKER_STATE_MOVER_H_
#define ZEROSHARD_WORKER_STATE_MOVER_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "proto/internal.pb.h"
#include "worker/engine_context.h"
#include "worker/shard.h"
#include "worker/tier_set.h"

namespace zeroshard {

class StateMover {
 public:
  StateMover(TierSet& tiers, const Shard& shard, EngineContext& context)
      : tiers_(tiers), shard_(shard), context_(context) {}

  void OnCommand(const internal::v1::MoveStates& command);
  // Something may be where it shall not rest.
  void LookAgain() { pending_ = true; }
  bool pending() const { return pending_; }

  // Moves some chunks if it is time; no longer than a step may wait. Between two steps only. After
  // an error, which is logged, it rests for a while.
  void Advance();

  // Bytes of states that are still to be moved.
  uint64_t LeftBytes() const;

 private:
  // Whether a state image holds values and is not where it shall rest.
  bool IsMisplaced(uint32_t image) const;
  std::vector<uint32_t> NextSlice();

  TierSet& tiers_;
  const Shard& shard_;
  EngineContext& context_;
  bool pending_ = false;
  uint64_t bytes_per_second_ = 0;  // 0: no bound
  uint64_t moved_ = 0;             // bytes, since all were where they shall rest
  uint32_t cursor_ = 0;
  uint32_t slice_ = 1;  // images
  absl::Duration next_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_STATE_MOVER_H_
