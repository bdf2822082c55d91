#include "server/node_cores.h"

#include <algorithm>
#include <limits>

#include "base/status.h"
#include "device/cpu/topology.h"

namespace zeroshard {

absl::StatusOr<std::unique_ptr<NodeCores>> NodeCores::Create() {
  ZS_ASSIGN_OR_RETURN(const std::vector<NumaCores> nodes, ReadTopology());
  ZS_ASSIGN_OR_RETURN(UniqueFd fd, CreateSealedMemfd("zeroshard:cores", CoreBudget::Bytes()));
  ZS_ASSIGN_OR_RETURN(MappedRegion memory,
                      MappedRegion::Map(fd.get(), CoreBudget::Bytes(), Access::kReadWrite));
  ZS_ASSIGN_OR_RETURN(const CoreBudget budget, CoreBudget::Format(memory.bytes(), nodes));
  return std::unique_ptr<NodeCores>(new NodeCores(std::move(fd), std::move(memory), budget));
}

absl::StatusOr<CoreHolder> NodeCores::Add(std::string_view device) const {
  ZS_ASSIGN_OR_RETURN(const uint32_t number,
                      budget_.AddHolder(NumaNodeOfDevice(device, budget_.nodes())));
  return CoreHolder({.budget = budget_, .holder = number});
}

internal::v1::WorkerRegion NodeCores::Describe(const CoreHolder& holder) const {
  internal::v1::WorkerRegion region;
  region.set_kind(internal::v1::WorkerRegion::KIND_CORE_BUDGET);
  region.set_index(holder.number());
  region.set_bytes(CoreBudget::Bytes());
  return region;
}

uint32_t NodeCores::LanesFor(const std::vector<std::string>& devices) const {
  std::vector<uint32_t> on_node(budget_.nodes());
  for (const std::string& device : devices) ++on_node[NumaNodeOfDevice(device, budget_.nodes())];
  uint32_t lanes = std::numeric_limits<uint32_t>::max();
  for (uint32_t node = 0; node < budget_.nodes(); ++node) {
    if (on_node[node] == 0) continue;
    lanes = std::min(lanes, budget_.usage(node).cores / on_node[node]);
  }
  return std::max<uint32_t>(1, lanes);
}

}  // namespace zeroshard
