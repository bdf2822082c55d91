// Where a GPU is plugged in: its NUMA node and processors, and the network cards nearest to it,
// read from sysfs by the PCI address. No CUDA in here. Any thread.
#ifndef ZEROSHARD_DEVICE_CUDA_TOPOLOGY_H_
#define ZEROSHARD_DEVICE_CUDA_TOPOLOGY_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace zeroshard {

// What lies between two PCI devices, nearest first. nvidia-smi topo's words: PIX/PXB, PHB, NODE,
// SYS.
enum class PciDistance : uint8_t {
  kSwitch,  // only PCIe switches
  kBridge,  // one host bridge: through the processor, but no other one
  kNode,    // host bridges of one NUMA node
  kSystem,  // the link between processors
};

// "switch", "bridge", "node", "system".
std::string_view PciDistanceName(PciDistance distance);

struct Nic {
  std::string name;        // of the RDMA device ("mlx5_0"), else of the interface ("eth0")
  std::string interface;   // of the network interface; empty without one
  std::string pci_bus_id;  // "0000:1b:00.0"
  int numa_node = -1;
  bool rdma = false;
  bool active = false;  // some port is up
  PciDistance distance = PciDistance::kSystem;
};

struct GpuPlace {
  std::string pci_bus_id;  // "0000:19:00.0"
  int numa_node = -1;      // -1: the machine does not say, as with one node
  std::vector<int> cpus;   // near ones; empty: unknown
  std::vector<Nic> nics;   // physical ones; nearest first, active before inactive, then by name
};

// The place of the PCI device `pci_bus_id` ("0000:19:00.0", in either case, the domain with four or
// eight digits as CUDA writes it). `sysfs` is the file system's root, "/sys". NotFound where sysfs
// has no such device, as in a container that hides it; InvalidArgument for no PCI address.
absl::StatusOr<GpuPlace> ReadGpuPlace(std::string_view pci_bus_id,
                                      const std::string& sysfs = "/sys");

// "0000:19:00.0" from what CUDA or people write ("00000000:19:00.0", "19:00.0", upper case).
absl::StatusOr<std::string> NormalPciBusId(std::string_view text);

// "0-3,8" to {0, 1, 2, 3, 8}, and back. InvalidArgument for anything else, or over 64 Ki
// processors.
absl::StatusOr<std::vector<int>> ParseCpuList(std::string_view text);
std::string CpuListText(const std::vector<int>& cpus);

// The distance of two devices by their paths below sysfs' devices/ ("pci0000:15/0000:15:01.0/...").
PciDistance DistanceOf(std::string_view path, int node, std::string_view other, int other_node);

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CUDA_TOPOLOGY_H_
