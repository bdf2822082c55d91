#include "worker/optim/update_args.h"

#include <cmath>

namespace zeroshard {
namespace {

// base^exponent by squaring: products only, so the same bits on every machine (libm's pow has
// variants with fma).
double Power(double base, int64_t exponent) {
  double result = 1.0;
  while (exponent > 0) {
    if (exponent % 2 != 0) result *= base;
    base *= base;
    exponent /= 2;
  }
  return result;
}

}  // namespace

UpdateArgs MakeUpdateArgs(const Hyperparameters& h, int64_t step) {
  UpdateArgs args;
  args.lr = static_cast<float>(h.lr);
  args.weight_decay = static_cast<float>(h.weight_decay);
  args.decay_factor = static_cast<float>(1.0 - h.lr * h.weight_decay);
  args.beta1 = static_cast<float>(h.beta1);
  args.one_minus_beta1 = static_cast<float>(1.0 - h.beta1);
  args.beta2 = static_cast<float>(h.beta2);
  args.one_minus_beta2 = static_cast<float>(1.0 - h.beta2);
  args.eps = static_cast<float>(h.eps);
  const double c = std::sqrt(1.0 - Power(h.beta2, step));
  args.step_size = static_cast<float>(h.lr / (1.0 - Power(h.beta1, step)) * c);
  args.scaled_eps = static_cast<float>(h.eps * c);
  args.momentum = static_cast<float>(h.momentum);
  args.one_minus_dampening = static_cast<float>(1.0 - h.dampening);
  args.first_step = (step <= 1 || h.momentum == 0.0) ? 1 : 0;
  args.nesterov = h.nesterov ? 1 : 0;
  return args;
}

}  // namespace zeroshard
