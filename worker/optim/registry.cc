#include "worker/optim/registry.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/strings.h"

namespace zeroshard {
namespace {

template <class Functor>
constexpr OptimizerInfo InfoOf(OptimizerKind kind) {
  OptimizerInfo info;
  info.kind = kind;
  info.name = Functor::kName;
  info.state_slots = Functor::kStates;
  info.parameters = Functor::kParameters;
  info.eight_bit = Functor::kStates > 0;
  for (int i = 0; i < Functor::kStates; ++i) {
    info.slots[i] = {.name = Functor::kStateNames[i], .map = Functor::kStateMaps[i]};
    info.eight_bit = info.eight_bit && Functor::kStateMaps[i] != StateMap::kNone;
  }
  return info;
}

#define ZS_OPTIMIZER_INFO(kind, functor) InfoOf<functor>(OptimizerKind::kind),
constexpr std::array<OptimizerInfo, kOptimizerKinds> kOptimizers = {
    ZS_FOR_EACH_OPTIMIZER(ZS_OPTIMIZER_INFO)};
#undef ZS_OPTIMIZER_INFO

absl::Status Bad(std::string_view field, double value, std::string_view expected) {
  return absl::InvalidArgumentError(absl::StrCat("optimizer parameter ", Abs(field), " is ", value,
                                                 ", expected ", Abs(expected)));
}

absl::Status CheckNotNegative(std::string_view field, double value) {
  if (!std::isfinite(value) || value < 0.0) return Bad(field, value, "a finite number, 0 or more");
  return absl::OkStatus();
}

absl::Status CheckBeta(std::string_view field, double value) {
  if (!(value >= 0.0 && value < 1.0)) return Bad(field, value, "a number in [0, 1)");
  return absl::OkStatus();
}

}  // namespace

absl::Span<const OptimizerInfo> AllOptimizers() { return kOptimizers; }

const OptimizerInfo& GetOptimizerInfo(OptimizerKind kind) {
  return kOptimizers[static_cast<size_t>(kind)];
}

uint32_t OptimizerBytes(OptimizerKind kind, MasterForm master, StateFormat states) {
  constexpr uint32_t kMasterBytes[] = {4, 2, 0};  // in the order of MasterForm
  constexpr uint32_t kStateBytes[] = {4, 2, 1};   // in the order of StateFormat
  return kMasterBytes[static_cast<int>(master)] +
         static_cast<uint32_t>(GetOptimizerInfo(kind).state_slots) *
             kStateBytes[static_cast<int>(states)];
}

absl::StatusOr<OptimizerKind> ParseOptimizerKind(std::string_view name) {
  std::string known;
  for (const OptimizerInfo& info : kOptimizers) {
    if (info.name == name) return info.kind;
    absl::StrAppend(&known, known.empty() ? "" : ", ", Abs(info.name));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("unknown optimizer \"", Abs(name), "\"; known: ", known));
}

absl::Status ValidateHyperparameters(OptimizerKind kind, const Hyperparameters& h) {
  ZS_RETURN_IF_ERROR(CheckNotNegative("lr", h.lr));
  ZS_RETURN_IF_ERROR(CheckNotNegative("weight_decay", h.weight_decay));
  const uint32_t parameters = GetOptimizerInfo(kind).parameters;
  if ((parameters & kUsesBetas) != 0) {
    ZS_RETURN_IF_ERROR(CheckBeta("betas[0]", h.beta1));
    ZS_RETURN_IF_ERROR(CheckBeta("betas[1]", h.beta2));
  }
  if ((parameters & kUsesEps) != 0) ZS_RETURN_IF_ERROR(CheckNotNegative("eps", h.eps));
  if ((parameters & kUsesMomentum) == 0) return absl::OkStatus();
  ZS_RETURN_IF_ERROR(CheckNotNegative("momentum", h.momentum));
  if (!std::isfinite(h.dampening)) return Bad("dampening", h.dampening, "a finite number");
  if (kind == OptimizerKind::kSgd && h.momentum != 0.0) {
    return Bad("momentum", h.momentum, "0, for sgd has no momentum buffer (use sgd_momentum)");
  }
  if (h.nesterov && (h.momentum <= 0.0 || h.dampening != 0.0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("nesterov needs momentum above 0 and dampening 0, found momentum ", h.momentum,
                     ", dampening ", h.dampening));
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
