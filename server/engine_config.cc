// The translation of a resolved ds_config into the engine's configuration.
#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "server/planner.h"
#include "storage/layout_proto.h"

namespace zeroshard {
namespace {

static_assert(model::v1::STATE_FORMAT_BFLOAT16 == static_cast<int>(StateFormat::kBfloat16) &&
              model::v1::STATE_FORMAT_INT8 == static_cast<int>(StateFormat::kInt8) &&
              model::v1::MASTER_FORM_SPLIT == static_cast<int>(MasterForm::kSplit) &&
              model::v1::MASTER_FORM_NONE == static_cast<int>(MasterForm::kNone));

// That one sum over ranks on a GPU takes.
constexpr uint32_t kMaxDataPlaneRanks = 64;

bool AnyTrainable(const model::v1::Manifest& manifest) {
  return std::any_of(manifest.parameters().begin(), manifest.parameters().end(),
                     [](const auto& parameter) { return parameter.trainable(); });
}

bool AnyMomentum(const PlanInput& input) {
  const auto& groups = input.manifest.groups();
  return input.config.optimizer.momentum != 0 ||
         std::any_of(groups.begin(), groups.end(), [](const auto& g) { return g.momentum() != 0; });
}

absl::Status SetOptimizer(const PlanInput& input, model::v1::EngineConfig& engine) {
  if (input.forward_only || !AnyTrainable(input.manifest)) {
    engine.set_optimizer(model::v1::OPTIMIZER_NONE);
    return absl::OkStatus();
  }
  if (!input.config.optimizer.given) {
    return absl::InvalidArgumentError(
        "the manifest has trainable parameters but neither the config's `optimizer` block nor the "
        "client names an optimizer; give one of AdamW, Adam, SGD, Adagrad, Lion, or attach with "
        "forward_only");
  }
  switch (input.config.optimizer.kind) {
    case OptimizerKind::kAdamW:
      engine.set_optimizer(model::v1::OPTIMIZER_ADAMW);
      break;
    case OptimizerKind::kAdam:
      engine.set_optimizer(model::v1::OPTIMIZER_ADAM);
      break;
    case OptimizerKind::kSgd:
      engine.set_optimizer(model::v1::OPTIMIZER_SGD);
      if (AnyMomentum(input)) engine.add_state_slots("momentum_buffer");
      return absl::OkStatus();
    case OptimizerKind::kAdagrad:
      engine.set_optimizer(model::v1::OPTIMIZER_ADAGRAD);
      engine.add_state_slots("sum");
      return absl::OkStatus();
    case OptimizerKind::kLion:
      engine.set_optimizer(model::v1::OPTIMIZER_LION);
      engine.add_state_slots("exp_avg");
      return absl::OkStatus();
  }
  engine.add_state_slots("exp_avg");
  engine.add_state_slots("exp_avg_sq");
  return absl::OkStatus();
}

// How master parameters and states are held. Jobs without states keep the defaults.
absl::Status SetStateForms(const DsConfig& config, model::v1::EngineConfig& engine) {
  if (engine.optimizer() == model::v1::OPTIMIZER_NONE) return absl::OkStatus();
  engine.set_master_form(static_cast<model::v1::MasterForm>(config.master_form));
  if (config.master_form == MasterForm::kNone) {
    engine.set_rounding_seed(static_cast<uint64_t>(config.zeroshard.rounding_seed));
  }
  if (engine.state_slots().empty()) {
    if (config.state_format != StateFormat::kInt8) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "zeroshard.optimizer_states is \"int8\", and SGD without momentum has no states; write "
        "\"auto\", or a momentum above 0");
  }
  engine.set_state_format(static_cast<model::v1::StateFormat>(config.state_format));
  return absl::OkStatus();
}

// What each optimizer reads of a parameter group; the rest is not looked at.
absl::Status CheckGroup(model::v1::OptimizerKind kind, const model::v1::GroupOptions& group) {
  const auto refuse = [](const char* field, double value, const char* expected) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, " is ", value, "; expected a number ", expected));
  };
  const auto bad = [](double value) { return !std::isfinite(value) || value < 0; };
  const bool sgd = kind == model::v1::OPTIMIZER_SGD;
  const bool adagrad = kind == model::v1::OPTIMIZER_ADAGRAD;
  const bool lion = kind == model::v1::OPTIMIZER_LION;
  const std::pair<const char*, double> not_negative[] = {{"lr", group.lr()},
                                                         {"weight_decay", group.weight_decay()},
                                                         {"eps", sgd || lion ? 0 : group.eps()},
                                                         {"momentum", sgd ? group.momentum() : 0}};
  for (const auto& [field, value] : not_negative) {
    if (bad(value)) return refuse(field, value, "of at least 0");
  }
  const std::pair<const char*, double> betas[] = {{"betas[0]", group.beta1()},
                                                  {"betas[1]", group.beta2()}};
  for (const auto& [field, value] : betas) {
    if (!sgd && !adagrad && (bad(value) || value >= 1)) return refuse(field, value, "in [0, 1)");
  }
  if (sgd && !std::isfinite(group.dampening())) {
    return refuse("dampening", group.dampening(), "that is finite");
  }
  if (sgd && group.nesterov() && (group.momentum() == 0 || group.dampening() != 0)) {
    return absl::InvalidArgumentError("nesterov needs a momentum above 0 and no dampening");
  }
  return absl::OkStatus();
}

