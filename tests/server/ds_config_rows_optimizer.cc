#include "tests/server/ds_config_rows.h"

// Parameters of optimizers and schedules.

namespace zeroshard {

std::vector<DeepSpeedRow> DeepSpeedOptimizerRows() {
  return {
      {"optimizer.params.lr", "0.001", "3e-4", R"("1e-3")", Fate::kHonoured, R"("type": "Adam")"},
      {"optimizer.params.betas", "[0.9, 0.999]", "[0.8, 0.95]", "[0.9, 1.0]", Fate::kHonoured,
       R"("type": "Adam")"},
      {"optimizer.params.eps", "1e-08", "1e-6", "-1", Fate::kHonoured, R"("type": "Adam")"},
      {"optimizer.params.weight_decay", "0", "0.1", "-0.1", Fate::kHonoured, R"("type": "Adam")"},
      {"optimizer.params.bias_correction", "true", "false", R"("x")", Fate::kHonoured,
       R"("type": "Adam")"},
      {"optimizer.params.amsgrad", "false", "true", R"("x")", Fate::kRefused, R"("type": "Adam")"},
      {"optimizer.params.adam_w_mode", "true", "false", R"("x")", Fate::kHonoured,
       R"("type": "Adam")"},
      {"optimizer.params.torch_adam", "false", "true", R"("x")", Fate::kNoEffect,
       R"("type": "Adam")"},
      {"optimizer.params.fp32_optimizer_states", "true", "false", R"("x")", Fate::kHonoured,
       R"("type": "Adam")", R"("bf16": {"enabled": true})"},
      {"optimizer.params.max_grad_norm", "", "1.0", "1.0", Fate::kRefused, R"("type": "Adam")"},
      {"optimizer.params.lr", "0.001", "0.1", "NaN", Fate::kHonoured, R"("type": "SGD")"},
      {"optimizer.params.momentum", "0", "0.9", "-1", Fate::kHonoured, R"("type": "SGD")"},
      {"optimizer.params.dampening", "0", "0.1", "Infinity", Fate::kHonoured, R"("type": "SGD")"},
      {"optimizer.params.weight_decay", "0", "0.1", "-1", Fate::kHonoured, R"("type": "SGD")"},
      {"optimizer.params.nesterov", "false", "true", R"("x")", Fate::kRefused, R"("type": "SGD")"},
      {"optimizer.params.maximize", "false", "true", R"("x")", Fate::kRefused, R"("type": "SGD")"},
      {"optimizer.params.foreach", "null", "true", R"("x")", Fate::kNoEffect, R"("type": "SGD")"},
      {"optimizer.params.fused", "null", "true", R"("x")", Fate::kNoEffect, R"("type": "SGD")"},
      {"optimizer.params.differentiable", "false", "true", R"("x")", Fate::kRefused,
       R"("type": "SGD")"},
      {"optimizer.params.max_grad_norm", "", "1.0", "1.0", Fate::kRefused, R"("type": "SGD")"},
      {"optimizer.params.lr", "0.01", "0.1", "-1", Fate::kHonoured, R"("type": "Adagrad")"},
      {"optimizer.params.eps", "1e-10", "1e-8", "NaN", Fate::kHonoured, R"("type": "Adagrad")"},
      {"optimizer.params.weight_decay", "0", "0.1", "-1", Fate::kHonoured, R"("type": "Adagrad")"},
      {"optimizer.params.amsgrad", "false", "true", R"("x")", Fate::kRefused,
       R"("type": "Adagrad")"},
      {"optimizer.params.fp32_optimizer_states", "true", "false", R"("x")", Fate::kHonoured,
       R"("type": "Adagrad")", R"("bf16": {"enabled": true})"},
      {"optimizer.params.max_grad_norm", "", "1.0", "1.0", Fate::kRefused, R"("type": "Adagrad")"},
      {"optimizer.params.lr", "0.001", "1e-4", "-1e-4", Fate::kHonoured, R"("type": "Lion")"},
      {"optimizer.params.betas", "[0.9, 0.999]", "[0.9, 0.99]", "[1, 0.9]", Fate::kHonoured,
       R"("type": "Lion")"},
      {"optimizer.params.weight_decay", "0", "1", "-1", Fate::kHonoured, R"("type": "Lion")"},
      {"optimizer.params.fp32_optimizer_states", "true", "false", R"("x")", Fate::kHonoured,
       R"("type": "Lion")", R"("bf16": {"enabled": true})"},
      {"scheduler.params.warmup_min_lr", "0.0", "1e-5", "-1", Fate::kHonoured,
       R"("type": "WarmupLR")"},
      {"scheduler.params.warmup_max_lr", "null", "1e-3", R"("x")", Fate::kHonoured,
       R"("type": "WarmupLR")"},
      {"scheduler.params.warmup_num_steps", "1000", "10", "0", Fate::kHonoured,
       R"("type": "WarmupLR")"},
      {"scheduler.params.warmup_type", R"("log")", R"("linear")", R"("cubic")", Fate::kHonoured,
       R"("type": "WarmupLR")"},
      {"scheduler.params.last_batch_iteration", "-1", "5", "-2", Fate::kHonoured,
       R"("type": "WarmupLR")"},
      {"scheduler.params.lr_range_test_min_lr", "0.001", "[1e-3,1e-2]", "[]", Fate::kHonoured,
       R"("type": "LRRangeTest")"},
      {"scheduler.params.lr_range_test_step_size", "2000", "10", "0", Fate::kHonoured,
       R"("type": "LRRangeTest")"},
      {"scheduler.params.lr_range_test_step_rate", "1.0", "2", R"("x")", Fate::kHonoured,
       R"("type": "LRRangeTest")"},
      {"scheduler.params.lr_range_test_staircase", "false", "true", "1.5", Fate::kHonoured,
       R"("type": "LRRangeTest")"},
      {"scheduler.params.last_batch_iteration", "-1", "5", "-2", Fate::kHonoured,
       R"("type": "LRRangeTest")"},
  };
}

std::vector<DeepSpeedRow> DeepSpeedRows() {
  std::vector<DeepSpeedRow> rows = DeepSpeedZeroRows();
  for (const DeepSpeedRow& row : DeepSpeedTopRows()) rows.push_back(row);
  for (const DeepSpeedRow& row : DeepSpeedOptimizerRows()) rows.push_back(row);
  return rows;
}

}  // namespace zeroshard
