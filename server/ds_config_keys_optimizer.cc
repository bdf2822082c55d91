#include <array>

#include "server/ds_config_keys.h"

// What each optimizer and each learning-rate schedule takes as parameters.

namespace zeroshard {
namespace {

using enum KeyType;
using enum KeyStatus;

constexpr double kCount = 9223372036854775807.0;
constexpr double kSmallest = std::numeric_limits<double>::denorm_min();

constexpr std::string_view kNoStairs = "stairs are not in this build";
constexpr std::string_view kOwnKernel = "the workers' own optimizer is used";
constexpr KeySpec kMaxGradNorm = {"optimizer.params.max_grad_norm", kFloat, "", kRefused,
                                  "write the top-level key gradient_clipping instead"};
constexpr KeySpec kAmsgrad = {"optimizer.params.amsgrad",        kBool, "false", kRefused,
                              "DeepSpeed has no AMSGrad either", 0,     0,       kStrict};

constexpr KeySpec Rate(std::string_view path, std::string_view value, std::string_view note) {
  return {path, kFloat, value, kHonoured, note, 0, kNoLimit, kStrict};
}
constexpr KeySpec Flag(std::string_view path, std::string_view value, KeyStatus status,
                       std::string_view note) {
  return {path, kBool, value, status, note, 0, 0, kStrict};
}

constexpr KeySpec kFp32States = Flag("optimizer.params.fp32_optimizer_states", "true", kHonoured,
                                     "false in a bf16 job: zeroshard.optimizer_states bf16");

constexpr std::array kAdam = std::to_array<KeySpec>({
    Rate("optimizer.params.lr", "0.001", ""),
    {"optimizer.params.betas", kFloatPair, "[0.9, 0.999]", kHonoured, "", 0, 1, kStrict},
    Rate("optimizer.params.eps", "1e-08", ""),
    Rate("optimizer.params.weight_decay", "0", "torch.optim.AdamW's own default is 0.01"),
    Flag("optimizer.params.bias_correction", "true", kHonoured, ""),
    kAmsgrad,
    Flag("optimizer.params.adam_w_mode", "true", kHonoured,
         "false with Adam: weight decay is added to the gradient (L2)"),
    Flag("optimizer.params.torch_adam", "false", kNoEffect, kOwnKernel),
    kFp32States,
    kMaxGradNorm,
});

// States are codes of 8 bits with a scale a block of 256 elements.
constexpr std::array kAdam8bit = std::to_array<KeySpec>({
    Rate("optimizer.params.lr", "0.001", ""),
    {"optimizer.params.betas", kFloatPair, "[0.9, 0.999]", kHonoured, "", 0, 1, kStrict},
    Rate("optimizer.params.eps", "1e-08", ""),
    Rate("optimizer.params.weight_decay", "0", "bitsandbytes' own default for AdamW8bit is 0.01"),
    Flag("optimizer.params.bias_correction", "true", kHonoured, ""),
    kAmsgrad,
    Flag("optimizer.params.adam_w_mode", "true", kHonoured,
         "false with Adam8bit: weight decay is added to the gradient (L2)"),
    kMaxGradNorm,
});

constexpr std::array kAdagrad = std::to_array<KeySpec>({
    Rate("optimizer.params.lr", "0.01", ""),
    Rate("optimizer.params.eps", "1e-10", ""),
    Rate("optimizer.params.weight_decay", "0", "L2, as in torch.optim.Adagrad"),
    kAmsgrad,
    kFp32States,
    kMaxGradNorm,
});

constexpr std::array kLion = std::to_array<KeySpec>({
    Rate("optimizer.params.lr", "0.001", ""),
    {"optimizer.params.betas", kFloatPair, "[0.9, 0.999]", kHonoured, "", 0, 1, kStrict},
    Rate("optimizer.params.weight_decay", "0", "decoupled"),
    kFp32States,
    kMaxGradNorm,
});

constexpr std::array kSgd = std::to_array<KeySpec>({
    Rate("optimizer.params.lr", "0.001", ""),
    Rate("optimizer.params.momentum", "0", ""),
    {"optimizer.params.dampening", kFloat, "0", kHonoured, "", -kNoLimit, kNoLimit, kStrict},
    Rate("optimizer.params.weight_decay", "0", "L2, as in torch.optim.SGD"),
    Flag("optimizer.params.nesterov", "false", kHonoured, "needs momentum and no dampening"),
    Flag("optimizer.params.maximize", "false", kRefused, "change the sign of the loss"),
    {"optimizer.params.foreach", kBool, "null", kNoEffect, kOwnKernel, 0, 0, kStrict | kNullable},
    {"optimizer.params.fused", kBool, "null", kNoEffect, kOwnKernel, 0, 0, kStrict | kNullable},
    Flag("optimizer.params.differentiable", "false", kRefused, "a step has no gradient"),
    kMaxGradNorm,
});

constexpr std::array kOptimizers = std::to_array<VariantSpec>({
    {"Adam", kAdam},
    {"AdamW", kAdam},
    {"SGD", kSgd},
    {"Adagrad", kAdagrad},
    {"Lion", kLion},
    {"AdamW8bit", kAdam8bit},
    {"Adam8bit", kAdam8bit},
});

constexpr std::string_view kNotHere[] = {"lamb",   "onebitadam", "onebitlamb", "zerooneadam",
                                         "muadam", "muadamw",    "musgd",      "muon"};

constexpr KeySpec Steps(std::string_view path, std::string_view value, double min) {
  return {path, kInt, value, kHonoured, "", min, kCount, kStrict | kTrainer};
}
constexpr KeySpec Value(std::string_view path, std::string_view value) {
  return {path, kFloat, value, kHonoured, "", 0, kNoLimit, kStrict | kTrainer};
}
constexpr KeySpec PerGroup(std::string_view path, std::string_view value) {
  return {path, kFloatOrList, value, kHonoured, "", 0, kNoLimit, kStrict | kTrainer};
}
constexpr KeySpec kWarmupType = {
    "scheduler.params.warmup_type", kText, "\"log\"", kHonoured, "", 0, 0, kTrainer, "log|linear"};
constexpr KeySpec kLastIteration = Steps("scheduler.params.last_batch_iteration", "-1", -1);
constexpr KeySpec kWarmupSteps = Steps("scheduler.params.warmup_num_steps", "1000", 1);
constexpr KeySpec kTotalSteps = Steps("scheduler.params.total_num_steps", "", 1);

constexpr std::array kWarmup = std::to_array<KeySpec>({
    PerGroup("scheduler.params.warmup_min_lr", "0.0"),
    {"scheduler.params.warmup_max_lr", kFloatOrList, "null", kHonoured,
     "null is the optimizer's lr", 0, kNoLimit, kStrict | kNullable | kTrainer},
    kWarmupSteps,
    kWarmupType,
    kLastIteration,
});
constexpr std::array kWarmupDecay = std::to_array<KeySpec>({
    kTotalSteps,
    PerGroup("scheduler.params.warmup_min_lr", "0.0"),
    PerGroup("scheduler.params.warmup_max_lr", "0.001"),
    kWarmupSteps,
    kWarmupType,
    kLastIteration,
});
constexpr std::array kWarmupCosine = std::to_array<KeySpec>({
    kTotalSteps,
    Value("scheduler.params.warmup_min_ratio", "0.0"),
    kWarmupSteps,
    Value("scheduler.params.cos_min_ratio", "0.0001"),
    kWarmupType,
    kLastIteration,
});
constexpr std::array kOneCycle = std::to_array<KeySpec>({
    Value("scheduler.params.cycle_min_lr", ""),
    Value("scheduler.params.cycle_max_lr", ""),
    Value("scheduler.params.decay_lr_rate", "0.0"),
    Steps("scheduler.params.cycle_first_step_size", "2000", 1),
    {"scheduler.params.cycle_second_step_size", kInt, "null", kHonoured,
     "null is cycle_first_step_size", 1, kCount, kStrict | kNullable | kTrainer},
    {"scheduler.params.cycle_first_stair_count", kInt, "0", kRefused, kNoStairs, 0, kCount,
     kStrict},
    {"scheduler.params.cycle_second_stair_count", kInt, "null", kRefused, kNoStairs, 0, kCount,
     kStrict | kNullable},
    Steps("scheduler.params.decay_step_size", "0", 0),
    {"scheduler.params.cycle_momentum", kBool, "true", kHonoured,
     "moves beta1 against the learning rate, and sets beta2 to 0.99", 0, 0, kStrict | kTrainer},
    {"scheduler.params.cycle_min_mom", kFloat, "0.8", kHonoured, "", 0, 0.999999,
     kStrict | kTrainer},
    {"scheduler.params.cycle_max_mom", kFloat, "0.9", kHonoured, "", 0, 0.999999,
     kStrict | kTrainer},
    Value("scheduler.params.decay_mom_rate", "0.0"),
    kLastIteration,
});

constexpr std::array kRangeTest = std::to_array<KeySpec>({
    PerGroup("scheduler.params.lr_range_test_min_lr", "0.001"),
    Steps("scheduler.params.lr_range_test_step_size", "2000", 1),
    Value("scheduler.params.lr_range_test_step_rate", "1.0"),
    {"scheduler.params.lr_range_test_staircase", kBool, "false", kHonoured, "", 0, 0,
     kStrict | kTrainer},
    kLastIteration,
});

constexpr std::array kSchedulers = std::to_array<VariantSpec>({
    {"WarmupLR", kWarmup},
    {"WarmupDecayLR", kWarmupDecay},
    {"WarmupCosineLR", kWarmupCosine},
    {"OneCycle", kOneCycle},
    {"LRRangeTest", kRangeTest},
});

}  // namespace

std::span<const VariantSpec> OptimizerVariants() { return kOptimizers; }
std::span<const VariantSpec> SchedulerVariants() { return kSchedulers; }
std::span<const std::string_view> OptimizersNotHere() { return kNotHere; }

}  // namespace zeroshard