absl::Status CheckGroups(const PlanInput& input, model::v1::OptimizerKind kind) {
  if (kind == model::v1::OPTIMIZER_NONE) return absl::OkStatus();
  for (int index = 0; index < input.manifest.groups_size(); ++index) {
    ZS_RETURN_IF_ERROR(Annotate(CheckGroup(kind, input.manifest.groups(index)),
                                absl::StrCat("parameter group ", index)));
  }
  return absl::OkStatus();
}

void SetNvme(const DsConfig& config, model::v1::NvmeConfig& nvme) {
  const OffloadConfig& optimizer = config.zero.offload_optimizer;
  nvme.set_block_bytes(static_cast<uint64_t>(config.aio.block_size));
  nvme.set_queue_depth(static_cast<uint32_t>(config.aio.queue_depth));
  nvme.set_threads(static_cast<uint32_t>(config.aio.intra_op_parallelism));
  nvme.set_single_submit(config.aio.single_submit);
  nvme.set_overlap_events(config.aio.overlap_events);
  nvme.set_buffer_count(static_cast<uint32_t>(config.tiers.buffer_count));
  nvme.set_pipeline_read(optimizer.pipeline_read);
  nvme.set_pipeline_write(optimizer.pipeline_write);
  nvme.set_durability(config.zeroshard.durability == DurabilityChoice::kPower
                          ? model::v1::DURABILITY_POWER
                          : model::v1::DURABILITY_PROCESS);
  nvme.set_spares(static_cast<uint32_t>(config.zeroshard.nvme_spares));
}

absl::Status CheckDurability(const DsConfig& config, bool states) {
  if (states || config.zeroshard.durability != DurabilityChoice::kPower) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "zeroshard.durability is \"power\", and the job has no optimizer states that could be on "
      "nvme; write \"process\"");
}

// Where state rests. A job without optimizer states is tiered by its parameters alone.
absl::Status SetTiers(const DsConfig& config, model::v1::EngineConfig& engine) {
  const TierUse& use = config.tiers;
  const bool states = engine.optimizer() != model::v1::OPTIMIZER_NONE;
  ZS_RETURN_IF_ERROR(CheckDurability(config, states));
  if (use.pin_memory) engine.mutable_nvme()->set_pin_memory(true);
  if (!use.parameters && !(use.tiered && states)) return absl::OkStatus();
  engine.set_tiered(true);
  SetNvme(config, *engine.mutable_nvme());
  const double ratio = config.zero.offload_optimizer.ratio;
  if (use.optimizer && states && ratio > 0) {
    engine.set_optimizer_tier(model::v1::TIER_NVME);
    engine.set_optimizer_ratio(ratio);
  }
  if (use.parameters) {
    engine.set_parameter_tier(model::v1::TIER_NVME);
    engine.set_host_parameter_elements(static_cast<uint64_t>(config.zero.offload_param.max_in_cpu));
  }
  return absl::OkStatus();
}

