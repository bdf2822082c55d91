#include "server/devices.h"

#include <algorithm>
#include <optional>
#include <set>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status.h"

namespace zeroshard {
namespace {

constexpr uint32_t kMaxDeviceIndex = 255;

}  // namespace

absl::StatusOr<DeviceName> ParseDevice(const std::string& text) {
  const size_t colon = text.find(':');
  const std::string kind = text.substr(0, colon);
  DeviceName name;
  name.kind = kind == "cuda" ? DeviceKind::kCuda : DeviceKind::kCpu;
  const bool number =
      colon != std::string::npos && absl::SimpleAtoi(text.substr(colon + 1), &name.index);
  if ((kind != "cpu" && kind != "cuda") || !number || name.index > kMaxDeviceIndex ||
      text != absl::StrCat(kind, ":", name.index)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "devices: unknown device \"", text, "\"; expected \"cpu:0\" to \"cpu:", kMaxDeviceIndex,
        "\", or \"cuda:0\" and so on for GPUs, or \"", kAllGpus, "\""));
  }
  return name;
}

absl::Status CheckDevices(const std::vector<std::string>& devices) {
  if (devices.empty()) {
    return absl::InvalidArgumentError("devices: expected at least one, as \"cpu:0\"");
  }
  if (devices.size() == 1 && devices.front() == kAllGpus) return absl::OkStatus();
  std::set<std::string> seen;
  std::optional<DeviceKind> kind;
  for (const std::string& device : devices) {
    if (device == kAllGpus) {
      return absl::InvalidArgumentError(absl::StrCat(
          "devices: \"", kAllGpus, "\" means every GPU; name no other device beside it"));
    }
    ZS_ASSIGN_OR_RETURN(const DeviceName name, ParseDevice(device));
    if (!seen.insert(device).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("devices: \"", device, "\" is named twice; give each worker its own"));
    }
    if (kind.value_or(name.kind) != name.kind) {
      return absl::InvalidArgumentError(
          absl::StrCat("devices: \"", devices.front(), "\" and \"", device,
                       "\" are of two kinds; a daemon works on GPUs or on the host, so run two"));
    }
    kind = name.kind;
  }
  return absl::OkStatus();
}

DeviceKind KindOf(const std::vector<std::string>& devices) {
  const bool cuda = std::any_of(devices.begin(), devices.end(), [](const std::string& device) {
    return device.rfind("cuda:", 0) == 0;
  });
  return cuda ? DeviceKind::kCuda : DeviceKind::kCpu;
}

}  // namespace zeroshard
