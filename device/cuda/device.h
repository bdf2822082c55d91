// CudaDevice: one GPU as this process uses it, by the primary context, which PyTorch in the same
// process shares.
//
// Owned by whoever opened it; outlives all streams, events and memory made from it. Any thread: all
// calls of device/cuda make the context current for themselves and put back what was current, so no
// caller's choice of device changes. After a device was lost (IsDeviceLost) every call fails; what
// is left is to destroy the objects and end the process, or go on without the device.
#ifndef ZEROSHARD_DEVICE_CUDA_DEVICE_H_
#define ZEROSHARD_DEVICE_CUDA_DEVICE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "device/cuda/driver.h"

namespace zeroshard {

using DeviceUuid = std::array<uint8_t, 16>;

// "GPU-9d62dd2b-3b2a-..." as nvidia-smi writes it.
std::string UuidText(const DeviceUuid& uuid);

struct ComputeCapability {
  int major = 0;
  int minor = 0;
  friend auto operator<=>(const ComputeCapability&, const ComputeCapability&) = default;
};

// The oldest that the kernels are made for, and the newest major number that this build knows.
inline constexpr ComputeCapability kOldestComputeCapability = {8, 0};
inline constexpr int kNewestKnownMajor = 12;

// OK, or FailedPrecondition that names what was found and what is needed. `device` is "cuda:0".
absl::Status CheckComputeCapability(ComputeCapability found, std::string_view device);

// Whether the driver's name is that of a slice of a GPU ("NVIDIA A100-SXM4-40GB MIG 1g.5gb").
bool IsMigSlice(std::string_view name);

// 1 from "cuda:1". InvalidArgument for anything else.
absl::StatusOr<int> CudaOrdinal(std::string_view name);

// NotFound: this process sees `count` devices, and none of that number.
absl::Status NoSuchDevice(int ordinal, size_t count);

struct DeviceMemoryInfo {
  uint64_t free = 0;
  uint64_t total = 0;
};

// What the driver says of a device; asking makes no context on it.
struct CudaDeviceInfo {
  int ordinal = 0;
  std::string name;
  DeviceUuid uuid = {};
  std::string pci_bus_id;  // "0000:19:00.0", lower case, as in sysfs
  ComputeCapability compute_capability;
  uint64_t total_memory = 0;
  absl::Status usable;  // why Open would refuse it
};

// All devices that this process sees (CUDA_VISIBLE_DEVICES renumbers them). Unavailable where there
// are none.
absl::StatusOr<std::vector<CudaDeviceInfo>> ListCudaDevices();

class CudaDevice {
 public:
  // Retains the primary context of device `ordinal`. NotFound where there are fewer devices;
  // FailedPrecondition where the device is not supported: its compute capability, a MIG slice, no
  // memory that processes can share, no 64-bit waits of streams, compute mode "prohibited".
  static absl::StatusOr<std::unique_ptr<CudaDevice>> Open(int ordinal);
  ~CudaDevice();
  CudaDevice(const CudaDevice&) = delete;
  CudaDevice& operator=(const CudaDevice&) = delete;

  int ordinal() const { return info_.ordinal; }
  std::string label() const;  // "cuda:0"
  const std::string& name() const { return info_.name; }
  const DeviceUuid& uuid() const { return info_.uuid; }
  const std::string& pci_bus_id() const { return info_.pci_bus_id; }
  ComputeCapability compute_capability() const { return info_.compute_capability; }
  uint64_t total_memory() const { return info_.total_memory; }
  int multiprocessors() const { return multiprocessors_; }
  // Sizes of shareable memory are multiples of this; usually 2 MiB.
  size_t granularity() const { return granularity_; }
  const CudaDriver& driver() const { return driver_; }
  CUdevice handle() const { return handle_; }
  CUcontext context() const { return context_; }

  // Makes the context current for the calling thread, for good; for threads of our own. See
  // CurrentDevice for threads of others.
  absl::Status MakeCurrent() const;

  // Of the device, thus of all processes.
  absl::StatusOr<DeviceMemoryInfo> Memory() const;

  // What memory of this device that processes share is made with.
  CUmemAllocationProp SharedMemoryProperties() const;

  // An error of a call on this device: CudaStatus with the label in front, and with what is free
  // and what was asked for (`bytes`) where memory ran out.
  absl::Status Error(CUresult result, std::string_view what, uint64_t bytes = 0) const;

 private:
  CudaDevice(const CudaDriver& driver, CudaDeviceInfo info) : driver_(driver), info_(info) {}
  absl::Status Retain();

  // Constant after Open.
  const CudaDriver& driver_;
  const CudaDeviceInfo info_;
  CUdevice handle_ = 0;
  CUcontext context_ = nullptr;
  size_t granularity_ = 0;
  int multiprocessors_ = 0;
  bool rdma_ = false;
};

// Makes a device current for the calling thread as long as the object lives.
class [[nodiscard]] CurrentDevice {
 public:
  explicit CurrentDevice(const CudaDevice& device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  const absl::Status& status() const { return status_; }

 private:
  const CudaDevice& device_;
  absl::Status status_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CUDA_DEVICE_H_
