#include "device/cuda/available.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "base/strings.h"
#include "device/cuda/device.h"
#include "device/cuda/topology.h"

namespace zeroshard {
namespace {

std::string Quoted(std::string_view text) {
  std::string quoted = "\"";
  for (const char letter : text) {
    if (letter == '"' || letter == '\\') quoted += '\\';
    quoted += static_cast<unsigned char>(letter) < 0x20 ? ' ' : letter;
  }
  return quoted + "\"";
}

std::string NicText(const Nic& nic) {
  return absl::StrCat("{\"name\":", Quoted(nic.name), ",\"interface\":", Quoted(nic.interface),
                      ",\"pci\":", Quoted(nic.pci_bus_id), ",\"numa_node\":", nic.numa_node,
                      ",\"distance\":", Quoted(PciDistanceName(nic.distance)),
                      ",\"rdma\":", nic.rdma ? "true" : "false",
                      ",\"active\":", nic.active ? "true" : "false", "}");
}

// One line without its end.
std::string DeviceText(const CudaDeviceInfo& info) {
  const GpuPlace place = ReadGpuPlace(info.pci_bus_id).value_or(GpuPlace());
  const std::string nics = absl::StrJoin(
      place.nics, ",", [](std::string* out, const Nic& nic) { *out += NicText(nic); });
  return absl::StrCat("{\"device\":\"cuda:", info.ordinal, "\",\"name\":", Quoted(info.name),
                      ",\"uuid\":", Quoted(UuidText(info.uuid)),
                      ",\"pci\":", Quoted(info.pci_bus_id), ",\"compute_capability\":\"",
                      info.compute_capability.major, ".", info.compute_capability.minor,
                      "\",\"memory_bytes\":", info.total_memory, ",\"numa_node\":", place.numa_node,
                      ",\"cpus\":", Quoted(CpuListText(place.cpus)), ",\"nics\":[", nics,
                      "],\"usable\":", info.usable.ok() ? "true" : "false",
                      ",\"problem\":", Quoted(Std(info.usable.message())), "}");
}

}  // namespace

absl::Status CheckCudaUsable() {
  ZS_ASSIGN_OR_RETURN(const std::vector<CudaDeviceInfo> devices, ListCudaDevices());
  for (const CudaDeviceInfo& device : devices) {
    if (device.usable.ok()) return absl::OkStatus();
  }
  return Annotate(devices.front().usable, "no CUDA device");
}

absl::Status CheckCudaDevice(std::string_view name) {
  ZS_ASSIGN_OR_RETURN(const int ordinal, CudaOrdinal(name));
  ZS_ASSIGN_OR_RETURN(const std::vector<CudaDeviceInfo> devices, ListCudaDevices());
  if (static_cast<size_t>(ordinal) >= devices.size()) return NoSuchDevice(ordinal, devices.size());
  return devices[static_cast<size_t>(ordinal)].usable;
}

absl::StatusOr<std::string> DescribeCudaDevices() {
  ZS_ASSIGN_OR_RETURN(const std::vector<CudaDeviceInfo> devices, ListCudaDevices());
  std::string text;
  for (const CudaDeviceInfo& device : devices) absl::StrAppend(&text, DeviceText(device), "\n");
  return text;
}

}  // namespace zeroshard
