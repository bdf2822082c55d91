#ifndef ZEROSHARD_SERVER_DS_CONFIG_H_
#define ZEROSHARD_SERVER_DS_CONFIG_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/dtype.h"
#include "server/devices.h"
#include "storage/state_format.h"

// A job's settings, read from a DeepSpeed ds_config.json as DeepSpeed 0.19.6 reads it.
//
//   ZS_ASSIGN_OR_RETURN(DsConfig config, ParseDsConfig(text, client_values));
//   ... when all ranks are attached:
//   ZS_ASSIGN_OR_RETURN(Batch batch, ResolveBatch(config.batch, ranks));
//
// Each key is honoured, or refused with a reason, or accepted and named in `warnings` as having no
// effect; docs/ds_config.md lists them all. All errors of a file are reported in one
// InvalidArgument, each with "line:column", the key, the value found and what was expected.
// Nothing here throws, whatever the input. Pure functions on values; any thread.

namespace zeroshard {

// kAdam: L2 weight decay.
enum class OptimizerKind : std::uint8_t { kAdamW, kAdam, kSgd, kAdagrad, kLion };
// kNone: memory of the daemon's devices, so for a daemon on the host the same as kCpu.
enum class OffloadDevice : std::uint8_t { kNone, kCpu, kNvme };
enum class ReductionOrder : std::uint8_t { kDefault, kRanksFirst };
enum class TransportChoice : std::uint8_t { kAuto, kShm, kGloo };
enum class WindowChoice : std::uint8_t { kAuto, kInPlace, kCopy };
// What committed steps survive: the death of processes, or the loss of power.
enum class DurabilityChoice : std::uint8_t { kProcess, kPower };

// torch.optim's meaning of every field; fields that the kind does not have keep their default.
struct OptimizerConfig {
  bool given = false;  // false: neither the file nor the client names one
  OptimizerKind kind = OptimizerKind::kAdamW;
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
  bool bias_correction = true;
  double momentum = 0;
  double dampening = 0;
  bool nesterov = false;
};

// For the trainer's engine, which runs the schedule and sends the learning rate with each step.
struct SchedulerConfig {
  std::string type;                                         // empty: none
  std::vector<std::pair<std::string, std::string>> params;  // name, JSON text; defaults filled in
  std::string params_json;                                  // the same as one JSON object
};

// Active when the compute type is fp16.
struct LossScaleConfig {
  bool enabled = false;
  bool dynamic = true;
  double static_scale = 1;  // when not dynamic
  int initial_scale_power = 16;
  std::int64_t window = 1000;
  std::int64_t hysteresis = 2;
  bool consecutive_hysteresis = false;
  double min_scale = 1;
};

struct BatchConfig {
  std::optional<std::int64_t> train;
  std::optional<std::int64_t> micro;  // per rank
  std::optional<std::int64_t> accumulation;
};

struct Batch {
  std::int64_t train = 0;
  std::int64_t micro = 0;
  std::int64_t accumulation = 0;
};

struct OffloadConfig {
  OffloadDevice device = OffloadDevice::kNone;
  std::string nvme_path;  // as written; empty: none
  std::int64_t buffer_count = 0;
  std::int64_t buffer_size = 0;  // elements; parameters only
  std::int64_t max_in_cpu = 0;   // elements; parameters only
  bool pin_memory = true;
  double ratio = 1;            // optimizer only, from here on
  bool pipeline_read = true;   // DeepSpeed's default is false
  bool pipeline_write = true;  // the same
};

struct AioConfig {
  std::int64_t block_size = 1 << 20;  // bytes, a multiple of 4096
  std::int64_t queue_depth = 8;
  std::int64_t intra_op_parallelism = 1;
  bool single_submit = false;
  bool overlap_events = true;
};

struct ActivationCheckpointingConfig {
  bool partition_activations = false;
  bool contiguous_memory_optimization = false;
  bool cpu_checkpointing = false;
  std::optional<std::int64_t> number_checkpoints;
  bool synchronize_checkpoint_boundary = false;
  bool profile = false;
};

// zero_optimization; sizes in elements.
struct ZeroConfig {
  int stage = 0;
  std::int64_t reduce_bucket_size = 0;
  std::int64_t allgather_bucket_size = 0;
  std::int64_t sub_group_size = 0;
  std::int64_t prefetch_bucket_size = 0;
  std::int64_t param_persistence_threshold = 0;
  std::int64_t model_persistence_threshold = 0;
  std::int64_t max_live_parameters = 0;
  std::int64_t max_reuse_distance = 0;
  OffloadConfig offload_param;
  OffloadConfig offload_optimizer;
};

// The block `zeroshard`, which is no part of DeepSpeed.
struct ZeroShardConfig {
  ReductionOrder reduction_order = ReductionOrder::kDefault;
  TransportChoice transport = TransportChoice::kAuto;
  WindowChoice window = WindowChoice::kAuto;
  std::string compat_version;
  std::int64_t ranks_per_group = 0;  // 0: the ranks of a node
  std::int64_t user_state_bytes = 0;
  std::int64_t rounding_seed = 0;
  DurabilityChoice durability = DurabilityChoice::kProcess;
  std::int64_t nvme_spares = 4;       // slots beside the home slots, on each path
  std::int64_t nvme_limit = 0;        // bytes of the job; 0: none
  std::int64_t host_limit = 0;        // the same
  std::int64_t gpu_limit = 0;         // the same, of each GPU
  std::int64_t gpu_mirror_steps = 0;  // what GPUs hold is copied to the host so often; 0: never
};

// What the offload blocks come to at the job's stage.
struct TierUse {
  // Something is on the NVMe tier, or may be moved there. For a job without optimizer states:
  // `parameters`.
  bool tiered = false;
  bool optimizer = false;         // masters and optimizer states are there, as far as ratio says
  bool parameters = false;        // parameter shards are
  std::string nvme_path;          // normalised; empty: all paths of the daemon
  std::int64_t buffer_count = 0;  // the larger of the blocks that are in use
  bool pin_memory = false;        // host memory is locked, staging too
};

enum class ValueOrigin : std::uint8_t { kDefault, kFile, kClient, kAlias, kCompat };
std::string_view ValueOriginName(ValueOrigin origin);

// One setting as it holds, for people to read.
struct ResolvedValue {
  std::string path;        // "zero_optimization.stage"
  std::string value_text;  // JSON
  ValueOrigin origin = ValueOrigin::kDefault;
  std::string note;  // what it does, why it has no effect, or where it came from
};

struct DsConfig {
  ZeroConfig zero;
  DType compute_dtype = DType::kFloat32;
  DType grad_accum_dtype = DType::kFloat32;
  MasterForm master_form = MasterForm::kFloat32;
  StateFormat state_format = StateFormat::kFloat32;
  bool check_grad_overflow = true;  // bf16: skip a step whose gradient is not finite
  OptimizerConfig optimizer;
  SchedulerConfig scheduler;
  double gradient_clipping = 1;  // 0: off
  LossScaleConfig loss_scale;
  BatchConfig batch;
  AioConfig aio;
  ActivationCheckpointingConfig activation_checkpointing;
  ZeroShardConfig zeroshard;
  TierUse tiers;

