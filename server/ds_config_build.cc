#include <cstdlib>

#include "server/ds_config_settings.h"
#include "server/hjson_text.h"
#include "server/text.h"

// Step 7: from checked settings to the plain structure.

namespace zeroshard {
namespace {

OffloadConfig BuildOffload(const Settings& settings, std::string_view block) {
  const auto path = [&](std::string_view name) { return Concat(block, ".", name); };
  OffloadConfig offload;
  const std::string device = settings.Text(path("device"));
  if (device == "cpu") offload.device = OffloadDevice::kCpu;
  if (device == "nvme") offload.device = OffloadDevice::kNvme;
  offload.nvme_path = settings.Text(path("nvme_path"));
  offload.buffer_count = settings.Int(path("buffer_count"));
  offload.buffer_size = settings.Int(path("buffer_size"));
  offload.max_in_cpu = settings.Int(path("max_in_cpu"));
  offload.pin_memory = settings.Bool(path("pin_memory"));
  if (!settings.Has(path("ratio"))) return offload;
  offload.ratio = settings.Float(path("ratio"));
  offload.pipeline_read = settings.Bool(path("pipeline_read"));
  offload.pipeline_write = settings.Bool(path("pipeline_write"));
  return offload;
}

ZeroConfig BuildZero(const Settings& settings) {
  const auto integer = [&](std::string_view name) {
    return settings.Int(Concat("zero_optimization.", name));
  };
  ZeroConfig zero;
  zero.stage = static_cast<int>(integer("stage"));
  zero.reduce_bucket_size = integer("reduce_bucket_size");
  zero.allgather_bucket_size = integer("allgather_bucket_size");
  zero.sub_group_size = integer("sub_group_size");
  zero.prefetch_bucket_size = integer("stage3_prefetch_bucket_size");
  zero.param_persistence_threshold = integer("stage3_param_persistence_threshold");
  zero.model_persistence_threshold = integer("stage3_model_persistence_threshold");
  zero.max_live_parameters = integer("stage3_max_live_parameters");
  zero.max_reuse_distance = integer("stage3_max_reuse_distance");
  zero.offload_param = BuildOffload(settings, "zero_optimization.offload_param");
  zero.offload_optimizer = BuildOffload(settings, "zero_optimization.offload_optimizer");
  return zero;
}

OptimizerConfig BuildOptimizer(const Settings& settings) {
  OptimizerConfig optimizer;
  if (settings.optimizer == nullptr) return optimizer;
  optimizer.given = true;
  const auto number = [&](std::string_view name) {
    return settings.Float(Concat("optimizer.params.", name));
  };
  optimizer.lr = number("lr");
  optimizer.weight_decay = number("weight_decay");
  const std::string_view type = settings.optimizer->type;
  if (type == "SGD") {
    optimizer.kind = OptimizerKind::kSgd;
    optimizer.momentum = number("momentum");
    optimizer.dampening = number("dampening");
    optimizer.nesterov = settings.Bool("optimizer.params.nesterov");
    return optimizer;
  }
  if (type == "Adagrad") {
    optimizer.kind = OptimizerKind::kAdagrad;
    optimizer.eps = number("eps");
    return optimizer;
  }
  if (type == "Lion") {
    optimizer.kind = OptimizerKind::kLion;
  } else {
    const bool decoupled =
        type.starts_with("AdamW") || settings.Bool("optimizer.params.adam_w_mode");
    optimizer.kind = decoupled ? OptimizerKind::kAdamW : OptimizerKind::kAdam;
    optimizer.eps = number("eps");
    optimizer.bias_correction = settings.Bool("optimizer.params.bias_correction");
  }
  if (const Setting* betas = settings.Find("optimizer.params.betas");
      betas != nullptr && betas->value.items.size() == 2) {
    optimizer.beta1 = NumberValue(betas->value.items[0].text).value_or(optimizer.beta1);
    optimizer.beta2 = NumberValue(betas->value.items[1].text).value_or(optimizer.beta2);
  }
  return optimizer;
}

SchedulerConfig BuildScheduler(const Settings& settings) {
  SchedulerConfig scheduler;
  if (settings.scheduler == nullptr) return scheduler;
  scheduler.type = std::string(settings.scheduler->type);
  scheduler.params_json = "{";
  for (const KeySpec& spec : settings.scheduler->params) {
    const Setting* setting = settings.Find(spec.path);
    if (setting == nullptr || spec.status != KeyStatus::kHonoured) continue;
    const std::string name(LeafName(spec.path));
    // What is not set is left out; DeepSpeed takes the optimizer's rate where no maximum is set.
    const JsonValue* value = settings.Has(spec.path) ? &setting->value : nullptr;
    const Setting* lr = settings.Find("optimizer.params.lr");
    if (value == nullptr && name == "warmup_max_lr" && lr != nullptr) value = &lr->value;
    if (value == nullptr) continue;
    const std::string text = RenderJson(*value);
    scheduler.params_json +=
        Concat(scheduler.params.empty() ? "" : ", ", JsonQuote(name), ": ", text);
    scheduler.params.emplace_back(name, text);
  }
  scheduler.params_json += "}";
  return scheduler;
}

LossScaleConfig BuildLossScale(const Settings& settings) {
  LossScaleConfig scale;
  scale.enabled = settings.Bool("fp16.enabled");
  const double fixed = settings.Float("fp16.loss_scale");
  scale.dynamic = fixed == 0;
  scale.static_scale = scale.dynamic ? 1 : fixed;
  scale.initial_scale_power = static_cast<int>(settings.Int("fp16.initial_scale_power"));
  scale.window = settings.Int("fp16.loss_scale_window");
  scale.hysteresis = settings.Int("fp16.hysteresis");
  scale.consecutive_hysteresis = settings.Bool("fp16.consecutive_hysteresis");
  scale.min_scale = settings.Float("fp16.min_loss_scale");
  return scale;
}

DType ShortDType(std::string_view name) {
  if (name == "bf16") return DType::kBfloat16;
  return name == "fp16" ? DType::kFloat16 : DType::kFloat32;
}

AioConfig BuildAio(const Settings& settings) {
  return {.block_size = settings.Int("aio.block_size"),
          .queue_depth = settings.Int("aio.queue_depth"),
          .intra_op_parallelism = settings.Int("aio.intra_op_parallelism"),
          .single_submit = settings.Bool("aio.single_submit"),
          .overlap_events = settings.Bool("aio.overlap_events")};
}

ActivationCheckpointingConfig BuildActivations(const Settings& settings) {
  const auto flag = [&](std::string_view name) {
    return settings.Bool(Concat("activation_checkpointing.", name));
  };
  return {.partition_activations = flag("partition_activations"),
          .contiguous_memory_optimization = flag("contiguous_memory_optimization"),
          .cpu_checkpointing = flag("cpu_checkpointing"),
          .number_checkpoints = settings.OptionalInt("activation_checkpointing.number_checkpoints"),
          .synchronize_checkpoint_boundary = flag("synchronize_checkpoint_boundary"),
          .profile = flag("profile")};
}

MasterForm BuildMasterForm(std::string_view name) {
  if (name == "split") return MasterForm::kSplit;
  return name == "none" ? MasterForm::kNone : MasterForm::kFloat32;
}

StateFormat BuildStateFormat(std::string_view name) {
  if (name == "bf16") return StateFormat::kBfloat16;
  return name == "int8" ? StateFormat::kInt8 : StateFormat::kFloat32;
}

ZeroShardConfig BuildOwn(const Settings& settings) {
  ZeroShardConfig own;
  if (settings.Text("zeroshard.reduction_order") == "ranks_first") {
    own.reduction_order = ReductionOrder::kRanksFirst;
  }
  const std::string transport = settings.Text("zeroshard.transport");
  if (transport == "shm") own.transport = TransportChoice::kShm;
  if (transport == "gloo") own.transport = TransportChoice::kGloo;
  const std::string window = settings.Text("zeroshard.window");
  if (window == "in_place") own.window = WindowChoice::kInPlace;
  if (window == "copy") own.window = WindowChoice::kCopy;
  own.compat_version = settings.Text("zeroshard.compat_version");
  own.ranks_per_group = settings.Int("zeroshard.ranks_per_group");
  own.user_state_bytes = settings.Int("zeroshard.user_state_bytes");
  own.rounding_seed = settings.Int("zeroshard.rounding_seed");
  if (settings.Text("zeroshard.durability") == "power") own.durability = DurabilityChoice::kPower;
  own.nvme_spares = settings.Int("zeroshard.nvme_spares");
  own.nvme_limit = settings.Int("zeroshard.nvme_limit");
  own.host_limit = settings.Int("zeroshard.host_limit");
  own.gpu_limit = settings.Int("zeroshard.gpu_limit");
  own.gpu_mirror_steps = settings.Int("zeroshard.gpu_mirror_steps");
  return own;
}

}  // namespace

DsConfig BuildDsConfig(const Settings& settings) {
  DsConfig config;
  config.zero = BuildZero(settings);
  if (settings.Bool("bf16.enabled")) config.compute_dtype = DType::kBfloat16;
  if (settings.Bool("fp16.enabled")) config.compute_dtype = DType::kFloat16;
  config.grad_accum_dtype = ShortDType(settings.Text("data_types.grad_accum_dtype"));
  config.master_form = BuildMasterForm(settings.Text("zeroshard.master"));
  config.state_format = BuildStateFormat(settings.Text("zeroshard.optimizer_states"));
  config.check_grad_overflow = settings.Bool("bf16.check_grad_overflow");
  config.optimizer = BuildOptimizer(settings);
  config.scheduler = BuildScheduler(settings);
  config.gradient_clipping = settings.Float("gradient_clipping");
  config.loss_scale = BuildLossScale(settings);
  config.batch.train = settings.OptionalInt("train_batch_size");
  config.batch.micro = settings.OptionalInt("train_micro_batch_size_per_gpu");
  config.batch.accumulation = settings.OptionalInt("gradient_accumulation_steps");
  config.aio = BuildAio(settings);
  config.activation_checkpointing = BuildActivations(settings);
  config.zeroshard = BuildOwn(settings);
  config.tiers = TierUseOf(settings);
  AppendResolvedValues(settings, config);
  return config;
}

}  // namespace zeroshard
