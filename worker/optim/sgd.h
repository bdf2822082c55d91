// Stochastic gradient descent, as torch.optim.SGD computes it:
//   g <- g + wd * p   (only when wd is not 0)
//   with momentum:  b <- g at the parameter's first update, else  momentum * b + (1 - dampening) *
//   g
//                   g <- b, or with nesterov  g + momentum * b
//   p <- p - lr * g
// A group with momentum 0 in a job whose other groups have momentum gets first_step in every step,
// which is the formula without momentum. fp32, one rounding per operation.
#ifndef ZEROSHARD_WORKER_OPTIM_SGD_H_
#define ZEROSHARD_WORKER_OPTIM_SGD_H_

#include "worker/optim/functor.h"

namespace zeroshard {

struct Sgd {
  static constexpr const char* kName = "sgd";
  static constexpr int kStates = 0;
  static constexpr const char* kStateNames[] = {""};
  static constexpr StateMap kStateMaps[] = {StateMap::kNone};
  static constexpr uint32_t kParameters = kUsesMomentum;

  static ZS_KERNEL_FN void Update(const UpdateArgs& a, float g, float& p, float&, float&) {
    g = a.weight_decay != 0.0f ? g + a.weight_decay * p : g;
    p = p - a.lr * g;
  }
};

struct SgdMomentum {
  static constexpr const char* kName = "sgd_momentum";
  static constexpr int kStates = 1;
  static constexpr const char* kStateNames[] = {"momentum_buffer"};
  static constexpr StateMap kStateMaps[] = {StateMap::kSigned};
  static constexpr uint32_t kParameters = kUsesMomentum;

  static ZS_KERNEL_FN void Update(const UpdateArgs& a, float g, float& p, float& b, float&) {
    g = a.weight_decay != 0.0f ? g + a.weight_decay * p : g;
    const float blended = b * a.momentum + g * a.one_minus_dampening;
    b = a.first_step != 0 ? g : blended;
    const float ahead = g + a.momentum * b;
    g = a.nesterov != 0 ? ahead : b;
    p = p - a.lr * g;
  }
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_OPTIM_SGD_H_
