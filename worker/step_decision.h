// The decision of a step: from what ranks and workers brought to one set of numbers that every
// worker applies.
//
// Pure functions over the board's plain structs, called by the leader alone and never recomputed.
#ifndef ZEROSHARD_WORKER_STEP_DECISION_H_
#define ZEROSHARD_WORKER_STEP_DECISION_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/model.pb.h"
#include "storage/board.h"
#include "worker/exact_sum.h"
#include "worker/optim/update_args.h"

namespace zeroshard {

// What a decision leaves out of the board's Decision: the atomic attempt.
struct StepVerdict {
  bool skip = false;
  float grad_scale = 1.0f;
  JobNumbers next = {};
};

// InvalidArgument naming both ranks when inputs differ in micro-steps or hyperparameters.
absl::Status CheckSameInputs(std::span<const StepInput* const> inputs);

// With `sum` the exact sum of squares of the accumulated gradients (times loss scale) over all
// workers:
//   count = sum of weights, or micro-steps times ranks (micro-steps alone with sum_over_ranks)
//   norm  = sqrt(sum) / (loss_scale * count)
//   clip  = min(1, gradient_clipping / (norm + 1e-6))      as torch.nn.utils.clip_grad_norm_
//   grad_scale = clip / (loss_scale * count)               in fp64, rounded once
// A non-finite sum skips the step if the config says so, else it is applied unclipped.
// InvalidArgument as CheckSameInputs; FailedPrecondition when the loss scale cannot fall any
// further, or when the weights sum up to nothing.
absl::StatusOr<StepVerdict> DecideStep(const model::v1::EngineConfig& config,
                                       std::span<const StepInput* const> inputs,
                                       const ExactSum& sum, const JobNumbers& now);

// The arguments of one parameter's update number `count` (1 is its first).
UpdateArgs ArgsFor(const GroupHyper& group, uint64_t count);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_STEP_DECISION_H_
