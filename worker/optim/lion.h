// Lion (Chen et al., Symbolic Discovery of Optimization Algorithms) with decoupled weight decay, as
// its authors' code computes it:
//   p <- p * (1 - lr * wd)
//   p <- p - lr * sign(beta1 * m + (1 - beta1) * g)
//   m <- beta2 * m + (1 - beta2) * g
// sign(0) is 0. The sign of a NaN is a NaN, so that a NaN gradient shows in the parameter.
// fp32, one rounding per operation, in the order written in Update.
#ifndef ZEROSHARD_WORKER_OPTIM_LION_H_
#define ZEROSHARD_WORKER_OPTIM_LION_H_

#include "worker/optim/functor.h"

namespace zeroshard {

struct Lion {
  static constexpr const char* kName = "lion";
  static constexpr int kStates = 1;
  static constexpr const char* kStateNames[] = {"exp_avg"};
  static constexpr StateMap kStateMaps[] = {StateMap::kSigned};
  static constexpr uint32_t kParameters = kUsesBetas;

  static ZS_KERNEL_FN void Update(const UpdateArgs& a, float g, float& p, float& m, float&) {
    p = p * a.decay_factor;
    const float direction = m * a.beta1 + g * a.one_minus_beta1;
    const float negative_or_not = direction < 0.0f ? -1.0f : direction;
    const float sign = direction > 0.0f ? 1.0f : negative_or_not;
    p = p - a.lr * sign;
    m = m * a.beta2 + g * a.one_minus_beta2;
  }
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_OPTIM_LION_H_
