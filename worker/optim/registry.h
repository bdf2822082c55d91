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
#include "storage/state_format.h"
#include "worker/optim/optimizer_kind.h"
#include "worker/optim/update_args.h"

namespace zeroshard {

// One array of optimizer state, of one element per parameter.
struct StateSlot {
  std::string_view name = {};  // torch's name: exp_avg, exp_avg_sq, momentum_buffer, sum
  StateMap map = StateMap::kNone;
};

struct OptimizerInfo {
  OptimizerKind kind = OptimizerKind::kAdamW;
  std::string_view name;
  int state_slots = 0;
  std::array<StateSlot, kMaxStateSlots> slots = {};
  uint32_t parameters = 0;  // kUsesBetas, ...
  bool eight_bit = false;   // has states, and each a published 8-bit form
};

// All optimizers in the order of their kind.
absl::Span<const OptimizerInfo> AllOptimizers();

const OptimizerInfo& GetOptimizerInfo(OptimizerKind kind);

// The ledger's K: bytes per parameter of master and states, the compute-dtype parameter not
// counted. 8-bit states have a scale of 4 bytes a block beside them, 1/64 of a byte a parameter.
uint32_t OptimizerBytes(OptimizerKind kind, MasterForm master, StateFormat states);

// By exact name; InvalidArgument lists the known ones.
absl::StatusOr<OptimizerKind> ParseOptimizerKind(std::string_view name);

// InvalidArgument naming the first field that torch.optim would refuse or that is not finite: lr,
// eps, weight_decay negative; betas outside [0, 1); momentum negative; nesterov without momentum or
// with dampening.
absl::Status ValidateHyperparameters(OptimizerKind kind, const Hyperparameters& hyperparameters);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_OPTIM_REGISTRY_H_
