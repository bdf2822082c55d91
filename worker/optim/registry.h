// What is known about each optimizer outside the kernels: names, state slots, ledger, limits of its
// hyperparameters.
#ifndef ZEROSHARD_WORKER_OPTIM_REGISTRY_H_
#define ZEROSHARD_WORKER_OPTIM_REGISTRY_H_

#include <array>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/optim/optimizer_kind.h"
#include "worker/optim/update_args.h"

namespace zeroshard {

// One array of optimizer state, of one element per parameter.
struct StateSlot {
  std::string_view name = {};  // torch's name: exp_avg, exp_avg_sq, momentum_buffer
  uint32_t element_bytes = 0;  // 4: fp32
};

struct OptimizerInfo {
  OptimizerKind kind = OptimizerKind::kAdamW;
  std::string_view name;
  int state_slots = 0;
  std::array<StateSlot, kMaxStateSlots> slots = {};
  // The ledger's K: fp32 master plus states, in bytes per parameter (12, 12, 4, 8).
  uint32_t bytes_per_parameter = 0;
};

// All optimizers in the order of their kind.
absl::Span<const OptimizerInfo> AllOptimizers();

const OptimizerInfo& GetOptimizerInfo(OptimizerKind kind);

// By exact name; InvalidArgument lists the known ones.
absl::StatusOr<OptimizerKind> ParseOptimizerKind(std::string_view name);

// InvalidArgument naming the first field that torch.optim would refuse or that is not finite: lr,
// eps, weight_decay negative; betas outside [0, 1); momentum negative; nesterov without momentum or
// with dampening.
absl::Status ValidateHyperparameters(OptimizerKind kind, const Hyperparameters& hyperparameters);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_OPTIM_REGISTRY_H_
