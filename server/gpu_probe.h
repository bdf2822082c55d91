// What GPUs this node has: asked of `zeroshard-worker --probe`, because the server itself never
// touches one.
//
// It prints the devices, one line of JSON each (device/cuda/available.h), and on stderr what is
// wrong where none can be used, as "zeroshard-worker: no CUDA device: ...".
#ifndef ZEROSHARD_SERVER_GPU_PROBE_H_
#define ZEROSHARD_SERVER_GPU_PROBE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace zeroshard {

struct Gpu {
  std::string device;  // "cuda:0"
  uint32_t ordinal = 0;
  std::string name;
  std::string uuid;  // 16 bytes
  std::string pci_bus_id;
  std::optional<uint32_t> numa_node;  // where the machine says
  std::string compute_capability;
  uint64_t total_bytes = 0;
  absl::Status usable;  // why it cannot be used
};

// "GPU-9d62dd2b-3b2a-4f0e-8f51-0e2b6c1d7a90" of 16 bytes, and back.
std::string GpuUuidText(std::string_view uuid);
absl::StatusOr<std::string> ParseGpuUuid(std::string_view text);

// What the probe printed, stdout and stderr together. Unavailable when it lists no device, with
// what it says; Internal for what is no probe's output, such as that of a program that died.
absl::StatusOr<std::vector<Gpu>> ParseGpuProbe(std::string_view output);

// Runs the probe; blocks until it has ended. DeadlineExceeded when it takes longer: it is killed.
absl::StatusOr<std::vector<Gpu>> ProbeGpus(const std::string& worker_binary,
                                           absl::Duration timeout);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_GPU_PROBE_H_
