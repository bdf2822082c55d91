// What one optimizer update needs to know beside the tensors, rounded once to the fp32 numbers the
// kernels use.
//
// The arguments of a step are part of the step's decision: made once, stored before the first group
// is touched, and never computed again (a learning rate or a loss scale could have moved).
// MakeUpdateArgs is nevertheless a pure function without libm calls, so every machine computes the
// same bits from the same inputs.
#ifndef ZEROSHARD_WORKER_OPTIM_UPDATE_ARGS_H_
#define ZEROSHARD_WORKER_OPTIM_UPDATE_ARGS_H_

#include <cstdint>

namespace zeroshard {

// The user's numbers for one parameter group. Fields that an optimizer does not know are ignored by
// it.
struct Hyperparameters {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;
  double momentum = 0.0;
  double dampening = 0.0;
  bool nesterov = false;
};

// POD, stored in the ledger as it is. The formulas are those of torch.optim; `step` counts the
// updates of the parameter itself, this one included (1 at the first), for a parameter without
// gradient is skipped.
struct UpdateArgs {
  float lr = 0;
  float weight_decay = 0;
  float decay_factor = 1;  // 1 - lr * weight_decay (AdamW)
  float beta1 = 0;
  float one_minus_beta1 = 1;
  float beta2 = 0;
  float one_minus_beta2 = 1;
  float eps = 0;
  float step_size = 0;   // lr / (1 - beta1^step) * c, with c = sqrt(1 - beta2^step) (Adam, AdamW)
  float scaled_eps = 0;  // eps * c (Adam, AdamW)
  float momentum = 0;
  float one_minus_dampening = 1;
  uint32_t first_step = 0;  // SGD: the momentum buffer is set to the gradient, not blended (0 or 1)
  uint32_t nesterov = 0;    // 0 or 1
};
static_assert(sizeof(UpdateArgs) == 56);

// Every product, power, quotient and root in fp64, then one rounding to fp32. step >= 1.
UpdateArgs MakeUpdateArgs(const Hyperparameters& hyperparameters, int64_t step);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_OPTIM_UPDATE_ARGS_H_
