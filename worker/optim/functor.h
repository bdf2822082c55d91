// What an optimizer's functor says about itself beside its formula; read by the registry.
//
// A functor is a struct with
//   kName        the name in configs and checkpoints
//   kStates      number of state arrays, at most kMaxStateSlots
//   kStateNames  their names, torch's where torch has the optimizer
//   kStateMaps   the code book of each when it is held in 8 bits
//   kParameters  the hyperparameters it reads beside lr and weight_decay, which are checked
//   Update(args, g, p, s0, s1)  one element's update in fp32: one rounding per operation, no
//                branches, no libm
// Included by kernel files: no standard library.
#ifndef ZEROSHARD_WORKER_OPTIM_FUNCTOR_H_
#define ZEROSHARD_WORKER_OPTIM_FUNCTOR_H_

#include <cstdint>

#include "worker/kernel_math.h"
#include "worker/optim/update_args.h"

namespace zeroshard {

inline constexpr int kMaxStateSlots = 2;

// The dynamic code book of an 8-bit state (worker/optim/code_book.h).
enum class StateMap : uint8_t {
  kNone,      // the optimizer has no published 8-bit form
  kSigned,    // moments of either sign
  kUnsigned,  // second moments
};

inline constexpr uint32_t kUsesBetas = 1;
inline constexpr uint32_t kUsesEps = 2;
inline constexpr uint32_t kUsesMomentum = 4;  // momentum, dampening, nesterov

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_OPTIM_FUNCTOR_H_
