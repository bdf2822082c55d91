// The list of optimizers, for the kernel files and the registry. To add one: a header with a
// functor like those beside this file, its include here, and a line at the end of
// ZS_FOR_EACH_OPTIMIZER (docs/numerics.md shows one whole). The line's place is the value of the
// OptimizerKind, which checkpoints store: lines are never moved or taken out.
//
// Kernel files include this and compile per instruction set, so nothing of the standard library
// comes in here.
#ifndef ZEROSHARD_WORKER_OPTIM_OPTIMIZER_KIND_H_
#define ZEROSHARD_WORKER_OPTIM_OPTIMIZER_KIND_H_

#include <cstdint>

#include "worker/optim/adagrad.h"
#include "worker/optim/adam.h"
#include "worker/optim/adamw.h"
#include "worker/optim/lion.h"
#include "worker/optim/sgd.h"

#define ZS_FOR_EACH_OPTIMIZER(X) \
  X(kAdamW, AdamW)               \
  X(kAdam, Adam)                 \
  X(kSgd, Sgd)                   \
  X(kSgdMomentum, SgdMomentum)   \
  X(kAdagrad, Adagrad)           \
  X(kLion, Lion)

namespace zeroshard {

#define ZS_OPTIMIZER_VALUE(kind, functor) kind,
enum class OptimizerKind : uint8_t { ZS_FOR_EACH_OPTIMIZER(ZS_OPTIMIZER_VALUE) };
#undef ZS_OPTIMIZER_VALUE

#define ZS_OPTIMIZER_COUNT(kind, functor) +1
inline constexpr int kOptimizerKinds = ZS_FOR_EACH_OPTIMIZER(ZS_OPTIMIZER_COUNT);
#undef ZS_OPTIMIZER_COUNT

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_OPTIM_OPTIMIZER_KIND_H_
