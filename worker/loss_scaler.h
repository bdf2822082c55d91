// The loss scale as DeepSpeed's DynamicLossScaler and static scaler move it, as a pure function.
#ifndef ZEROSHARD_WORKER_LOSS_SCALER_H_
#define ZEROSHARD_WORKER_LOSS_SCALER_H_

#include "absl/status/status.h"
#include "proto/model.pb.h"
#include "storage/board.h"

namespace zeroshard {

// Advances the scaler part of `numbers` (loss_scale, scaler_*) by one step. With dynamic scaling an
// overflow first uses up the hysteresis, then halves the scale down to the minimum; `window` steps
// without overflow double it. FailedPrecondition when the scale would have to fall below the
// minimum: training has diverged
// (`numbers` is then left as it was). A static scale never moves.
absl::Status AdvanceLossScale(const model::v1::LossScale& config, bool overflow,
                              JobNumbers& numbers);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_LOSS_SCALER_H_
