// The cores of this machine by NUMA node, as hwloc finds them.
#ifndef ZEROSHARD_DEVICE_CPU_TOPOLOGY_H_
#define ZEROSHARD_DEVICE_CPU_TOPOLOGY_H_

#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "device/cpu/numa_cores.h"

namespace zeroshard {

// The NUMA nodes that have at least one such processor, in hwloc's order; at least one node. Takes
// milliseconds. Unavailable when the machine cannot be read.
absl::StatusOr<std::vector<NumaCores>> ReadTopology();

// The NUMA node, by its place among `nodes`, of a device "cpu:N": N where there are that many, else
// N modulo their number.
uint32_t NumaNodeOfDevice(std::string_view device, uint32_t nodes);

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CPU_TOPOLOGY_H_