  std::vector<ResolvedValue> resolved;
  std::vector<std::string> warnings;  // whole sentences
};

// Values that the client knows: dotted key -> JSON text ("zero_optimization.stage" -> "3"). Each
// fills "auto", or a key that the file lacks; one that contradicts the file is an error.
using ClientValues = std::map<std::string, std::string>;

// `text` is the file's contents (server/hjson.h says what is taken), or the urlsafe-base64 form of
// it, which DeepSpeed takes too. Unresolved "auto" values give one error that names them all.
// `devices`: what the daemon works on; some values mean something else on GPUs, or are refused.
absl::StatusOr<DsConfig> ParseDsConfig(std::string_view text, const ClientValues& client = {},
                                       DeviceKind devices = DeviceKind::kCpu);

// DeepSpeed's batch rule, train = micro * accumulation * ranks, with what is missing derived.
// InvalidArgument names the numbers. `ranks` is the number of data-parallel ranks.
absl::StatusOr<Batch> ResolveBatch(const BatchConfig& batch, std::int64_t ranks);

// The settings as lines of text (path = value, origin, note), then the warnings.
std::vector<std::string> ExplainLines(const DsConfig& config);

// The same as JSON: {"values": [{"path", "value", "origin", "note"}...], "warnings": [...]}.
std::string ExplainJson(const DsConfig& config);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_DS_CONFIG_H_
