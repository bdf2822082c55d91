// Adam (Kingma and Ba) with L2 weight decay, as torch.optim.Adam computes it without amsgrad:
//   g <- g + wd * p   (only when wd is not 0)
//   m <- beta1 * m + (1 - beta1) * g            v <- beta2 * v + (1 - beta2) * g * g
//   p <- p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
// the last with numerator and denominator multiplied by c = sqrt(1 - beta2^t), as the paper
// suggests at the end of its section 2: one division an element instead of two. fp32, one rounding
// per operation, in the order written in Update.
#ifndef ZEROSHARD_WORKER_OPTIM_ADAM_H_
#define ZEROSHARD_WORKER_OPTIM_ADAM_H_

#include "worker/optim/functor.h"

namespace zeroshard {

struct Adam {
  static constexpr const char* kName = "adam";
  static constexpr int kStates = 2;
  static constexpr const char* kStateNames[] = {"exp_avg", "exp_avg_sq"};
  static constexpr StateMap kStateMaps[] = {StateMap::kSigned, StateMap::kUnsigned};
  static constexpr uint32_t kParameters = kUsesBetas | kUsesEps;

  static ZS_KERNEL_FN void Update(const UpdateArgs& a, float g, float& p, float& m, float& v) {
    g = a.weight_decay != 0.0f ? g + a.weight_decay * p : g;
    m = m * a.beta1 + g * a.one_minus_beta1;
    v = v * a.beta2 + a.one_minus_beta2 * g * g;
    p = p - a.step_size * m / (__builtin_sqrtf(v) + a.scaled_eps);
  }
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_OPTIM_ADAM_H_
