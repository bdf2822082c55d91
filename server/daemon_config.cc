#include "server/daemon_config.h"

#include <unistd.h>

#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/config.h"
#include "base/fd_passing.h"
#include "base/status.h"
#include "base/strings.h"

namespace zeroshard {
namespace {

constexpr int64_t kMaxLanes = 1024;

// The longest socket path beneath run_dir must fit: jobs/<128 characters> does not, so job folders
// are named by a short hash when needed; this leaves room for that.
constexpr size_t kSocketSuffixBytes = sizeof("/jobs/0123456789abcdef/worker-255.sock");

absl::Status CheckDirectory(const char* key, const std::string& path) {
  if (path.empty() || path[0] != '/') {
    return absl::InvalidArgumentError(
        absl::StrCat(key, ": expected an absolute path, found \"", path, "\""));
  }
  return absl::OkStatus();
}

absl::Status CheckTimeout(const char* key, absl::Duration timeout) {
  if (timeout < absl::Milliseconds(10) || timeout > absl::Hours(24 * 7)) {
    return absl::InvalidArgumentError(
        absl::StrCat(key, ": expected 10ms to 7 days, found ", absl::FormatDuration(timeout)));
  }
  return absl::OkStatus();
}

absl::Status ReadLanes(const YamlNode& yaml, DaemonConfig& config) {
  if (auto text = yaml.String("lanes_per_worker", "auto"); text.ok() && *text == "auto") {
    config.lanes_per_worker = 0;
    return absl::OkStatus();
  }
  ZS_ASSIGN_OR_RETURN(const int64_t lanes, yaml.Int("lanes_per_worker", 1, {1, kMaxLanes}));
  config.lanes_per_worker = static_cast<uint32_t>(lanes);
  return absl::OkStatus();
}

absl::Status ReadUids(const YamlNode& yaml, DaemonConfig& config) {
  ZS_ASSIGN_OR_RETURN(const std::vector<std::string> uids, yaml.Strings("allow_uids"));
  for (const std::string& text : uids) {
    uint32_t uid = 0;
    if (!absl::SimpleAtoi(text, &uid)) {
      return yaml.Error("allow_uids", "expected user numbers, found \"" + text + "\"");
    }
    config.allow_uids.push_back(uid);
  }
  return absl::OkStatus();
}

absl::Status ReadTimes(const YamlNode& yaml, DaemonConfig& config) {
  ZS_ASSIGN_OR_RETURN(config.attach_timeout,
                      yaml.Duration("attach_timeout", config.attach_timeout));
  ZS_ASSIGN_OR_RETURN(config.collective_timeout,
                      yaml.Duration("collective_timeout", config.collective_timeout));
  ZS_ASSIGN_OR_RETURN(config.rejoin_timeout,
                      yaml.Duration("rejoin_timeout", config.rejoin_timeout));
  return absl::OkStatus();
}

absl::Status ReadNetwork(const YamlNode& yaml, DaemonConfig& config) {
  if (yaml.Has("cluster")) {
    ZS_ASSIGN_OR_RETURN(const YamlNode cluster, yaml.Child("cluster"));
    ZS_ASSIGN_OR_RETURN(config.cluster, ReadCluster(cluster));
    ZS_ASSIGN_OR_RETURN(config.gloo_address, HostOf(config.cluster.addresses[config.cluster.node]));
  }
  ZS_ASSIGN_OR_RETURN(config.gloo_address, yaml.String("gloo_address", config.gloo_address));
  for (const std::string& address : config.cluster.addresses) {
    ZS_ASSIGN_OR_RETURN(const std::string host, HostOf(address));
    if (IsLoopback(config.gloo_address) && !IsLoopback(host)) {
      return yaml.Error("gloo_address", absl::StrCat("workers of the daemon at ", address,
                                                     " cannot reach ", config.gloo_address));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadFile(const YamlNode& yaml, DaemonConfig& config) {
  ZS_ASSIGN_OR_RETURN(config.run_dir, yaml.String("run_dir", config.run_dir));
  ZS_ASSIGN_OR_RETURN(config.state_dir, yaml.String("state_dir", config.state_dir));
  ZS_ASSIGN_OR_RETURN(config.checkpoint_dir, yaml.String("checkpoint_dir", config.checkpoint_dir));
  ZS_ASSIGN_OR_RETURN(config.export_dir, yaml.String("export_dir", config.export_dir));
  ZS_ASSIGN_OR_RETURN(config.worker_binary, yaml.String("worker_binary", config.worker_binary));
  ZS_ASSIGN_OR_RETURN(config.metrics_address,
                      yaml.String("metrics_address", config.metrics_address));
  ZS_RETURN_IF_ERROR(ReadNetwork(yaml, config));
  ZS_ASSIGN_OR_RETURN(config.host_memory_limit,
                      yaml.Bytes("host_memory_limit", config.host_memory_limit));
  ZS_ASSIGN_OR_RETURN(config.gpu_memory_limit,
                      yaml.Bytes("gpu_memory_limit", config.gpu_memory_limit));
  ZS_ASSIGN_OR_RETURN(config.job_gpu_limit, yaml.Bytes("job_gpu_limit", config.job_gpu_limit));
  ZS_ASSIGN_OR_RETURN(const std::string level, yaml.String("log_level", "info"));
  ZS_ASSIGN_OR_RETURN(config.log_level, ParseLogLevel(level));
  if (yaml.Has("devices")) {
    ZS_ASSIGN_OR_RETURN(config.devices, yaml.Strings("devices"));
  }
  ZS_RETURN_IF_ERROR(ReadLanes(yaml, config));
  ZS_RETURN_IF_ERROR(ReadUids(yaml, config));
  ZS_RETURN_IF_ERROR(ReadTimes(yaml, config));
  ZS_RETURN_IF_ERROR(ReadTiers(yaml, config.tiers));
  return yaml.Finish();
}

absl::Status ApplyFlags(const DaemonFlags& flags, DaemonConfig& config) {
  auto set = [](std::string& value, const std::optional<std::string>& flag) {
    if (flag) value = *flag;
  };
  set(config.run_dir, flags.run_dir);
  set(config.state_dir, flags.state_dir);
  set(config.checkpoint_dir, flags.checkpoint_dir);
  set(config.export_dir, flags.export_dir);
  set(config.worker_binary, flags.worker_binary);
  set(config.metrics_address, flags.metrics_address);
  if (!flags.devices.empty()) config.devices = flags.devices;
  if (flags.log_level) {
    ZS_ASSIGN_OR_RETURN(config.log_level, ParseLogLevel(*flags.log_level));
  }
  if (flags.host_memory_limit) {
    ZS_ASSIGN_OR_RETURN(config.host_memory_limit, ParseByteSize(*flags.host_memory_limit));
  }
  if (flags.gpu_memory_limit) {
    ZS_ASSIGN_OR_RETURN(config.gpu_memory_limit, ParseByteSize(*flags.gpu_memory_limit));
  }
  return ApplyNvmePathFlags(flags.nvme_paths, config.tiers);
}

absl::Status Check(const DaemonConfig& config) {
  ZS_RETURN_IF_ERROR(CheckDirectory("run_dir", config.run_dir));
  ZS_RETURN_IF_ERROR(CheckDirectory("state_dir", config.state_dir));
  ZS_RETURN_IF_ERROR(CheckDirectory("checkpoint_dir", config.checkpoint_dir));
  ZS_RETURN_IF_ERROR(CheckDirectory("export_dir", config.export_dir));
  if (config.run_dir.size() + kSocketSuffixBytes > kMaxUnixPathBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "run_dir: ", config.run_dir, " has ", config.run_dir.size(),
        " characters; sockets beneath it allow at most ", kMaxUnixPathBytes - kSocketSuffixBytes));
  }
  ZS_RETURN_IF_ERROR(CheckTimeout("attach_timeout", config.attach_timeout));
  ZS_RETURN_IF_ERROR(CheckTimeout("collective_timeout", config.collective_timeout));
  ZS_RETURN_IF_ERROR(CheckTimeout("rejoin_timeout", config.rejoin_timeout));
  ZS_RETURN_IF_ERROR(CheckTiers(config.tiers));
  return CheckDevices(config.devices);
}

std::string DefaultDataDir() {
  if (geteuid() == 0) return "/var/lib/zeroshard";
  if (auto home = Env("XDG_STATE_HOME"); home && !home->empty()) return *home + "/zeroshard";
  if (auto home = Env("HOME"); home && !home->empty()) return *home + "/.local/state/zeroshard";
  return absl::StrCat("/tmp/zeroshard-", geteuid(), "-state");
}

}  // namespace

std::string DefaultRunDir() {
  if (geteuid() == 0) return "/run/zeroshard";
  if (auto dir = Env("XDG_RUNTIME_DIR"); dir && !dir->empty()) return *dir + "/zeroshard";
  return absl::StrCat("/tmp/zeroshard-", geteuid());
}

absl::StatusOr<DaemonConfig> LoadDaemonConfig(const DaemonFlags& flags) {
  DaemonConfig config;
  config.run_dir = DefaultRunDir();
  const std::string data = DefaultDataDir();
  config.state_dir = data + "/state";
  config.checkpoint_dir = data + "/checkpoints";
  config.export_dir = data + "/exports";
  if (!flags.config_file.empty()) {
    ZS_ASSIGN_OR_RETURN(const YamlNode yaml, YamlNode::ParseFile(flags.config_file));
    ZS_RETURN_IF_ERROR(ReadFile(yaml, config));
  }
  ZS_RETURN_IF_ERROR(ApplyFlags(flags, config));
  ZS_RETURN_IF_ERROR(Check(config));
  return config;
}

std::string DaemonConfigText(const DaemonConfig& config) {
  static constexpr const char* kLevels[] = {"debug", "info", "warn", "error", "off"};
  // The escapes of the log are those of YAML's double quotes.
  std::string text = absl::StrCat(
      "run_dir: ", QuoteForLog(config.run_dir), "\nstate_dir: ", QuoteForLog(config.state_dir),
      "\ncheckpoint_dir: ", QuoteForLog(config.checkpoint_dir),
      "\nexport_dir: ", QuoteForLog(config.export_dir),
      "\nworker_binary: ", QuoteForLog(config.worker_binary), "\ndevices: [\"",
      absl::StrJoin(config.devices, "\", \""), "\"]",
      "\nmetrics_address: ", QuoteForLog(config.metrics_address),
      "\ngloo_address: ", QuoteForLog(config.gloo_address),
      "\nhost_memory_limit: ", config.host_memory_limit,
      "\ngpu_memory_limit: ", config.gpu_memory_limit, "\njob_gpu_limit: ", config.job_gpu_limit);
  absl::StrAppend(&text, "\nlanes_per_worker: ",
                  config.lanes_per_worker == 0 ? "auto" : absl::StrCat(config.lanes_per_worker),
                  "\nattach_timeout: ", absl::FormatDuration(config.attach_timeout),
                  "\ncollective_timeout: ", absl::FormatDuration(config.collective_timeout),
                  "\nrejoin_timeout: ", absl::FormatDuration(config.rejoin_timeout),
                  "\nallow_uids: [", absl::StrJoin(config.allow_uids, ", "),
                  "]\nlog_level: ", kLevels[static_cast<int>(config.log_level)], "\n",
                  TierText(config.tiers), ClusterText(config.cluster));
  return text;
}

}  // namespace zeroshard
