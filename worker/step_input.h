// What a rank brings to a step, checked before any of it reaches the board.
//
// Pure functions; any thread. The loop thread calls them on every Step request, so a refused step
// leaves the job's state as it was.
#ifndef ZEROSHARD_WORKER_STEP_INPUT_H_
#define ZEROSHARD_WORKER_STEP_INPUT_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/model.pb.h"
#include "proto/trainer.pb.h"
#include "worker/optim/optimizer_kind.h"

namespace zeroshard {

// The kernel that updates a job's parameters. InvalidArgument for OPTIMIZER_NONE and for values
// that this build does not know.
absl::StatusOr<OptimizerKind> OptimizerKindOf(const model::v1::EngineConfig& config);

// InvalidArgument naming the group, the field and the value: a learning rate or weight decay that
// is negative or no fp32 number, betas outside [0, 1), a negative eps or momentum. Fields that the
// job's optimizer does not read are not looked at.
absl::Status CheckStepGroups(const model::v1::EngineConfig& config, const trainer::v1::Step& step);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_STEP_INPUT_H_
