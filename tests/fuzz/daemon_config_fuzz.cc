// sources: server/daemon_config.cc base/config.cc base/yaml_node.cc base/status.cc base/log.cc
// sources: server/devices.cc base/unique_fd.cc base/fault_point.cc server/cluster_config.cc
// sources: server/tier_config.cc server/nvme_paths.cc storage/io_backend_name.cc
// libs: absl_status absl_statusor absl_strings absl_str_format absl_synchronization absl_time
// libs: yaml-cpp spdlog
// seeds: tests/fuzz/seeds/daemon_config

// Any bytes as the daemon's configuration file: no crash and no exception; what is taken is within
// its bounds, and its own text is taken again.

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/config.h"
#include "base/unique_fd.h"
#include "server/daemon_config.h"

namespace zeroshard {
namespace {

void Require(bool condition) {
  if (!condition) std::abort();
}

// LoadDaemonConfig of a file that holds `text`.
absl::StatusOr<DaemonConfig> Load(const void* text, size_t bytes) {
  const UniqueFd file(::memfd_create("config", MFD_CLOEXEC));
  Require(::write(file.get(), text, bytes) == static_cast<ssize_t>(bytes));
  DaemonFlags flags;
  flags.config_file = "/proc/self/fd/" + std::to_string(file.get());
  return LoadDaemonConfig(flags);
}

void CheckTaken(const DaemonConfig& config) {
  Require(config.run_dir.starts_with('/') && config.state_dir.starts_with('/'));
  Require(config.attach_timeout > absl::ZeroDuration());
  Require(CheckDevices(config.devices).ok());
  Require(CheckNvmePaths(config.tiers.nvme_paths).ok());
  for (const NvmePathConfig& path : config.tiers.nvme_paths) {
    Require(*NormaliseNvmePath(path.path) == path.path);
    Require(PathsOfJob(path.path, config.tiers.nvme_paths, PathRight::kListed).ok());
  }
  const std::string text = DaemonConfigText(config);
  const absl::StatusOr<DaemonConfig> again = Load(text.data(), text.size());
  Require(again.ok());
  Require(DaemonConfigText(*again) == text);
}

// Every getter on the first keys of any mapping.
void ReadEverything(const YamlNode& node, int depth) {
  for (const std::string& key : node.Keys()) {
    static_cast<void>(node.String(key, "").ok());
    static_cast<void>(node.Int(key, 0).ok());
    static_cast<void>(node.Double(key, 0).ok());
    static_cast<void>(node.Bool(key, false).ok());
    static_cast<void>(node.Bytes(key, 0).ok());
    static_cast<void>(node.Duration(key, absl::ZeroDuration()).ok());
    static_cast<void>(node.Strings(key).ok());
    if (depth == 0) continue;
    if (const auto child = node.Child(key); child.ok()) ReadEverything(*child, depth - 1);
    for (const char* shorthand : {"", "path"}) {
      const auto children = node.Children(key, shorthand);
      if (!children.ok()) continue;
      for (const YamlNode& child : *children) ReadEverything(child, depth - 1);
    }
  }
}

}  // namespace
}  // namespace zeroshard

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  if (const auto config = zeroshard::Load(data, size); config.ok()) {
    zeroshard::CheckTaken(*config);
  }
  if (const auto node = zeroshard::YamlNode::Parse(text, "fuzz.yaml"); node.ok()) {
    zeroshard::ReadEverything(*node, 2);
    static_cast<void>(node->Finish().ok());
  }
  static_cast<void>(zeroshard::ParseByteSize(text).ok());
  if (const auto path = zeroshard::ParseNvmePath(text); path.ok()) {
    zeroshard::Require(zeroshard::CheckNvmePaths({&*path, 1}).ok());
  }
  return 0;
}