// Where parameters of a job on GPUs rest.
absl::Status SetParametersOfGpus(const PlanInput& input, model::v1::EngineConfig& engine) {
  const OffloadConfig& offload = input.config.zero.offload_param;
  engine.set_parameter_tier(model::v1::TIER_GPU);
  if (engine.stage() < 3 || offload.device == OffloadDevice::kNone) return absl::OkStatus();
  if (offload.device == OffloadDevice::kCpu) {
    engine.set_parameter_tier(model::v1::TIER_HOST);
    return absl::OkStatus();
  }
  if (input.nodes > 1) {
    return absl::FailedPreconditionError(absl::StrCat(
        "zero_optimization.offload_param.device is \"nvme\" and the job spans ", input.nodes,
        " daemons, which on GPUs is not in this build; write \"cpu\" or \"none\", or attach all "
        "ranks to one daemon"));
  }
  engine.set_parameter_tier(model::v1::TIER_NVME);
  engine.set_host_parameter_elements(static_cast<uint64_t>(offload.max_in_cpu));
  SetNvme(input.config, *engine.mutable_nvme());
  return absl::OkStatus();
}

// A job on GPUs. What its configuration cannot be was refused when it was read.
absl::Status SetDataPlane(const PlanInput& input, model::v1::EngineConfig& engine) {
  const auto gpus = static_cast<uint32_t>(input.devices.size());
  const uint32_t here = input.world_size / input.nodes;
  if (here > gpus) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the job has ", here, " ranks ", input.nodes > 1 ? "here " : "", "and the daemon ", gpus,
        gpus == 1 ? " GPU" : " GPUs", "; each rank needs a GPU of its own"));
  }
  if (input.world_size > kMaxDataPlaneRanks) {
    return absl::FailedPreconditionError(absl::StrCat("a job on GPUs has at most ",
                                                      kMaxDataPlaneRanks, " ranks; this one has ",
                                                      input.world_size));
  }
  // Sums, updates and so all bits are those of stage 0; only the copies of states are not made.
  const bool replicated = engine.stage() == 0;
  if (replicated) engine.set_stage(2);
  engine.set_data_plane(true);
  engine.set_tiered(true);
  ZS_RETURN_IF_ERROR(SetParametersOfGpus(input, engine));
  engine.set_optimizer_tier(model::v1::TIER_GPU);
  engine.set_optimizer_ratio(1);
  engine.set_gpu_limit(static_cast<uint64_t>(input.config.zeroshard.gpu_limit));
  engine.set_gpu_mirror_steps(static_cast<uint32_t>(input.config.zeroshard.gpu_mirror_steps));
  const OffloadConfig& offload = input.config.zero.offload_optimizer;
  const bool states = engine.optimizer() != model::v1::OPTIMIZER_NONE;
  ZS_RETURN_IF_ERROR(CheckDurability(input.config, states));
  if (!states || replicated || offload.device == OffloadDevice::kNone || offload.ratio == 0) {
    return absl::OkStatus();
  }
  const bool nvme = offload.device == OffloadDevice::kNvme;
  engine.set_optimizer_tier(nvme ? model::v1::TIER_NVME : model::v1::TIER_HOST);
  engine.set_optimizer_ratio(offload.ratio);
  if (nvme) SetNvme(input.config, *engine.mutable_nvme());
  engine.mutable_nvme()->set_pin_memory(input.config.tiers.pin_memory);
  return absl::OkStatus();
}

