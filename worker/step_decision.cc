#include "worker/step_decision.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/loss_scaler.h"

namespace zeroshard {
namespace {

// torch.nn.utils.clip_grad_norm_ adds this to the norm before it divides.
constexpr double kClipEpsilon = 1e-6;
// Update number from which bias corrections are exactly 1 in fp64 for every beta that fp32 can tell
// from 1.
constexpr int64_t kNoBiasCorrection = int64_t{1} << 40;

absl::StatusOr<double> CountOf(const model::v1::EngineConfig& config,
                               std::span<const StepInput* const> inputs) {
  double weights = 0.0;
  bool weighted = false;
  for (const StepInput* input : inputs) {
    weighted |= input->weight_total != 0.0;
    weights += input->weight_total == 0.0 ? input->micro_steps : input->weight_total;
  }
  if (!weighted) {
    const double ranks = config.sum_over_ranks() ? 1.0 : static_cast<double>(inputs.size());
    return inputs[0]->micro_steps * ranks;
  }
  if (!(weights > 0.0) || !std::isfinite(weights)) {
    return absl::FailedPreconditionError(
        absl::StrCat("the gradient weights of the step sum up to ", weights));
  }
  return weights;
}

}  // namespace

absl::Status CheckSameInputs(std::span<const StepInput* const> inputs) {
  for (size_t rank = 1; rank < inputs.size(); ++rank) {
    const StepInput& first = *inputs[0];
    const StepInput& other = *inputs[rank];
    if (first.micro_steps != other.micro_steps) {
      return absl::InvalidArgumentError(absl::StrCat("rank 0 steps after ", first.micro_steps,
                                                     " micro-steps, rank ", rank, " after ",
                                                     other.micro_steps));
    }
    if (first.groups != other.groups ||
        std::memcmp(first.group, other.group, first.groups * sizeof(GroupHyper)) != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("ranks 0 and ", rank, " step with different hyperparameters (lr ",
                       first.groups > 0 ? first.group[0].lr : 0.0, " and ",
                       other.groups > 0 ? other.group[0].lr : 0.0, " in group 0)"));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<StepVerdict> DecideStep(const model::v1::EngineConfig& config,
                                       std::span<const StepInput* const> inputs,
                                       const ExactSum& sum, const JobNumbers& now) {
  ZS_RETURN_IF_ERROR(CheckSameInputs(inputs));
  ZS_ASSIGN_OR_RETURN(const double count, CountOf(config, inputs));
  StepVerdict verdict;
  verdict.next = now;
  const bool overflow = !sum.finite();
  verdict.skip = overflow && config.skip_on_overflow();
  const double divisor = now.loss_scale * count;
  const double norm = std::sqrt(sum.ToDouble()) / divisor;
  double clip = 1.0;
  if (!overflow && config.gradient_clipping() > 0.0) {
    clip = std::min(1.0, config.gradient_clipping() / (norm + kClipEpsilon));
  }
  verdict.grad_scale = static_cast<float>(clip / divisor);
  ZS_RETURN_IF_ERROR(AdvanceLossScale(config.loss_scale(), verdict.skip, verdict.next));
  verdict.next.step += 1;
  verdict.next.updates += verdict.skip ? 0 : 1;
  verdict.next.skipped += verdict.skip ? 1 : 0;
  verdict.next.last_skipped = verdict.skip ? 1 : 0;
  verdict.next.norm_valid = overflow ? 0 : 1;
  verdict.next.grad_norm = overflow ? 0.0 : norm;
  return verdict;
}

UpdateArgs ArgsFor(const GroupHyper& group, uint64_t count) {
  const Hyperparameters hyperparameters{.lr = group.lr,
                                        .beta1 = group.beta1,
                                        .beta2 = group.beta2,
                                        .eps = group.eps,
                                        .weight_decay = group.weight_decay,
                                        .momentum = group.momentum,
                                        .dampening = group.dampening,
                                        .nesterov = group.nesterov != 0};
  UpdateArgs args =
      MakeUpdateArgs(hyperparameters,
                     group.bias_correction != 0 ? static_cast<int64_t>(count) : kNoBiasCorrection);
  args.first_step = count == 1 ? 1 : 0;
  return args;
}

}  // namespace zeroshard
