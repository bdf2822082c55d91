#include "worker/loss_scaler.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace zeroshard {
namespace {

constexpr double kFactor = 2.0;

absl::Status OnOverflow(const model::v1::LossScale& config, JobNumbers& numbers) {
  if (config.hysteresis() <= 1 || numbers.scaler_hysteresis == 1) {
    if (numbers.loss_scale == config.minimum()) {
      return absl::FailedPreconditionError(
          absl::StrCat("gradients overflowed with the loss scale at its minimum of ",
                       config.minimum(), " (fp16.min_loss_scale): training has diverged"));
    }
    numbers.loss_scale = std::max(numbers.loss_scale / kFactor, config.minimum());
  } else {
    --numbers.scaler_hysteresis;
  }
  numbers.scaler_last_overflow = static_cast<int64_t>(numbers.scaler_iteration);
  return absl::OkStatus();
}

void OnGoodStep(const model::v1::LossScale& config, JobNumbers& numbers) {
  if (config.consecutive_hysteresis()) numbers.scaler_hysteresis = config.hysteresis();
  const int64_t stable =
      static_cast<int64_t>(numbers.scaler_iteration) - numbers.scaler_last_overflow - 1;
  if (stable > 0 && config.window() > 0 && stable % config.window() == 0) {
    if (!config.consecutive_hysteresis()) numbers.scaler_hysteresis = config.hysteresis();
    numbers.loss_scale *= kFactor;
  }
}

}  // namespace

absl::Status AdvanceLossScale(const model::v1::LossScale& config, bool overflow,
                              JobNumbers& numbers) {
  if (config.dynamic()) {
    if (overflow) {
      if (absl::Status status = OnOverflow(config, numbers); !status.ok()) return status;
    } else {
      OnGoodStep(config, numbers);
    }
  }
  ++numbers.scaler_iteration;
  return absl::OkStatus();
}

}  // namespace zeroshard
