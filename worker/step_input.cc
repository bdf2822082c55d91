#include "worker/step_input.h"

#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "worker/optim/registry.h"

namespace zeroshard {
namespace {

// The kernels work in fp32: what overflows there would make every parameter infinite or NaN.
absl::Status CheckFitsFloat(absl::string_view field, double value) {
  if (std::abs(value) <= std::numeric_limits<float>::max()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("optimizer parameter ", field, " is ", value, ", expected an fp32 number"));
}

absl::Status CheckGroup(OptimizerKind kind, const model::v1::GroupOptions& group) {
  ZS_RETURN_IF_ERROR(ValidateHyperparameters(kind, {.lr = group.lr(),
                                                    .beta1 = group.beta1(),
                                                    .beta2 = group.beta2(),
                                                    .eps = group.eps(),
                                                    .weight_decay = group.weight_decay(),
                                                    .momentum = group.momentum(),
                                                    .dampening = group.dampening(),
                                                    .nesterov = group.nesterov()}));
  ZS_RETURN_IF_ERROR(CheckFitsFloat("lr", group.lr()));
  return CheckFitsFloat("weight_decay", group.weight_decay());
}

}  // namespace

absl::StatusOr<OptimizerKind> OptimizerKindOf(const model::v1::EngineConfig& config) {
  switch (config.optimizer()) {
    case model::v1::OPTIMIZER_ADAMW:
      return OptimizerKind::kAdamW;
    case model::v1::OPTIMIZER_ADAM:
      return OptimizerKind::kAdam;
    case model::v1::OPTIMIZER_SGD:
      return config.state_slots_size() > 0 ? OptimizerKind::kSgdMomentum : OptimizerKind::kSgd;
    case model::v1::OPTIMIZER_ADAGRAD:
      return OptimizerKind::kAdagrad;
    case model::v1::OPTIMIZER_LION:
      return OptimizerKind::kLion;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("the job has no optimizer (", config.optimizer(), ") and makes no updates"));
  }
}

absl::Status CheckStepGroups(const model::v1::EngineConfig& config, const trainer::v1::Step& step) {
  if (config.optimizer() == model::v1::OPTIMIZER_NONE) return absl::OkStatus();
  ZS_ASSIGN_OR_RETURN(const OptimizerKind kind, OptimizerKindOf(config));
  for (int index = 0; index < step.groups_size(); ++index) {
    ZS_RETURN_IF_ERROR(
        Annotate(CheckGroup(kind, step.groups(index)), absl::StrCat("parameter group ", index)));
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
