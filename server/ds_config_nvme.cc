#include <algorithm>
#include <initializer_list>

#include "server/ds_config_settings.h"
#include "server/nvme_paths.h"
#include "server/text.h"

// Part of step 6: the offload blocks, aio, and what of them has an effect at the job's stage.

namespace zeroshard {
namespace {

constexpr std::string_view kStage = "zero_optimization.stage";
constexpr std::string_view kParam = "zero_optimization.offload_param";
constexpr std::string_view kOptimizer = "zero_optimization.offload_optimizer";
constexpr std::string_view kRatio = "zero_optimization.offload_optimizer.ratio";
constexpr std::string_view kBlockSize = "aio.block_size";
constexpr std::string_view kWindow = "zeroshard.window";
constexpr std::string_view kDurability = "zeroshard.durability";

// Direct I/O moves whole blocks of this size.
constexpr std::int64_t kAlignment = 4096;

// From which stage on the block's state is sharded, so that it can be elsewhere.
std::int64_t FirstStage(std::string_view block) { return block == kParam ? 3 : 1; }

std::string Device(std::string_view block, const Settings& settings) {
  return settings.Text(Concat(block, ".device"));
}

bool IsActive(std::string_view block, const Settings& settings) {
  return settings.Int(kStage) >= FirstStage(block);
}

// The block's path, normalised; empty when it has none, or none that will do.
std::string PathOf(std::string_view block, const Settings& settings) {
  return NormaliseNvmePath(settings.Text(Concat(block, ".nvme_path"))).value_or("");
}

void CheckPaths(const TierUse& use, const Settings& settings, Findings& findings) {
  for (const std::string_view block : {kParam, kOptimizer}) {
    const std::string key = Concat(block, ".nvme_path");
    if (!settings.Has(key)) continue;
    const absl::StatusOr<std::string> path = NormaliseNvmePath(settings.Text(key));
    if (path.ok()) continue;
    findings.Error(settings.At(key), Concat(key, ": ", Std(path.status().message()),
                                            "; leave it out for all paths of the daemon"));
  }
  const std::string param = PathOf(kParam, settings);
  const std::string optimizer = PathOf(kOptimizer, settings);
  if (!use.parameters || param.empty() || optimizer.empty() || param == optimizer) return;
  findings.Error(settings.At(Concat(kParam, ".nvme_path")),
                 Concat(kParam, ".nvme_path and ", kOptimizer,
                        ".nvme_path differ, and a job has one set of paths; write the same in "
                        "both, or in neither for all paths of the daemon"));
}

// What contradicts states or parameters on nvme.
void CheckConflicts(const TierUse& use, const Settings& settings, Findings& findings) {
  if (use.parameters && settings.Text(kWindow) == "in_place") {
    findings.Error(settings.At(kWindow),
                   Concat(kWindow,
                          " is \"in_place\", where parameters lie in memory all the time, "
                          "and ",
                          kParam, ".device is \"nvme\"; leave the window to \"auto\""));
  }
  if (settings.Text(kDurability) != "power") return;
  if (!use.optimizer) {
    findings.Error(settings.At(kDurability),
                   Concat(kDurability,
                          " is \"power\", and what is in memory is lost with the "
                          "power; write ",
                          kOptimizer, ".device \"nvme\" at stage 1, 2 or 3, or \"process\""));
  } else if (settings.Float(kRatio) < 1) {
    findings.Error(settings.At(kDurability), Concat(kDurability, " is \"power\", and with ", kRatio,
                                                    " ", settings.Float(kRatio),
                                                    " a part of the states is in memory, which is "
                                                    "lost with the power; write 1.0"));
  }
}

void NameIdleBlocks(const Settings& settings, Findings& findings) {
  if (!IsActive(kParam, settings) && Device(kParam, settings) != "none") {
    findings.NoEffect(kParam, "parameters are sharded at stage 3 only");
  }
  if (!IsActive(kOptimizer, settings) && (Device(kOptimizer, settings) != "none" ||
                                          settings.Given(Concat(kOptimizer, ".nvme_path")))) {
    findings.NoEffect(kOptimizer, "optimizer states are sharded from stage 1 on");
  }
}

// Keys of blocks that have an effect, but these have none. A block without effect is named whole.
void NameIdleKeys(const TierUse& use, const Settings& settings, Findings& findings) {
  const bool param_named = !IsActive(kParam, settings) && Device(kParam, settings) != "none";
  if (!use.parameters && !param_named) {
    NameIdle({"zero_optimization.offload_param.nvme_path",
              "zero_optimization.offload_param.buffer_count",
              "zero_optimization.offload_param.max_in_cpu"},
             "parameters are not on nvme", settings, findings);
  }
  if (!use.tiered) {
    NameIdle({"zero_optimization.offload_optimizer.buffer_count",
              "zero_optimization.offload_optimizer.pipeline_read",
              "zero_optimization.offload_optimizer.pipeline_write", "aio.block_size",
              "aio.queue_depth", "aio.intra_op_parallelism", "aio.single_submit",
              "aio.overlap_events", "zeroshard.nvme_spares", "zeroshard.nvme_limit"},
             "nothing of this job can be on nvme", settings, findings);
  }
  const bool gpus = settings.devices == DeviceKind::kCuda;
  if (!use.optimizer && (!gpus || Device(kOptimizer, settings) == "none")) {
    NameIdle({kRatio}, gpus ? "nothing is offloaded" : "optimizer states are not on nvme", settings,
             findings);
  }
  for (const std::string_view block : {kParam, kOptimizer}) {
    const std::string pin = Concat(block, ".pin_memory");
    if (Device(block, settings) == "none") {
      NameIdle({pin}, "nothing is offloaded there (device none)", settings, findings);
    }
  }
}

}  // namespace

TierUse TierUseOf(const Settings& settings) {
  TierUse use;
  use.parameters = IsActive(kParam, settings) && Device(kParam, settings) == "nvme";
  const std::string states = IsActive(kOptimizer, settings) ? Device(kOptimizer, settings) : "none";
  use.optimizer = states == "nvme";
  // On GPUs states do not come to nvme later.
  const bool may_have_path =
      IsActive(kOptimizer, settings) && (use.optimizer || settings.devices == DeviceKind::kCpu);
  const std::string path = may_have_path ? PathOf(kOptimizer, settings) : "";
  use.tiered = use.parameters || use.optimizer || !path.empty();
  use.nvme_path = path.empty() && use.parameters ? PathOf(kParam, settings) : path;
  if (use.tiered) use.buffer_count = settings.Int(Concat(kOptimizer, ".buffer_count"));
  if (use.parameters) {
    use.buffer_count = std::max(use.buffer_count, settings.Int(Concat(kParam, ".buffer_count")));
  }
  for (const std::string_view block : {kParam, kOptimizer}) {
    use.pin_memory |= IsActive(block, settings) && Device(block, settings) != "none" &&
                      settings.Bool(Concat(block, ".pin_memory"));
  }
  return use;
}

void CheckNvme(const Settings& settings, Findings& findings) {
  const TierUse use = TierUseOf(settings);
  const std::int64_t stage = settings.Int(kStage);
  if (settings.Float(kRatio) < 1 && stage != 3) {
    findings.Error(settings.At(kRatio),
                   Concat(kRatio, " below 1.0 needs stage 3, and the stage is ", stage));
  }
  if (settings.Int(kBlockSize) % kAlignment != 0) {
    findings.Error(settings.At(kBlockSize),
                   Concat(kBlockSize, " is ", settings.Int(kBlockSize),
                          "; expected a multiple of 4096, which direct I/O moves"));
  }
  CheckPaths(use, settings, findings);
  CheckConflicts(use, settings, findings);
  NameIdleBlocks(settings, findings);
  NameIdleKeys(use, settings, findings);
}

}  // namespace zeroshard
