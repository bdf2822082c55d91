// DaemonConfig: the settings of zeroshardd, from a YAML file and flags (docs/operations.md lists
// the keys).
//
// Pure but for reading the file. Errors name the key, what was found and what was expected.

#ifndef ZEROSHARD_SERVER_DAEMON_CONFIG_H_
#define ZEROSHARD_SERVER_DAEMON_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "server/cluster_config.h"
#include "server/devices.h"
#include "server/tier_config.h"

namespace zeroshard {

struct DaemonConfig {
  std::string run_dir;         // sockets; 0750
  std::string state_dir;       // the metadata journal
  std::string checkpoint_dir;  // Save and Restore live beneath it
  std::string export_dir;      // Export writes beneath it
  std::string worker_binary;   // "": beside the daemon's own
  // cpu: one worker of each job on each. cuda: a job has workers on as many as it has ranks.
  std::vector<std::string> devices = {"cpu:0"};
  std::string metrics_address = "127.0.0.1:9464";  // "off" for none
  // What the workers' Gloo transport binds to; in a cluster, unless given, this daemon's address.
  std::string gloo_address = "127.0.0.1";
  ClusterConfig cluster;
  TierConfig tiers;
  uint64_t host_memory_limit = 0;  // bytes for all jobs, 0 for none
  uint64_t gpu_memory_limit = 0;   // bytes of each GPU for all jobs, trainers' windows included
  uint64_t job_gpu_limit = 0;      // bytes of each GPU, of a job whose ds_config has no limit
  uint32_t lanes_per_worker = 0;   // 0: the cores divided by the devices
  absl::Duration attach_timeout = absl::Seconds(300);
  absl::Duration collective_timeout = absl::Seconds(300);
  absl::Duration rejoin_timeout = absl::Seconds(600);
  std::vector<uint32_t> allow_uids;  // users beside the daemon's own and root
  LogLevel log_level = LogLevel::kInfo;
};

// Values given as flags; they win over the file.
struct DaemonFlags {
  std::string config_file;  // "": none
  std::optional<std::string> run_dir, state_dir, checkpoint_dir, export_dir, worker_binary,
      metrics_address, log_level, host_memory_limit, gpu_memory_limit;
  std::vector<std::string> devices;
  std::vector<std::string> nvme_paths;  // "PATH" or "PATH=WEIGHT"
};

// Reads and checks everything; touches nothing else.
absl::StatusOr<DaemonConfig> LoadDaemonConfig(const DaemonFlags& flags);

// The directory of the sockets when none is configured: /run/zeroshard for root, else
// $XDG_RUNTIME_DIR/zeroshard, else /tmp/zeroshard-<uid>.
std::string DefaultRunDir();

// The configuration as YAML, every key with its value.
std::string DaemonConfigText(const DaemonConfig& config);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_DAEMON_CONFIG_H_
