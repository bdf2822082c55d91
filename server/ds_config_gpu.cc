#include <string>
#include <string_view>

#include "server/ds_config_settings.h"
#include "server/text.h"

// Part of step 6: what a job on GPUs cannot be, and why.

namespace zeroshard {
namespace {

constexpr std::string_view kStage = "zero_optimization.stage";
constexpr std::string_view kParamDevice = "zero_optimization.offload_param.device";
constexpr std::string_view kOptimizerDevice = "zero_optimization.offload_optimizer.device";
constexpr std::string_view kOptimizerPath = "zero_optimization.offload_optimizer.nvme_path";
constexpr std::string_view kWindow = "zeroshard.window";
constexpr std::string_view kTransport = "zeroshard.transport";
constexpr std::string_view kMirror = "zeroshard.gpu_mirror_steps";

// The key has this value, which a job on GPUs cannot have for `reason`.
void Refuse(std::string_view key, std::string_view value, std::string_view reason,
            const Settings& settings, Findings& findings) {
  if (settings.Text(key) != value) return;
  findings.Error(settings.At(key), Concat(key, " is ", JsonQuote(value), ", and ", reason));
}

}  // namespace

void CheckGpu(const Settings& settings, Findings& findings) {
  if (settings.devices != DeviceKind::kCuda) {
    NameIdle({"zeroshard.gpu_limit", "zeroshard.gpu_mirror_steps"},
             "the daemon has no GPUs (devices)", settings, findings);
    return;
  }
  const std::int64_t stage = settings.Int(kStage);
  if (stage == 0) {
    findings.Warn(settings.At(kStage),
                  Concat(kStage,
                         " is 0, which on GPUs is carried out as 2: parameters whole on each GPU, "
                         "gradients and optimizer states once and not on every rank; the results "
                         "are those of 0."));
  }
  Refuse(kWindow, "in_place",
         "trainers on GPUs gather parameters into memory of their own; leave the window to "
         "\"auto\"",
         settings, findings);
  Refuse(kTransport, "gloo",
         "ranks on GPUs exchange over NCCL, and their workers share memory; leave the transport "
         "to \"auto\"",
         settings, findings);
  const bool parameters = stage == 3 && settings.Text(kParamDevice) == "nvme";
  if ((parameters || settings.Text(kOptimizerDevice) == "nvme") && settings.Int(kMirror) > 0) {
    findings.Error(settings.At(kMirror),
                   Concat(kMirror, " keeps copies of all states in host memory, and these ",
                          parameters ? "parameters" : "states",
                          " are on nvme; write 0, and save checkpoints"));
  }
  if (settings.Text(kOptimizerDevice) != "nvme") {
    NameIdle({kOptimizerPath},
             "states of a job on GPUs are on nvme from its start or not at all (device nvme)",
             settings, findings);
  }
}

}  // namespace zeroshard
