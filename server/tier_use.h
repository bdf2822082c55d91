// TierUse: what the passes of one worker over the NVMe tier came to lately, and whether its drives
// hold the job up.
//
// From the counters that workers send (proto/internal.proto, Stats). Pure but for what Add
// remembers; decision thread.
#ifndef ZEROSHARD_SERVER_TIER_USE_H_
#define ZEROSHARD_SERVER_TIER_USE_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "proto/internal.pb.h"
#include "server/nvme_paths.h"

namespace zeroshard {

// What was moved and waited for between two moments.
struct TierWindow {
  absl::Duration length;
  uint64_t steps = 0;
  absl::Duration passes;
  absl::Duration waiting;  // of passes: for transfers
  absl::Duration compute;  // of all lanes
  struct Path {
    uint64_t read = 0;
    uint64_t written = 0;
    absl::Duration busy;
  };
  std::vector<Path> paths;
};

class TierHistory {
 public:
  // Counters of the running process, which began at 0. `now` as Clock::Elapsed.
  void Add(const internal::v1::Stats& stats, absl::Duration now);

  // The last ten to twenty seconds; less after a start.
  TierWindow window() const;

 private:
  struct Mark {
    internal::v1::Stats stats;
    absl::Duration at;
  };
  Mark older_, newer_, last_;
  bool begun_ = false;
};

// "the drives are the bottleneck: ..." with figures, when `windows` (of the workers of a job on
// this node) waited for transfers more than a fifth of their passes; else "". `lanes`: of each
// worker.
std::string DescribeBottleneck(std::span<const TierWindow> windows,
                               std::span<const NvmePathConfig> paths, uint32_t lanes);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_TIER_USE_H_
