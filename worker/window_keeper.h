// WindowKeeper: what of a copied parameter window is backed by memory.
//
// Every worker copies its shard of a wanted unit into the window (Fill). The island's first worker
// gives the pages of released units back, least recently wanted first, while more than
// stage3_max_live_parameters are resident (Evict). A unit's address never changes, so a view that
// autograd kept of a released weight is good again after the next gather. In-place windows have
// nothing to keep. Loop thread only.
//
// Why no page is given back under a reader: the evictor raises `evicting`, then looks at the pins;
// a gather pins, then looks at `evicting`. One of them sees the other, whatever the timing. A unit
// is evicted only when all its shards are in the window, so no worker is still filling it.
#ifndef ZEROSHARD_WORKER_WINDOW_KEEPER_H_
#define ZEROSHARD_WORKER_WINDOW_KEEPER_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/engine_context.h"
#include "worker/shard.h"

namespace zeroshard {

class WindowKeeper {
 public:
  explicit WindowKeeper(EngineContext& context) : context_(context) {}

  // Copies this worker's shards of those of `units` that are wanted and not there. Returns whether
  // there were any; an error is that of the NVMe tier.
  absl::StatusOr<bool> Fill(std::span<const uint32_t> units, const Shard& shard);
  // Gives pages back while too many units are resident. Returns whether any were.
  bool Evict();
  // Gives the pages of `unit` back now if no rank has it; of the island's first worker only.
  void GiveBack(uint32_t unit);
  // After a predecessor's death: finishes what it was giving back.
  void Recover();

 private:
  bool IsToBeFilled(uint32_t unit);
  bool IsFilled(uint32_t unit) const;
  bool IsPinned(uint32_t unit) const;
  bool EvictUnit(uint32_t unit);
  void PunchUnit(uint32_t unit);

  EngineContext& context_;
  std::vector<uint64_t> wanted_at_;  // by unit: order of the last fill; the least recent goes first
  uint64_t last_wanted_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_WINDOW_KEEPER_H_
