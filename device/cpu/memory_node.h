// Where memory lies: NUMA nodes as the kernel numbers them.
#ifndef ZEROSHARD_DEVICE_CPU_MEMORY_NODE_H_
#define ZEROSHARD_DEVICE_CPU_MEMORY_NODE_H_

#include <cstddef>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace zeroshard {

// The node of a processor. NotFound when there is no such processor, or a kernel without NUMA.
absl::StatusOr<int> NodeOfCpu(int cpu);

// Pages of `memory` (which starts at a page) come from `node` from now on, or from others when it
// has none left; those that only this process maps are moved there. A memory file keeps this for
// whoever touches it. OK on a kernel without NUMA when `node` is 0; InvalidArgument when there is
// no such node; PermissionDenied inside of containers that forbid it.
absl::Status PlaceOnNode(std::span<std::byte> memory, int node);

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CPU_MEMORY_NODE_H_
