#include <cmath>

#include "server/ds_config_settings.h"
#include "server/text.h"

// Step 6: what DeepSpeed asserts between keys, what would divide by zero or never end later, and
// settings that another setting makes idle.

namespace zeroshard {
namespace {

constexpr std::string_view kStage = "zero_optimization.stage";

void CheckZero(const Settings& settings, Findings& findings) {
  const std::int64_t stage = settings.Int(kStage);
  constexpr std::string_view kAllgather = "zero_optimization.allgather_bucket_size";
  if ((stage == 1 || stage == 2) && settings.Int(kAllgather) % 2 != 0) {
    findings.Error(settings.At(kAllgather), Concat(kAllgather, " is ", settings.Int(kAllgather),
                                                   "; stages 1 and 2 need a multiple of 2"));
  }
  if (stage < 3) {
    NameIdle({"zero_optimization.stage3_prefetch_bucket_size",
              "zero_optimization.stage3_param_persistence_threshold",
              "zero_optimization.stage3_max_live_parameters"},
             "it is a setting of stage 3", settings, findings);
  }
}

void CheckLossScale(const Settings& settings, Findings& findings) {
  if (!settings.Bool("fp16.enabled")) {
    NameIdle({"fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window",
              "fp16.hysteresis", "fp16.consecutive_hysteresis", "fp16.min_loss_scale"},
             "fp16 is not enabled", settings, findings);
    return;
  }
  constexpr double kLargestScale = 0x1p127;
  if (settings.Float("fp16.loss_scale") > kLargestScale) {
    findings.Error(settings.At("fp16.loss_scale"), "fp16.loss_scale must be at most 2^127");
  }
  if (settings.Float("fp16.loss_scale") != 0) {
    NameIdle({"fp16.initial_scale_power", "fp16.loss_scale_window", "fp16.hysteresis",
              "fp16.consecutive_hysteresis", "fp16.min_loss_scale"},
             "fp16.loss_scale makes the scale a fixed one", settings, findings);
    return;
  }
  for (const std::string_view path :
       {"fp16.loss_scale_window", "fp16.hysteresis", "fp16.min_loss_scale"}) {
    if (settings.Int(path) > 0) continue;
    findings.Error(settings.At(path), Concat(path, " is ", settings.Int(path),
                                             "; a dynamic loss scale needs at least 1"));
  }
  const double initial =
      std::ldexp(1.0, static_cast<int>(settings.Int("fp16.initial_scale_power")));
  if (settings.Float("fp16.min_loss_scale") > initial) {
    findings.Warn(settings.At("fp16.min_loss_scale"),
                  Concat("fp16.min_loss_scale ", settings.Int("fp16.min_loss_scale"),
                         " is above the first scale, ", initial, "."));
  }
}

void CheckPrecision(const Settings& settings, Findings& findings) {
  const bool fp16 = settings.Bool("fp16.enabled");
  const bool bf16 = settings.Bool("bf16.enabled");
  if (fp16 && bf16) {
    findings.Error(settings.At("bf16.enabled"),
                   Concat("fp16.enabled (", PositionText(settings.At("fp16.enabled")),
                          ") and bf16.enabled exclude each other; enable one"));
  }
  if (!bf16) {
    NameIdle({"bf16.check_grad_overflow"}, "bf16 is not enabled", settings, findings);
  }
  CheckLossScale(settings, findings);
}

void CheckOptimizer(const Settings& settings, Findings& findings) {
  if (const Setting* betas = settings.Find("optimizer.params.betas"); betas != nullptr) {
    for (const JsonValue& beta : betas->value.items) {
      if (beta.text != "1" && std::strtod(beta.text.c_str(), nullptr) < 1) continue;
      findings.Error(betas->value.at, Concat("optimizer.params.betas is ", RenderJson(betas->value),
                                             "; both must be below 1"));
      break;
    }
  }
  if (settings.Bool("optimizer.params.nesterov") &&
      (settings.Float("optimizer.params.momentum") <= 0 ||
       settings.Float("optimizer.params.dampening") != 0)) {
    findings.Error(settings.At("optimizer.params.nesterov"),
                   "optimizer.params.nesterov needs a momentum above 0 and no dampening");
  }
  const bool adam_w = settings.optimizer != nullptr && settings.optimizer->type == "AdamW";
  if (adam_w && !settings.Bool("optimizer.params.adam_w_mode")) {
    findings.NoEffect("optimizer.params.adam_w_mode",
                      "AdamW always decouples weight decay (Adam with adam_w_mode false does not)");
  }
}

void CheckScheduler(const Settings& settings, Findings& findings) {
  const std::optional<std::int64_t> total =
      settings.OptionalInt("scheduler.params.total_num_steps");
  const std::int64_t warmup = settings.Int("scheduler.params.warmup_num_steps");
  if (total.has_value() && *total < warmup) {
    findings.Warn(settings.At("scheduler.params.total_num_steps"),
                  Concat("scheduler.params.total_num_steps ", *total,
                         " is less than warmup_num_steps ", warmup, "."));
  }
}

}  // namespace

void NameIdle(std::initializer_list<std::string_view> paths, std::string_view reason,
              const Settings& settings, Findings& findings) {
  for (const std::string_view path : paths) {
    if (settings.Given(path)) findings.NoEffect(path, reason);
  }
}

void CheckRules(const Settings& settings, Findings& findings) {
  CheckZero(settings, findings);
  CheckNvme(settings, findings);
  CheckGpu(settings, findings);
  CheckPrecision(settings, findings);
  CheckOptimizer(settings, findings);
  CheckScheduler(settings, findings);
}

}  // namespace zeroshard
