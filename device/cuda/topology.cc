#include "device/cuda/topology.h"

#include <dirent.h>
#include <limits.h>
#include <stdlib.h>

#include <algorithm>
#include <cctype>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status.h"
#include "base/strings.h"

namespace zeroshard {
namespace {

constexpr int kMaxCpus = 1 << 16;

// The first line without its end; empty where the file is not there or empty.
std::string ReadLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

int ReadNode(const std::string& device) {
  int node = -1;
  if (!absl::SimpleAtoi(ReadLine(device + "/numa_node"), &node)) return -1;
  return node;
}

std::vector<std::string> Names(const std::string& directory) {
  std::vector<std::string> names;
  const std::unique_ptr<DIR, int (*)(DIR*)> open(opendir(directory.c_str()), &closedir);
  if (open == nullptr) return names;
  while (const dirent* entry = readdir(open.get())) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::optional<std::string> Resolve(const std::string& path) {
  char resolved[PATH_MAX];
  if (realpath(path.c_str(), resolved) == nullptr) return std::nullopt;
  return std::string(resolved);
}

// What comes after ".../devices/" of a resolved path.
std::string BelowDevices(const std::string& resolved) {
  const size_t at = resolved.rfind("/devices/");
  return at == std::string::npos ? resolved : resolved.substr(at + sizeof("/devices/") - 1);
}

bool IsPciDevice(const std::string& name) {
  const absl::StatusOr<std::string> normal = NormalPciBusId(name);
  return normal.ok() && *normal == name;
}

// A PCI device of sysfs that has network functions.
struct NicFiles {
  std::string directory;  // resolved
  std::string rdma;       // "mlx5_0", empty without
  std::string interface;  // "eth0", empty without
};

// By PCI address; a card is found as RDMA device, as network interface, or as both.
std::map<std::string, NicFiles> FindNics(const std::string& sysfs) {
  std::map<std::string, NicFiles> found;
  const auto add = [&](const std::string& kind, std::string NicFiles::*name) {
    const std::string directory = absl::StrCat(sysfs, "/class/", kind);
    for (const std::string& entry : Names(directory)) {
      const std::optional<std::string> device =
          Resolve(absl::StrCat(directory, "/", entry, "/device"));
      if (!device.has_value()) continue;  // a virtual interface
      const std::string pci = device->substr(device->rfind('/') + 1);
      if (!IsPciDevice(pci)) continue;
      NicFiles& files = found[pci];
      files.directory = *device;
      if ((files.*name).empty()) files.*name = entry;
    }
  };
  add("infiniband", &NicFiles::rdma);
  add("net", &NicFiles::interface);
  return found;
}

bool AnyPortActive(const std::string& sysfs, const NicFiles& files) {
  if (files.rdma.empty()) {
    return ReadLine(absl::StrCat(sysfs, "/class/net/", files.interface, "/operstate")) == "up";
  }
  const std::string ports = absl::StrCat(sysfs, "/class/infiniband/", files.rdma, "/ports");
  for (const std::string& port : Names(ports)) {
    // "4: ACTIVE"
    if (ReadLine(absl::StrCat(ports, "/", port, "/state")).rfind("4:", 0) == 0) return true;
  }
  return false;
}

std::vector<Nic> NicsNear(const std::string& sysfs, const std::string& path, int node) {
  std::vector<Nic> nics;
  for (const auto& [pci, files] : FindNics(sysfs)) {
    Nic nic;
    nic.rdma = !files.rdma.empty();
    nic.name = nic.rdma ? files.rdma : files.interface;
    nic.interface = files.interface;
    nic.pci_bus_id = pci;
    nic.numa_node = ReadNode(files.directory);
    nic.active = AnyPortActive(sysfs, files);
    nic.distance = DistanceOf(path, node, BelowDevices(files.directory), nic.numa_node);
    nics.push_back(std::move(nic));
  }
  std::stable_sort(nics.begin(), nics.end(), [](const Nic& a, const Nic& b) {
    return std::make_tuple(a.distance, !a.active, !a.rdma, a.name) <
           std::make_tuple(b.distance, !b.active, !b.rdma, b.name);
  });
  return nics;
}

}  // namespace

std::string_view PciDistanceName(PciDistance distance) {
  switch (distance) {
    case PciDistance::kSwitch:
      return "switch";
    case PciDistance::kBridge:
      return "bridge";
    case PciDistance::kNode:
      return "node";
    case PciDistance::kSystem:
      break;
  }
  return "system";
}

absl::StatusOr<std::string> NormalPciBusId(std::string_view text) {
  const absl::Status wrong = absl::InvalidArgumentError(
      absl::StrCat("\"", Abs(text), "\" is no PCI address; expected one as 0000:19:00.0"));
  const std::vector<std::string> parts = absl::StrSplit(Abs(text), absl::ByAnyChar(":."));
  if (parts.size() != 3 && parts.size() != 4) return wrong;
  std::vector<uint32_t> numbers;
  for (const std::string& part : parts) {
    uint32_t number = 0;
    if (part.empty() || part.size() > 8 ||
        !std::all_of(part.begin(), part.end(), [](unsigned char c) { return isxdigit(c) != 0; }) ||
        !absl::SimpleHexAtoi(part, &number)) {
      return wrong;
    }
    numbers.push_back(number);
  }
  if (numbers.size() == 3) numbers.insert(numbers.begin(), 0);
  if (numbers[1] > 0xff || numbers[2] > 0x1f || numbers[3] > 7) return wrong;
  return absl::StrFormat("%04x:%02x:%02x.%x", numbers[0], numbers[1], numbers[2], numbers[3]);
}

absl::StatusOr<std::vector<int>> ParseCpuList(std::string_view text) {
  const std::string trimmed(absl::StripAsciiWhitespace(Abs(text)));
  std::vector<int> cpus;
  if (trimmed.empty()) return cpus;
  for (const std::string& part : std::vector<std::string>(absl::StrSplit(trimmed, ','))) {
    const std::vector<std::string> ends = absl::StrSplit(part, '-');
    int first = 0;
    int last = 0;
    if (ends.size() > 2 || !absl::SimpleAtoi(ends.front(), &first) ||
        !absl::SimpleAtoi(ends.back(), &last) || first < 0 || last < first || last >= kMaxCpus) {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", trimmed, "\" is no list of processors; expected one as 0-3,8"));
    }
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
  }
  std::sort(cpus.begin(), cpus.end());
  cpus.erase(std::unique(cpus.begin(), cpus.end()), cpus.end());
  return cpus;
}

