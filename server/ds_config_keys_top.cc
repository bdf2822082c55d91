#include <array>

#include "server/ds_config_keys.h"

// The top level, the optimizer's and scheduler's own keys, precision, and the `zeroshard` block.

namespace zeroshard {
namespace {

using enum KeyType;
using enum KeyStatus;

constexpr double kCount = 9223372036854775807.0;
constexpr double kSmallCount = 2147483647;
constexpr double kSmallest = std::numeric_limits<double>::denorm_min();
constexpr unsigned kTop = kStrict | kNullable;

constexpr std::string_view kSums =
    "gradients are summed in fp32 in one fixed order, whatever the way they travel";
constexpr std::string_view kPrinting = "the daemon's metrics show it at all times";
constexpr std::string_view kScript = "it is the training script's matter";
constexpr std::string_view kMaster = "fp16 parameters are updated through an fp32 master only";
constexpr std::string_view kParallel = "this build shards over data-parallel ranks only";

constexpr std::array kTopTable = std::to_array<KeySpec>({
    {"train_batch_size", kInt, "null", kHonoured, "checked against the ranks when all are attached",
     1, kSmallCount, kTop},
    {"train_micro_batch_size_per_gpu", kInt, "null", kHonoured, "samples of one rank in one pass",
     1, kSmallCount, kTop},
    {"gradient_accumulation_steps", kInt, "null", kHonoured, "micro-steps of one step", 1,
     kSmallCount, kTop},
    {"managed_gradient_accumulation", kBool, "true", kRefused,
     "the engine counts micro-steps: to make every step() the boundary, write "
     "gradient_accumulation_steps 1",
     0, 0, kStrict},
    {"gradient_clipping", kFloat, "1.0", kHonoured,
     "by the global norm; 0.0 turns it off (the default before DeepSpeed 0.19.3)", 0, kNoLimit,
     kStrict},
    {"gradient_allreduce_op", kText, "\"mean\"", kRefused,
     "gradients are averaged over ranks: to sum them, multiply the loss by the number of ranks", 0,
     0, 0, "mean|sum"},
    {"prescale_gradients", kBool, "false", kNoEffect, kSums, 0, 0, kStrict},
    {"gradient_predivide_factor", kFloat, "1.0", kNoEffect, kSums, kSmallest, kNoLimit, kStrict},
    {"communication_data_type", kText, "null", kNoEffect, kSums, 0, 0, kNullable, "fp32|fp16|bf16"},
    {"seq_parallel_communication_data_type", kText, "\"fp32\"", kNoEffect, kParallel, 0, 0,
     kNullable, "fp32|fp16|bf16"},
    {"sparse_gradients", kBool, "false", kRefused, "sparse gradients are not in this build", 0, 0,
     kStrict},
    {"disable_allgather", kBool, "false", kNoEffect,
     "a unit is gathered and released whole, as modules run", 0, 0, kStrict},
    {"zero_allow_untested_optimizer", kBool, "false", kNoEffect,
     "every optimizer of this build works at every stage", 0, 0, kStrict},
    {"zero_force_ds_cpu_optimizer", kBool, "true", kNoEffect, "the workers' own optimizer is used",
     0, 0, kStrict},
    {"steps_per_print", kNumberish, "null", kNoEffect, kPrinting},
    {"wall_clock_breakdown", kBool, "false", kNoEffect, kPrinting, 0, 0, kStrict},
    {"memory_breakdown", kBool, "false", kNoEffect, kPrinting, 0, 0, kStrict},
    {"dump_state", kBool, "false", kNoEffect, kPrinting, 0, 0, kStrict},
    {"graph_harvesting", kBool, "false", kNoEffect, kScript, 0, 0, kStrict},
    {"dataloader_drop_last", kBool, "false", kHonoured, "of the loader made from training_data", 0,
     0, kStrict | kTrainer},
    {"log_level", kText, "null", kNoEffect, "the daemon has its own", 0, 0, kNullable},
    {"vocabulary_size", kInt, "null", kNoEffect, kScript, 1, kCount, kTop},
    {"sequence_parallel_size", kInt, "1", kRefused, kParallel, 1, kCount, kStrict},
    {"use_data_before_expert_parallelism", kBool, "false", kNoEffect, kParallel, 0, 0, kStrict},
    {"optimizer", kBlock, "", kHonoured, "absent: the client's, or a job without updates", 0, 0,
     kNullable, "", "", UnknownKeys::kIgnore},
    {"optimizer.type", kText, "null", kHonoured,
     "Adam, AdamW, Adagrad, Lion, AdamW8bit, Adam8bit (any case) or SGD", 0, 0, kNullable},
    {"optimizer.params", kBlock, "", kHonoured, "by type, below", 0, 0, kNullable, "", "",
     UnknownKeys::kOpaque},
    {"optimizer.legacy_fusion", kBool, "false", kNoEffect, "the workers' own optimizer is used", 0,
     0, kStrict},
    {"scheduler", kBlock, "", kHonoured, "absent: the client's, or a constant learning rate", 0, 0,
     kNullable, "", "", UnknownKeys::kIgnore},
    {"scheduler.type", kText, "null", kHonoured,
     "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest", 0, 0,
     kNullable | kTrainer},
    {"scheduler.params", kBlock, "", kHonoured, "by type, below", 0, 0, kNullable, "", "",
     UnknownKeys::kOpaque},
    {"zeroshard", kBlock, "", kHonoured, "ZeroShard's own; DeepSpeed ignores it", 0, 0, kNullable},
    {"zeroshard.reduction_order", kText, "\"default\"", kHonoured,
     "ranks_first: stage 1 adds micro-steps after ranks too, so that it equals the other stages "
     "bit for bit under accumulation",
     0, 0, 0, "default|ranks_first"},
    {"zeroshard.transport", kText, "\"auto\"", kHonoured, "between workers", 0, 0, kAutoValue,
     "auto|shm|gloo"},
    {"zeroshard.window", kText, "\"auto\"", kHonoured,
     "whether trainers read gathered parameters in place or from a copy", 0, 0, kAutoValue,
     "auto|in_place|copy"},
    {"zeroshard.compat_version", kText, "\"0.19.6\"", kHonoured,
     "the DeepSpeed version whose defaults hold"},
    {"zeroshard.ranks_per_group", kInt, "0", kHonoured,
     "ranks summed in one tree before groups are; 0: the ranks of a node", 0, 1 << 20, kStrict},
    {"zeroshard.user_state_bytes", kInt, "1048576", kHonoured,
     "room for what a rank keeps with each step", 0, 1 << 30, kStrict},
    {"zeroshard.master", kText, "\"auto\"", kHonoured,
     "how bf16 parameters are held for the update: fp32 a copy of 32 bits; split the missing 16 "
     "bits beside the parameter; none the parameter alone, rounded stochastically (stages 1 to 3)",
     0, 0, kAutoValue, "auto|fp32|split|none"},
    {"zeroshard.optimizer_states", kText, "\"auto\"", kHonoured,
     "auto: what optimizer.type and DeepSpeed's keys say, else fp32", 0, 0, kAutoValue,
     "auto|fp32|bf16|int8"},
    {"zeroshard.rounding_seed", kInt, "0", kHonoured, "of stochastic rounding (master none)", 0,
     kCount, kStrict},
    {"zeroshard.durability", kText, "\"process\"", kHonoured,
     "process: states survive the death of any process; power: each committed step survives the "
     "loss of power (all optimizer states on nvme)",
     0, 0, 0, "process|power"},
    {"zeroshard.nvme_spares", kInt, "4", kHonoured,
     "chunks of room on each nvme path beside two for each chunk, for writes that failed or may "
     "still land",
     1, 1024, kStrict},
    {"zeroshard.nvme_limit", kInt, "0", kHonoured,
     "bytes of the job on nvme, checked when it attaches; 0: the daemon's job_nvme_limit", 0,
     kCount, kStrict},
    {"zeroshard.host_limit", kInt, "0", kHonoured,
     "bytes of the job in host memory, checked when it attaches; 0: the daemon's job_host_limit", 0,
     kCount, kStrict},
    {"zeroshard.gpu_limit", kInt, "0", kHonoured,
     "bytes of the job on each GPU, its trainer's window included, checked when it attaches; 0: "
     "the "
     "daemon's job_gpu_limit",
     0, kCount, kStrict},
    {"zeroshard.gpu_mirror_steps", kInt, "0", kHonoured,
     "after so many steps what the GPUs hold is copied to host memory, to which the job goes back "
     "when a GPU is lost; 0: never",
     0, kSmallCount, kStrict},
});

constexpr std::array kPrecisionTable = std::to_array<KeySpec>({
    {"fp16", kBlock, "", kHonoured, "not together with bf16", 0, 0, kNullable},
    {"fp16.enabled", kBool, "false", kHonoured, ""},
    {"fp16.auto_cast", kBool, "false", kNoEffect, "the model's own dtype decides"},
    {"fp16.loss_scale", kFloat, "0", kHonoured, "0 is dynamic", 0, kNoLimit, kStrict},
    {"fp16.initial_scale_power", kInt, "16", kHonoured, "the first scale is 2 to this power", -126,
     127},
    {"fp16.loss_scale_window", kInt, "1000", kHonoured, "good steps before the scale doubles",
     -kCount, kSmallCount, kStrict},
    {"fp16.hysteresis", kInt, "2", kHonoured, "overflows before the scale halves", -kCount,
     kSmallCount},
    {"fp16.consecutive_hysteresis", kBool, "false", kHonoured, "a good step forgets overflows"},
    {"fp16.min_loss_scale", kInt, "1", kHonoured, "the scale never falls below it", -kCount,
     kSmallCount, kStrict},
    {"fp16.fp16_master_weights_and_grads", kBool, "false", kRefused, kMaster},
    {"fp16.fp16_master_weights_and_gradients", kBool, "", kRefused,
     "it is called fp16_master_weights_and_grads now"},
    {"fp16.opt_level", kText, "", kRefused, "it belonged to Apex; remove it"},
    {"fp16.fp16_opt_level", kText, "", kRefused, "it belonged to Apex; remove it"},
    {"bf16", kBlock, "", kHonoured, "not together with fp16", 0, 0, kNullable},
    {"bfloat16", kBlock, "", kAlias, "read only where bf16 is absent", 0, 0, kNullable, "", "bf16"},
    {"bf16.enabled", kBool, "false", kHonoured, ""},
    {"bf16.immediate_grad_update", kBool, "false", kNoEffect,
     "gradients are added to the fp32 accumulator as they appear"},
    {"bf16.check_grad_overflow", kBool, "true", kHonoured,
     "a step with a gradient that is not finite is skipped (default false before DeepSpeed "
     "0.19.3)"},
    {"bf16.check_overflow", kBool, "", kRefused, "it is called check_grad_overflow"},
    {"bf16.bf16_master_weights_and_grads", kBool, "false", kHonoured,
     "zeroshard.master none and, unless data_types.grad_accum_dtype says otherwise, bf16 gradient "
     "accumulators"},
    {"bf16.bf16_optimizer_states", kBool, "false", kHonoured,
     "zeroshard.optimizer_states bf16; needs bf16_master_weights_and_grads"},
    {"data_types", kBlock, "", kHonoured, "", 0, 0, kNullable, "", "", UnknownKeys::kIgnore},
    {"data_types.grad_accum_dtype", kText, "null", kHonoured, "null is fp32", 0, 0, kNullable,
     "fp32|fp16|bf16"},
    {"data_types.param_dtype", kText, "null", kNoEffect, "the model's own dtype decides", 0, 0,
     kNullable, "fp32|fp16|bf16"},
    {"data_types.buffer_dtype", kText, "null", kNoEffect, "the model's own dtype decides", 0, 0,
     kNullable, "fp32|fp16|bf16"},
    {"torch_autocast", kBlock, "", kRefused, "", 0, 0, kNullable, "", "", UnknownKeys::kIgnore},
    {"torch_autocast.enabled", kBool, "false", kRefused,
     "write torch.autocast around the forward pass in the script", 0, 0, kStrict},
    {"torch_autocast.dtype", kText, "null", kNoEffect, kScript, 0, 0, kNullable},
    {"torch_autocast.lower_precision_safe_modules", kNumberish, "null", kNoEffect, kScript},
    {"amp", kBlock, "", kRefused, "", 0, 0, kNullable, "", "", UnknownKeys::kOpaque},
    {"amp.enabled", kBool, "false", kRefused, "Apex AMP does not work with ZeRO: use bf16 or fp16",
     0, 0, kStrict},
});

}  // namespace

std::span<const KeySpec> TopKeys() { return kTopTable; }
std::span<const KeySpec> PrecisionKeys() { return kPrecisionTable; }

}  // namespace zeroshard
