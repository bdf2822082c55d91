// Whether CUDA can be used here, and what devices there are, for programs that must say so in
// words: the seam that every build has. No CUDA header behind this one.
//
// A build without the CUDA Toolkit answers FailedPrecondition "this build has no CUDA: ...". Any
// thread; nothing is kept: each call asks the driver, and no context is made on any device.
#ifndef ZEROSHARD_DEVICE_CUDA_AVAILABLE_H_
#define ZEROSHARD_DEVICE_CUDA_AVAILABLE_H_

#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace zeroshard {

// OK when at least one device can be used. Else an error that begins with "no CUDA device: " and
// ends with what to do: Unavailable (no driver, no device), FailedPrecondition (a driver too old,
// a build without CUDA, no device of a kind that is supported).
absl::Status CheckCudaUsable();

// OK when the device of this name ("cuda:1") can be used; else as CheckCudaUsable, NotFound where
// there are fewer, InvalidArgument for a name of no CUDA device.
absl::Status CheckCudaDevice(std::string_view name);

// The devices, one line of JSON each:
//   {"device":"cuda:0","name":"...","uuid":"GPU-...","pci":"0000:19:00.0","compute_capability":"9.0",
//    "memory_bytes":N,"numa_node":0,"cpus":"0-31","nics":[{"name":"mlx5_0","interface":"ib0",
//    "pci":"...","numa_node":0,"distance":"switch","rdma":true,"active":true}],
//    "usable":true,"problem":""}
// An error only where CheckCudaUsable has one because of the driver or because there is no device;
// a device that cannot be used is listed with its problem.
absl::StatusOr<std::string> DescribeCudaDevices();

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CUDA_AVAILABLE_H_