std::string CpuListText(const std::vector<int>& cpus) {
  std::string text;
  for (size_t begin = 0; begin < cpus.size();) {
    size_t end = begin + 1;
    while (end < cpus.size() && cpus[end] == cpus[end - 1] + 1) ++end;
    absl::StrAppend(&text, text.empty() ? "" : ",", cpus[begin]);
    if (end - begin > 1) absl::StrAppend(&text, "-", cpus[end - 1]);
    begin = end;
  }
  return text;
}

PciDistance DistanceOf(std::string_view path, int node, std::string_view other, int other_node) {
  const std::vector<std::string> a = absl::StrSplit(Abs(path), '/');
  const std::vector<std::string> b = absl::StrSplit(Abs(other), '/');
  size_t common = 0;
  while (common < a.size() && common < b.size() && a[common] == b[common]) ++common;
  // The first is the host bridge ("pci0000:15"), the second its root port.
  if (common >= 2) return PciDistance::kSwitch;
  if (common == 1) return PciDistance::kBridge;
  if (node >= 0 && node == other_node) return PciDistance::kNode;
  return PciDistance::kSystem;
}

absl::StatusOr<GpuPlace> ReadGpuPlace(std::string_view pci_bus_id, const std::string& sysfs) {
  GpuPlace place;
  ZS_ASSIGN_OR_RETURN(place.pci_bus_id, NormalPciBusId(pci_bus_id));
  const std::string link = absl::StrCat(sysfs, "/bus/pci/devices/", place.pci_bus_id);
  const std::optional<std::string> directory = Resolve(link);
  if (!directory.has_value()) {
    return absl::NotFoundError(
        absl::StrCat("no PCI device ", link, ": this container or machine does not show it"));
  }
  place.numa_node = ReadNode(*directory);
  ZS_ASSIGN_OR_RETURN(place.cpus, ParseCpuList(ReadLine(*directory + "/local_cpulist")));
  place.nics = NicsNear(sysfs, BelowDevices(*directory), place.numa_node);
  return place;
}

}  // namespace zeroshard
