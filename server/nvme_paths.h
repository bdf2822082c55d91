// The directories of the NVMe tier: as the operator lists them, and which of them a job uses.
//
// Pure functions on text, nothing is opened; any thread. Whether a directory will do is found by
// storage/nvme_path.h. Symbolic links are not seen here: below a path of the daemon, whoever opens
// must not follow them for a trainer of another user.
#ifndef ZEROSHARD_SERVER_NVME_PATHS_H_
#define ZEROSHARD_SERVER_NVME_PATHS_H_

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace zeroshard {

struct NvmePathConfig {
  std::string path;     // normalised
  uint64_t weight = 1;  // share of the bytes, bytes/s in any unit
  bool allow_network_path = false;
  friend bool operator==(const NvmePathConfig&, const NvmePathConfig&) = default;
};

// The path without doubled and trailing slashes and "." parts. InvalidArgument, saying what was
// expected and found, for one that is empty, not absolute, longer than the system takes, or has a
// ".." part or a control character.
absl::StatusOr<std::string> NormaliseNvmePath(std::string_view text);

// Whether `path` is `root` or lies beneath it, by their text; both are normalised.
bool IsBeneath(std::string_view path, std::string_view root);

// "PATH" or "PATH=WEIGHT".
absl::StatusOr<NvmePathConfig> ParseNvmePath(std::string_view text);

// A daemon's list: at most kMaxExtentPaths, none twice, weights from 1 to kMaxPathWeight.
absl::Status CheckNvmePaths(std::span<const NvmePathConfig> paths);

// What a trainer may name as its nvme_path.
enum class PathRight : uint8_t {
  kListed,  // a path of the daemon's list, or beneath one
  kAny,     // any directory: the trainer's user is the daemon's own, or root
};

// The paths that a job uses: `wanted` (nvme_path of its ds_config), or all of `daemon` when that is
// empty. A path that is in the list, or beneath one of it, has that one's weight and network rule.
// PermissionDenied for a path that `right` does not cover, FailedPrecondition when there is none,
// both with advice; InvalidArgument as NormaliseNvmePath.
absl::StatusOr<std::vector<NvmePathConfig>> PathsOfJob(std::string_view wanted,
                                                       std::span<const NvmePathConfig> daemon,
                                                       PathRight right);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_NVME_PATHS_H_