absl::Status SetPlacement(const PlanInput& input, model::v1::EngineConfig& engine) {
  const ZeroShardConfig& own = input.config.zeroshard;
  const bool gloo = own.transport == TransportChoice::kGloo || input.nodes > 1;
  engine.set_transport(gloo ? model::v1::TRANSPORT_GLOO : model::v1::TRANSPORT_SHARED_MEMORY);
  const bool one_island = !gloo || input.devices.size() * input.nodes == 1;
  if (own.window == WindowChoice::kInPlace && !one_island) {
    return absl::InvalidArgumentError(absl::StrCat(
        "zeroshard.window is \"in_place\", which needs workers that share memory, but ",
        input.nodes > 1 ? "the job spans daemons" : "zeroshard.transport is \"gloo\"",
        "; leave the window to \"auto\""));
  }
  // On GPUs it is of the host: where parameters rest, or for exports only.
  const bool copy = engine.data_plane() ? engine.parameter_tier() != model::v1::TIER_HOST
                                        : own.window == WindowChoice::kCopy || !one_island ||
                                              engine.parameter_tier() == model::v1::TIER_NVME;
  engine.set_window(copy ? model::v1::WINDOW_COPY : model::v1::WINDOW_IN_PLACE);
  engine.set_reduction_group(own.ranks_per_group > 0 ? static_cast<uint32_t>(own.ranks_per_group)
                                                     : input.local_ranks);
  engine.set_ranks_first(own.reduction_order == ReductionOrder::kRanksFirst);
  engine.set_user_state_bytes(static_cast<uint64_t>(own.user_state_bytes));
  return absl::OkStatus();
}

void SetLossScale(const DsConfig& config, model::v1::EngineConfig& engine) {
  model::v1::LossScale& scale = *engine.mutable_loss_scale();
  scale.set_initial(1);
  scale.set_minimum(1);
  if (config.compute_dtype == DType::kFloat16 && config.loss_scale.enabled) {
    const LossScaleConfig& from = config.loss_scale;
    scale.set_dynamic(from.dynamic);
    scale.set_initial(from.dynamic ? std::ldexp(1.0, from.initial_scale_power) : from.static_scale);
    scale.set_window(static_cast<uint32_t>(from.window));
    scale.set_hysteresis(static_cast<uint32_t>(from.hysteresis));
    scale.set_consecutive_hysteresis(from.consecutive_hysteresis);
    scale.set_minimum(from.min_scale);
  }
  engine.set_skip_on_overflow(
      config.compute_dtype == DType::kFloat16 ||
      (config.compute_dtype == DType::kBfloat16 && config.check_grad_overflow));
}

}  // namespace

absl::StatusOr<model::v1::EngineConfig> MakeEngineConfig(const PlanInput& input) {
  const DsConfig& config = input.config;
  model::v1::EngineConfig engine;
  engine.set_stage(static_cast<uint32_t>(config.zero.stage));
  engine.set_compute_dtype(DTypeToProto(config.compute_dtype));
  engine.set_accumulator_dtype(DTypeToProto(config.grad_accum_dtype));
  engine.set_world_size(input.world_size);
  engine.set_forward_only(input.forward_only);
  engine.set_accumulation_steps(1);
  const bool batch_given = config.batch.train || config.batch.micro || config.batch.accumulation;
  if (batch_given || !input.forward_only) {
    ZS_ASSIGN_OR_RETURN(const Batch batch, ResolveBatch(config.batch, input.world_size));
    engine.set_train_batch_size(static_cast<uint32_t>(batch.train));
    engine.set_micro_batch_size(static_cast<uint32_t>(batch.micro));
    engine.set_accumulation_steps(static_cast<uint32_t>(batch.accumulation));
  }
  engine.set_gradient_clipping(config.gradient_clipping);
  engine.set_reduce_bucket_elements(static_cast<uint64_t>(config.zero.reduce_bucket_size));
  engine.set_prefetch_elements(static_cast<uint64_t>(config.zero.prefetch_bucket_size));
  engine.set_persistence_threshold(static_cast<uint64_t>(config.zero.param_persistence_threshold));
  engine.set_max_live_elements(static_cast<uint64_t>(config.zero.max_live_parameters));
  engine.set_sub_group_elements(static_cast<uint64_t>(config.zero.sub_group_size));
  engine.set_collective_timeout_ms(input.collective_timeout_ms);
  ZS_RETURN_IF_ERROR(SetOptimizer(input, engine));
  ZS_RETURN_IF_ERROR(CheckGroups(input, engine.optimizer()));
  ZS_RETURN_IF_ERROR(SetStateForms(config, engine));
  const bool gpus = KindOf(input.devices) == DeviceKind::kCuda;
  ZS_RETURN_IF_ERROR(gpus ? SetDataPlane(input, engine) : SetTiers(config, engine));
  ZS_RETURN_IF_ERROR(SetPlacement(input, engine));
  SetLossScale(config, engine);
  return engine;
}

}  // namespace zeroshard
