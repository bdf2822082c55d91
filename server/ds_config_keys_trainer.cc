#include <array>

#include "server/ds_config_keys.h"

// Blocks of DeepSpeed that concern the training script, its printing or other products.

namespace zeroshard {
namespace {

using enum KeyType;
using enum KeyStatus;

constexpr double kCount = 9223372036854775807.0;

constexpr std::string_view kActivations =
    "activations stay in the trainer: use torch.utils.checkpoint, which works at every stage";
constexpr std::string_view kTags = "a checkpoint is named and checked by the daemon";
constexpr std::string_view kAnyWorld = "every checkpoint loads at any number of workers";
constexpr std::string_view kWriter = "the workers write checkpoints in their own way";
constexpr std::string_view kElastic = "elastic worlds are not in this build";
constexpr std::string_view kMetrics = "the daemon's metrics show it at all times";
constexpr std::string_view kScript = "it is the training script's matter";
constexpr std::string_view kOther = "it is no part of ZeRO";

constexpr KeySpec Opaque(std::string_view path, std::string_view note) {
  return {path, kBlock, "", kNoEffect, note, 0, 0, kNullable, "", "", UnknownKeys::kOpaque};
}
constexpr KeySpec Ignoring(std::string_view path, KeyStatus status, std::string_view note) {
  return {path, kBlock, "", status, note, 0, 0, kNullable, "", "", UnknownKeys::kIgnore};
}
constexpr KeySpec Flag(std::string_view path, std::string_view value, std::string_view note) {
  return {path, kBool, value, kNoEffect, note, 0, 0, kStrict};
}

constexpr std::array kKeys = std::to_array<KeySpec>({
    Ignoring("activation_checkpointing", kNoEffect, kActivations),
    Flag("activation_checkpointing.partition_activations", "false", kActivations),
    Flag("activation_checkpointing.contiguous_memory_optimization", "false", kActivations),
    Flag("activation_checkpointing.cpu_checkpointing", "false", kActivations),
    {"activation_checkpointing.number_checkpoints", kInt, "null", kNoEffect, kActivations, 1,
     kCount, kStrict | kNullable},
    Flag("activation_checkpointing.synchronize_checkpoint_boundary", "false", kActivations),
    Flag("activation_checkpointing.profile", "false", kActivations),
    Ignoring("checkpoint", kNoEffect, kTags),
    {"checkpoint.tag_validation", kText, "\"WARN\"", kNoEffect, kTags, 0, 0, 0, "IGNORE|WARN|FAIL"},
    Flag("checkpoint.load_universal", "false", kAnyWorld),
    Flag("checkpoint.use_node_local_storage", "false", kWriter),
    Ignoring("checkpoint.parallel_write", kNoEffect, kWriter),
    Flag("checkpoint.parallel_write.pipeline_stage", "false", kWriter),
    Flag("checkpoint.checkpoint_serialization", "true", kWriter),
    Ignoring("checkpoint.writer", kNoEffect, kWriter),
    {"checkpoint.writer.type", kText, "null", kNoEffect, kWriter, 0, 0, kNullable,
     "mock|python|fast"},
    Flag("checkpoint.writer.decoupled", "false", kWriter),
    {"checkpoint.writer.io_buffer_size", kInt, "67108864", kNoEffect, kWriter, 1, kCount, kStrict},
    Flag("checkpoint.writer.io_buffer_double", "true", kWriter),
    {"checkpoint.writer.io_multiplier", kInt, "1", kNoEffect, kWriter, 1, kCount, kStrict},
    Flag("checkpoint.writer.show_statistics", "false", kWriter),
    {"checkpoint.writer.data_parallel", kText, "null", kNoEffect, kWriter, 0, 0, kNullable,
     "replica|socket|machine"},
    Ignoring("elasticity", kRefused, ""),
    {"elasticity.enabled", kBool, "false", kRefused, kElastic, 0, 0, kStrict},
    {"elasticity.max_train_batch_size", kInt, "2000", kNoEffect, kElastic, 1, kCount, kStrict},
    {"elasticity.micro_batch_sizes", kIntList, "[2, 4, 6]", kNoEffect, kElastic, 1, kCount,
     kStrict},
    {"elasticity.min_gpus", kInt, "1", kNoEffect, kElastic, 1, kCount, kStrict},
    {"elasticity.max_gpus", kInt, "10000", kNoEffect, kElastic, 1, kCount, kStrict},
    {"elasticity.num_gpus_per_node", kInt, "1", kNoEffect, kElastic, 1, kCount, kStrict},
    {"elasticity.model_parallel_size", kInt, "1", kNoEffect, kElastic, 1, kCount, kStrict},
    {"elasticity.min_time", kInt, "0", kNoEffect, kElastic, 0, kCount, kStrict},
    Flag("elasticity.prefer_larger_batch", "true", kElastic),
    Flag("elasticity.ignore_non_elastic_batch_info", "false", kElastic),
    {"elasticity.version", kFloat, "0.2", kNoEffect, kElastic, 0, kNoLimit, kStrict},
    {"comms_logger", kBlock, "", kNoEffect, kMetrics, 0, 0, kNullable},
    {"comms_logger.enabled", kBool, "false", kNoEffect, kMetrics},
    {"comms_logger.verbose", kBool, "false", kNoEffect, kMetrics},
    {"comms_logger.prof_all", kBool, "true", kNoEffect, kMetrics},
    {"comms_logger.prof_ops", kTextList, "[]", kNoEffect, kMetrics},
    {"comms_logger.debug", kBool, "false", kNoEffect, kMetrics},
    Ignoring("timers", kNoEffect, kMetrics),
    {"timers.throughput", kBlock, "", kNoEffect, kMetrics, 0, 0, kNullable},
    {"timers.throughput.enabled", kBool, "true", kNoEffect, kMetrics},
    {"timers.throughput.synchronized", kBool, "true", kNoEffect, kMetrics},
    Ignoring("tensor_parallel", kRefused, ""),
    {"tensor_parallel.autotp_size", kInt, "0", kRefused,
     "this build shards over data-parallel ranks only", 0, kCount},
    {"tensor_parallel.enabled", kBool, "false", kRefused,
     "this build shards over data-parallel ranks only"},
    Opaque("flops_profiler", kScript),
    Opaque("autotuning", kScript),
    Opaque("eigenvalue", kOther),
    Opaque("quantize_training", kOther),
    Opaque("compression_training", kOther),
    Opaque("progressive_layer_drop", kScript),
    Opaque("curriculum_learning", kScript),
    Opaque("data_efficiency", kScript),
    Opaque("sparse_attention", kScript),
    Opaque("pipeline", kScript),
    Opaque("hybrid_engine", kOther),
    Opaque("nebula", kWriter),
    Opaque("datastates_ckpt", kWriter),
    Opaque("weight_quantization", kOther),
    Opaque("compile", kScript),
    Opaque("expert_parallel", kScript),
    Opaque("tensorboard", kMetrics),
    Opaque("wandb", kMetrics),
    Opaque("csv_monitor", kMetrics),
    Opaque("comet", kMetrics),
});

}  // namespace

std::span<const KeySpec> TrainerKeys() { return kKeys; }

}  // namespace zeroshard
