// Adagrad (Duchi, Hazan and Singer) with L2 weight decay, as torch.optim.Adagrad computes it with
// lr_decay 0 and initial_accumulator_value 0:
//   g <- g + wd * p   (only when wd is not 0)
//   sum <- sum + g * g
//   p <- p - lr * g / (sqrt(sum) + eps)
// fp32, one rounding per operation, in the order written in Update.
#ifndef ZEROSHARD_WORKER_OPTIM_ADAGRAD_H_
#define ZEROSHARD_WORKER_OPTIM_ADAGRAD_H_

#include "worker/optim/functor.h"

namespace zeroshard {

struct Adagrad {
  static constexpr const char* kName = "adagrad";
  static constexpr int kStates = 1;
  static constexpr const char* kStateNames[] = {"sum"};
  static constexpr StateMap kStateMaps[] = {StateMap::kNone};
  static constexpr uint32_t kParameters = kUsesEps;

  static ZS_KERNEL_FN void Update(const UpdateArgs& a, float g, float& p, float& sum, float&) {
    g = a.weight_decay != 0.0f ? g + a.weight_decay * p : g;
    sum = sum + g * g;
    p = p - a.lr * g / (__builtin_sqrtf(sum) + a.eps);
  }
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_OPTIM_ADAGRAD_H_
