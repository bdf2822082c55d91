#include <array>

#include "server/ds_config_keys.h"

// zero_optimization and its blocks, and aio.

namespace zeroshard {
namespace {

using enum KeyType;
using enum KeyStatus;

constexpr double kCount = 9223372036854775807.0;
constexpr double kBuffers = 1 << 20;
constexpr unsigned kNull = kNullable;

constexpr std::string_view kPath = "a directory; null: all that the daemon has";
constexpr std::string_view kPin =
    "with device cpu or nvme in either block, the job's host memory is locked";
constexpr std::string_view kNoDevice = "the workers update beside the trainer anyway";
constexpr std::string_view kWhole = "a unit is gathered and released whole, as modules run";
constexpr std::string_view kSums =
    "gradients are summed in fp32 in one fixed order, whatever the way they travel";
constexpr std::string_view kOverlap = "the workers always run beside the trainer";
constexpr std::string_view kExport = "whole weights can be exported from any job at any time";
constexpr std::string_view kChecked = "this is always checked";
constexpr std::string_view kZeroPp = "ZeRO++ is not in this build";
constexpr std::string_view kZenFlow = "ZenFlow is not in this build";
constexpr std::string_view kLeaf =
    "a leaf module is gathered whole, without looking into its children";

constexpr std::array kKeys = std::to_array<KeySpec>({
    {"zero_optimization", kBlock, "", kHonoured, "true is stage 1 (deprecated)"},
    {"zero_optimization.stage", kInt, "0", kHonoured,
     "0 data parallel, 1 optimizer state, 2 + gradients, 3 + parameters sharded", 0, 3},
    {"zero_optimization.contiguous_gradients", kBool, "true", kNoEffect, kSums},
    {"zero_optimization.reduce_scatter", kBool, "true", kNoEffect, kSums},
    {"zero_optimization.reduce_bucket_size", kInt, "500000000", kHonoured,
     "elements reduced together; 0 is refused (DeepSpeed fails in backward)", 1, kCount},
    {"zero_optimization.use_multi_rank_bucket_allreduce", kBool, "true", kNoEffect, kSums},
    {"zero_optimization.allgather_partitions", kBool, "true", kNoEffect, kWhole},
    {"zero_optimization.allgather_bucket_size", kInt, "500000000", kNoEffect, kWhole, 0, kCount},
    {"zero_optimization.overlap_comm", kBool, "null", kNoEffect, kOverlap, 0, 0, kNull},
    {"zero_optimization.load_from_fp32_weights", kBool, "true", kNoEffect,
     "checkpoints hold the fp32 master weights"},
    {"zero_optimization.elastic_checkpoint", kBool, "false", kNoEffect,
     "every checkpoint loads at any number of workers"},
    {"zero_optimization.offload_param", kBlock, "", kHonoured, "stage 3 only", 0, 0, kNull},
    {"zero_optimization.offload_param.device", kText, "\"none\"", kHonoured,
     "none and cpu: parameter shards rest in host memory; nvme: on the drives, but for max_in_cpu. "
     "On GPUs: none, and they rest there; cpu, in host memory; nvme, as here",
     0, 0, 0, "none|cpu|nvme"},
    {"zero_optimization.offload_param.nvme_path", kText, "null", kHonoured, kPath, 0, 0, kNull},
    {"zero_optimization.offload_param.buffer_count", kInt, "5", kHonoured,
     "as that of offload_optimizer; the larger of the two holds", 0, kBuffers},
    {"zero_optimization.offload_param.buffer_size", kInt, "100000000", kNoEffect,
     "a staging buffer is as large as a chunk: sub_group_size bounds it", 0, kCount},
    {"zero_optimization.offload_param.max_in_cpu", kInt, "1000000000", kHonoured,
     "elements of parameters, of the whole job, that stay in host memory with device nvme", 0,
     kCount},
    {"zero_optimization.offload_param.pin_memory", kBool, "true", kHonoured, kPin},
    {"zero_optimization.offload_optimizer", kBlock, "", kHonoured, "stages 1 to 3", 0, 0, kNull},
    {"zero_optimization.offload_optimizer.device", kText, "\"none\"", kHonoured,
     "masters and optimizer states rest in memory of the daemon's devices (none), in host memory "
     "(cpu) or on the drives (nvme)",
     0, 0, 0, "none|cpu|nvme"},
    {"zero_optimization.offload_optimizer.nvme_path", kText, "null", kHonoured,
     "a directory; null: all that the daemon has. With device none or cpu states can be moved to "
     "it later, but not those of a job on GPUs",
     0, 0, kNull},
    {"zero_optimization.offload_optimizer.buffer_count", kInt, "4", kHonoured,
     "staging holds buffer_count * aio.queue_depth chunks, and what the lanes need at least", 0,
     kBuffers},
    {"zero_optimization.offload_optimizer.pin_memory", kBool, "true", kHonoured, kPin},
    {"zero_optimization.offload_optimizer.pipeline_read", kBool, "true", kHonoured,
     "chunks are read ahead of the update (DeepSpeed's default is false; only speed differs)"},
    {"zero_optimization.offload_optimizer.pipeline_write", kBool, "true", kHonoured,
     "the update does not wait for writes (DeepSpeed's default is false; only speed differs)"},
    {"zero_optimization.offload_optimizer.pipeline", kBool, "", kRefused,
     "DeepSpeed derives it: write pipeline_read and pipeline_write"},
    {"zero_optimization.offload_optimizer.fast_init", kBool, "false", kNoEffect,
     "initial states are always written to the drives in large transfers"},
    {"zero_optimization.offload_optimizer.ratio", kFloat, "1.0", kHonoured,
     "how much of the optimizer states is on nvme with device nvme, the rest in memory of the "
     "daemon's devices; on GPUs also how much is on the host with device cpu; below 1.0 needs "
     "stage "
     "3",
     0, 1},
    {"zero_optimization.offload_optimizer.super_offload", kBool, "false", kNoEffect, kNoDevice},
    {"zero_optimization.offload_optimizer.cpuadam_cores_perc", kFloat, "0.8", kNoEffect,
     "the workers' threads are the daemon's setting", 0, 1},
    {"zero_optimization.offload_optimizer.buffer_size", kInt, "", kRefused,
     "buffer_size belongs to offload_param only"},
    {"zero_optimization.zenflow", kBlock, "", kRefused, kZenFlow, 0, 0, kNull},
    {"zero_optimization.zenflow.topk_ratio", kFloat, "0.1", kRefused, kZenFlow, 0, 1},
    {"zero_optimization.zenflow.select_strategy", kText, "\"auto\"", kRefused, kZenFlow, 0, 0,
     kAutoValue, "auto|step|epoch"},
    {"zero_optimization.zenflow.select_interval", kNumberish, "\"auto\"", kRefused, kZenFlow, 0, 0,
     kAutoValue},
    {"zero_optimization.zenflow.update_interval", kNumberish, "\"auto\"", kRefused, kZenFlow, 0, 0,
     kAutoValue},
    {"zero_optimization.zenflow.overlap_step", kBool, "false", kRefused, kZenFlow},
    {"zero_optimization.zenflow.offload", kBool, "false", kRefused, kZenFlow},
    {"zero_optimization.zenflow.auto_ratio", kFloat, "0.99", kRefused, kZenFlow, 0, 1},
    {"zero_optimization.zenflow.full_warm_up_rounds", kInt, "0", kRefused, kZenFlow, 0, kCount},
    {"zero_optimization.zenflow.pt_reserved_cores_perc", kFloat, "0.5", kRefused, kZenFlow, 0, 1},
    {"zero_optimization.zenflow.steps_per_epoch", kInt, "null", kRefused, kZenFlow, 0, kCount,
     kNull},
    {"zero_optimization.sub_group_size", kInt, "1000000000", kHonoured,
     "elements of a worker's partition updated together", 1, kCount},
    {"zero_optimization.cpu_offload_param", kBool, "null", kAlias, "deprecated", 0, 0, kNull, "",
     "zero_optimization.offload_param"},
    {"zero_optimization.cpu_offload_use_pin_memory", kBool, "null", kNoEffect,
     "deprecated, and sets nothing in DeepSpeed either", 0, 0, kNull},
    {"zero_optimization.cpu_offload", kBool, "null", kAlias, "deprecated", 0, 0, kNull, "",
     "zero_optimization.offload_optimizer"},
    {"zero_optimization.stage3_prefetch_bucket_size", kInt, "50000000", kHonoured,
     "elements gathered ahead along the recorded order; 0 gathers nothing ahead", 0, kCount},
    {"zero_optimization.stage3_param_persistence_threshold", kInt, "100000", kHonoured,
     "units of at most so many elements are never released", 0, kCount},
    {"zero_optimization.stage3_model_persistence_threshold", kInt, "9223372036854775807", kNoEffect,
     "every unit under stage3_param_persistence_threshold stays gathered", 0, kCount},
    {"zero_optimization.stage3_max_live_parameters", kInt, "1000000000", kHonoured,
     "elements gathered at one time: bounds the window", 0, kCount},
    {"zero_optimization.stage3_max_reuse_distance", kInt, "1000000000", kNoEffect, kWhole, 0,
     kCount},
    {"zero_optimization.stage3_gather_16bit_weights_on_model_save", kBool, "false", kNoEffect,
     kExport},
    {"zero_optimization.stage3_module_granularity_threshold", kInt, "0", kNoEffect, kWhole, 0,
     kCount},
    {"zero_optimization.stage3_use_all_reduce_for_fetch_params", kBool, "false", kNoEffect, kWhole},
    {"zero_optimization.stage3_allgather_sequential", kBool, "false", kNoEffect, kWhole},
    {"zero_optimization.prefetch_bucket_size", kInt, "", kAlias, "DeepSpeed's field name", 0, 0, 0,
     "", "zero_optimization.stage3_prefetch_bucket_size"},
    {"zero_optimization.param_persistence_threshold", kInt, "", kAlias, "DeepSpeed's field name", 0,
     0, 0, "", "zero_optimization.stage3_param_persistence_threshold"},
    {"zero_optimization.model_persistence_threshold", kInt, "", kAlias, "DeepSpeed's field name", 0,
     0, 0, "", "zero_optimization.stage3_model_persistence_threshold"},
    {"zero_optimization.max_live_parameters", kInt, "", kAlias, "DeepSpeed's field name", 0, 0, 0,
     "", "zero_optimization.stage3_max_live_parameters"},
    {"zero_optimization.max_reuse_distance", kInt, "", kAlias, "DeepSpeed's field name", 0, 0, 0,
     "", "zero_optimization.stage3_max_reuse_distance"},
    {"zero_optimization.gather_16bit_weights_on_model_save", kBool, "", kAlias,
     "DeepSpeed's field name", 0, 0, 0, "",
     "zero_optimization.stage3_gather_16bit_weights_on_model_save"},
    {"zero_optimization.module_granularity_threshold", kInt, "", kAlias, "DeepSpeed's field name",
     0, 0, 0, "", "zero_optimization.stage3_module_granularity_threshold"},
    {"zero_optimization.use_all_reduce_for_fetch_params", kBool, "", kAlias,
     "DeepSpeed's field name", 0, 0, 0, "",
     "zero_optimization.stage3_use_all_reduce_for_fetch_params"},
    {"zero_optimization.allgather_sequential", kBool, "", kAlias, "DeepSpeed's field name", 0, 0, 0,
     "", "zero_optimization.stage3_allgather_sequential"},
    {"zero_optimization.stage3_gather_fp16_weights_on_model_save", kBool, "", kAlias, "deprecated",
     0, 0, 0, "", "zero_optimization.stage3_gather_16bit_weights_on_model_save"},
    {"zero_optimization.ignore_unused_parameters", kBool, "true", kNoEffect,
     "a parameter for which no rank sent a gradient is not updated"},
    {"zero_optimization.legacy_stage1", kBool, "false", kNoEffect, kSums},
    {"zero_optimization.round_robin_gradients", kBool, "false", kNoEffect, kSums},
    {"zero_optimization.zero_hpz_partition_size", kInt, "1", kRefused, kZeroPp, 0, kCount},
    {"zero_optimization.zero_quantized_weights", kBool, "false", kRefused, kZeroPp},
    {"zero_optimization.zero_quantized_nontrainable_weights", kBool, "false", kRefused, kZeroPp},
    {"zero_optimization.zero_quantized_gradients", kBool, "false", kRefused, kZeroPp},
    {"zero_optimization.zeropp_loco_param", kBlock, "", kRefused, kZeroPp, 0, 0, kNull},
    {"zero_optimization.zeropp_loco_param.err_beta", kFloat, "0.8", kRefused, kZeroPp},
    {"zero_optimization.zeropp_loco_param.reset_T", kInt, "1024", kRefused, kZeroPp, 0, kCount},
    {"zero_optimization.mics_shard_size", kInt, "-1", kRefused, "MiCS is not in this build", -1,
     kCount},
    {"zero_optimization.mics_hierarchical_params_gather", kBool, "false", kRefused,
     "MiCS is not in this build"},
    {"zero_optimization.memory_efficient_linear", kBool, "true", kNoEffect,
     "PyTorch's own linear layers are used"},
    {"zero_optimization.pipeline_loading_checkpoint", kBool, "false", kNoEffect,
     "checkpoints are always read as a stream"},
    {"zero_optimization.override_module_apply", kBool, "true", kNoEffect,
     "Module.apply is left alone"},
    {"zero_optimization.log_trace_cache_warnings", kBool, "false", kNoEffect,
     "a changed order is recorded again"},
    {"zero_optimization.enable_sanity_checks", kBool, "false", kNoEffect, kChecked},
    {"zero_optimization.save_muon_momentum_buffer_in_memory", kBool, "false", kNoEffect,
     "Muon is not in this build"},
    {"zero_optimization.grad_hooks", kBool, "", kNoEffect,
     "it is documented by DeepSpeed and not in its code"},
    {"zero_optimization.leaf_module", kBlock, "", kHonoured, kLeaf, 0, 0, kNull | kTrainer},
    {"zero_optimization.leaf_module.classes", kTextList, "", kHonoured,
     "class names, with or without their module", 0, 0, kTrainer},
    {"zero_optimization.leaf_module.names", kTextList, "[]", kHonoured, kLeaf, 0, 0, kTrainer},
    {"zero_optimization.leaf_module.name_suffixes", kTextList, "[]", kHonoured, kLeaf, 0, 0,
     kTrainer},
    {"aio", kBlock, "", kHonoured, "of transfers to and from nvme", 0, 0, kNull, "", "",
     UnknownKeys::kIgnore},
    {"aio.block_size", kInt, "1048576", kHonoured,
     "bytes of one transfer at most, a multiple of 4096 (DeepSpeed takes any)", 4096, 1 << 30,
     kStrict},
    {"aio.queue_depth", kInt, "8", kHonoured,
     "transfers in flight in each direction; what one leaves the other may use", 1, 4096, kStrict},
    {"aio.intra_op_parallelism", kInt, "1", kHonoured,
     "threads of each worker for transfers, where io_uring is not to be had", 1, 1024, kStrict},
    {"aio.thread_count", kInt, "", kAlias, "DeepSpeed's documentation still calls it so", 0, 0, 0,
     "", "aio.intra_op_parallelism"},
    {"aio.single_submit", kBool, "false", kHonoured,
     "each transfer is handed to the kernel alone, instead of several together", 0, 0, kStrict},
    {"aio.overlap_events", kBool, "true", kHonoured,
     "completions are taken one by one while others are in flight", 0, 0, kStrict},
    {"aio.use_gds", kBool, "false", kRefused, "GPUDirect Storage is not in this build", 0, 0,
     kStrict},
});

}  // namespace

std::span<const KeySpec> ZeroKeys() { return kKeys; }

}  // namespace zeroshard
