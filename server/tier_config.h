// TierConfig: the daemon's settings of the NVMe tier and of host memory. Part of DaemonConfig;
// docs/operations.md lists the keys.
//
// Pure functions; any thread. Errors name the key, what was found and what was expected.
#ifndef ZEROSHARD_SERVER_TIER_CONFIG_H_
#define ZEROSHARD_SERVER_TIER_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/config.h"
#include "server/nvme_paths.h"
#include "storage/io_backend_name.h"

namespace zeroshard {

// Sizes are bytes; 0 is no limit.
struct TierConfig {
  std::vector<NvmePathConfig> nvme_paths;  // normalised, none twice
  uint64_t nvme_limit = 0;                 // of all jobs
  uint64_t nvme_write_budget = 0;          // written to each path in a day
  IoBackend io_backend = IoBackend::kAuto;
  absl::Duration io_timeout = absl::Seconds(30);  // a transfer that takes longer has failed
  uint64_t io_bytes_per_second = 0;               // of each path's device, all jobs together
  uint32_t io_depth = 0;                          // transfers in flight, the same; 0: no limit
  bool huge_pages = true;                         // host memory, where the kernel gives them
  bool require_pinned = false;                    // memory that cannot be locked is an error
  uint64_t job_host_limit = 0;                    // of a job whose ds_config has no limit
  uint64_t job_nvme_limit = 0;                    // the same
};

// Reads the keys of `yaml`; the others are left unread.
absl::Status ReadTiers(const YamlNode& yaml, TierConfig& config);

// Replaces the paths by those of flags, "PATH" or "PATH=WEIGHT"; none: leaves them as they are.
absl::Status ApplyNvmePathFlags(const std::vector<std::string>& flags, TierConfig& config);

// What holds between and beyond single keys.
absl::Status CheckTiers(const TierConfig& config);

// The same as YAML, every key with its value.
std::string TierText(const TierConfig& config);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_TIER_CONFIG_H_
