// NodeMemory: how much memory this node, or the control group that the daemon lives in, can still
// give.

#ifndef ZEROSHARD_SERVER_NODE_MEMORY_H_
#define ZEROSHARD_SERVER_NODE_MEMORY_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/planner.h"

namespace zeroshard {

struct NodeMemory {
  uint64_t total = 0;
  uint64_t available = 0;
  std::string source;  // what bounds it: "MemAvailable" or "memory.max of the control group"
};

// Reads /proc/meminfo and the control group's memory.max and memory.current, below `root` ("/"
// outside tests).
absl::StatusOr<NodeMemory> ReadNodeMemory(const std::string& root = "/");

// OK when `plan` fits beside what other jobs hold. ResourceExhausted with the sum by kind of state.
// `limit`: host_memory_limit of the daemon for all jobs together, 0 for none. `held`: bytes of the
// regions of other jobs; `untouched`: those of them that are not yet backed by memory.
struct MemoryInUse {
  uint64_t held = 0;
  uint64_t untouched = 0;
};
absl::Status CheckMemory(const std::string& job, const JobPlan& plan, const NodeMemory& node,
                         uint64_t limit, const MemoryInUse& in_use);

// The same for a job that runs, of which `touched` bytes are in use, and that is to become `next`.
struct MemoryGrowth {
  const JobPlan* plan = nullptr;
  const JobPlan* next = nullptr;
  uint64_t touched = 0;
};
absl::Status CheckGrowth(const std::string& job, const MemoryGrowth& growth, const NodeMemory& node,
                         uint64_t limit, const MemoryInUse& in_use);

// "1.50 GiB".
std::string HumanBytes(uint64_t bytes);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_NODE_MEMORY_H_
