// The names of devices: "cpu:0", "cuda:3". Pure; any thread.
#ifndef ZEROSHARD_SERVER_DEVICES_H_
#define ZEROSHARD_SERVER_DEVICES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace zeroshard {

// kCuda: an NVIDIA GPU, numbered as the daemon's process sees them (CUDA_VISIBLE_DEVICES applied).
enum class DeviceKind : std::uint8_t { kCpu, kCuda };

struct DeviceName {
  DeviceKind kind = DeviceKind::kCpu;
  uint32_t index = 0;
};

// In place of a list: every GPU that can be used. Resolved when the daemon starts.
inline constexpr char kAllGpus[] = "cuda:all";

// "cpu:<number>" or "cuda:<number>"; InvalidArgument for anything else.
absl::StatusOr<DeviceName> ParseDevice(const std::string& text);

// Whether a daemon can have these devices: at least one, none twice, all of one kind, or kAllGpus
// alone. InvalidArgument names the device and what there is.
absl::Status CheckDevices(const std::vector<std::string>& devices);

// The kind of a list that CheckDevices took.
DeviceKind KindOf(const std::vector<std::string>& devices);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_DEVICES_H_
