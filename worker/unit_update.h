// One unit's part of a step's update, made before its first chunk. Internal to the shard; constant
// once made, read by the lanes.
#ifndef ZEROSHARD_WORKER_UNIT_UPDATE_H_
#define ZEROSHARD_WORKER_UNIT_UPDATE_H_

#include <optional>
#include <vector>

#include "worker/optim/kernels.h"

namespace zeroshard {

struct UnitUpdate {
  std::vector<UpdateSegment> segments;
  // Of arrays on the host; its segments are those above.
  UpdatePass pass;
  std::optional<PreparedUpdate> silent;   // of elements whose parameter another worker writes
  std::optional<PreparedUpdate> writing;  // of all others
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_UNIT_UPDATE_H_
