#include "device/cpu/topology.h"

#include <hwloc.h>

#include <algorithm>
#include <cerrno>
#include <memory>

#include "base/status.h"
#include "device/cpu/affinity.h"

namespace zeroshard {
namespace {

struct Destroy {
  void operator()(hwloc_topology_t topology) const { hwloc_topology_destroy(topology); }
};
using Topology = std::unique_ptr<hwloc_topology, Destroy>;

}  // namespace

absl::StatusOr<std::vector<NumaCores>> ReadTopology() {
  hwloc_topology_t raw = nullptr;
  if (hwloc_topology_init(&raw) != 0) return ErrnoError(errno, "hwloc_topology_init", "machine");
  const Topology topology(raw);
  // Processors and memory are all that is asked for: caches and devices take longer to find.
  hwloc_topology_set_all_types_filter(raw, HWLOC_TYPE_FILTER_KEEP_NONE);
  if (hwloc_topology_load(raw) != 0) return ErrnoError(errno, "hwloc_topology_load", "machine");

  const std::vector<int> allowed = AllowedCpus();
  std::vector<NumaCores> nodes;
  hwloc_obj_t object = nullptr;
  while ((object = hwloc_get_next_obj_by_type(raw, HWLOC_OBJ_NUMANODE, object)) != nullptr) {
    NumaCores node;
    node.os_index = static_cast<int>(object->os_index);
    for (const int cpu : allowed) {
      if (hwloc_bitmap_isset(object->cpuset, static_cast<unsigned>(cpu)) != 0) {
        node.cpus.push_back(cpu);
      }
    }
    const bool again = std::any_of(nodes.begin(), nodes.end(), [&](const NumaCores& other) {
      return other.cpus == node.cpus;  // memory of another kind beside the same processors
    });
    if (!node.cpus.empty() && !again) nodes.push_back(std::move(node));
  }
  if (nodes.empty() && !allowed.empty()) nodes.push_back({.os_index = 0, .cpus = allowed});
  if (nodes.empty()) return absl::UnavailableError("no processor is allowed to this process");
  return nodes;
}

uint32_t NumaNodeOfDevice(std::string_view device, uint32_t nodes) {
  uint32_t number = 0;
  for (const char c : device.substr(std::min(device.size(), device.rfind(':') + 1))) {
    if (c >= '0' && c <= '9') number = (number * 10 + static_cast<uint32_t>(c - '0')) % nodes;
  }
  return number;
}

}  // namespace zeroshard
