// The list of optimizers, for the kernel files and the registry. To add one: a header with a
// functor like those beside this file, a line in ZS_FOR_EACH_OPTIMIZER, and a value of
// OptimizerKind (never reused: checkpoints store it).
//
// Kernel files include this and compile per instruction set, so nothing of the standard library
// comes in here.
#ifndef ZEROSHARD_WORKER_OPTIM_OPTIMIZER_KIND_H_
#define ZEROSHARD_WORKER_OPTIM_OPTIMIZER_KIND_H_

#include <cstdint>

#include "worker/optim/adam.h"
#include "worker/optim/adamw.h"
#include "worker/optim/sgd.h"

#define ZS_FOR_EACH_OPTIMIZER(X) \
  X(kAdamW, AdamW)               \
  X(kAdam, Adam)                 \
  X(kSgd, Sgd)                   \
  X(kSgdMomentum, SgdMomentum)

namespace zeroshard {

enum class OptimizerKind : uint8_t { kAdamW = 0, kAdam = 1, kSgd = 2, kSgdMomentum = 3 };

inline constexpr int kOptimizerKinds = 4;
inline constexpr int kMaxStateSlots = 2;

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_OPTIM_OPTIMIZER_KIND_H_
