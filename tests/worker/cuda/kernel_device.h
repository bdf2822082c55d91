// What runs the kernels in their tests: a device, real or fake, or the kernels as host code.
#ifndef ZEROSHARD_TESTS_WORKER_CUDA_KERNEL_DEVICE_H_
#define ZEROSHARD_TESTS_WORKER_CUDA_KERNEL_DEVICE_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/cuda/kernel_args.h"

namespace zeroshard {

// One thread. Memory is one arena; around all that is put there lie guard bytes.
class KernelDevice {
 public:
  virtual ~KernelDevice() = default;

  // A copy of `bytes` bytes, aligned to 256, until Clear. ResourceExhausted: the arena is full.
  absl::StatusOr<DeviceAddress> Put(const void* data, size_t bytes);
  template <class T>
  absl::StatusOr<DeviceAddress> PutAll(const std::vector<T>& values) {
    return Put(values.data(), values.size() * sizeof(T));
  }
  // After all launches.
  virtual absl::Status Get(DeviceAddress from, void* data, size_t bytes) = 0;
  template <class T>
  absl::Status GetAll(DeviceAddress from, std::vector<T>& values) {
    return Get(from, values.data(), values.size() * sizeof(T));
  }
  // Forgets everything. DataLoss when a guard byte has changed.
  absl::Status Clear();

  virtual absl::Status Update(absl::Span<const UpdateLaunch> launches) = 0;
  virtual absl::Status Sum(const SumLaunch& launch) = 0;
  virtual absl::Status MergePresence(const MergePresenceLaunch& launch) = 0;
  virtual absl::Status Squares(const SquaresLaunch& launch) = 0;
  virtual absl::Status Convert(const ConvertLaunch& launch) = 0;

 protected:
  KernelDevice(DeviceAddress arena, size_t bytes) : arena_(arena), bytes_(bytes) {}
  void SetArena(DeviceAddress arena) { arena_ = arena; }
  virtual absl::Status Write(DeviceAddress to, const void* data, size_t bytes) = 0;

 private:
  struct Extent {
    size_t begin;
    size_t end;
  };

  DeviceAddress arena_;
  size_t bytes_;
  size_t used_ = 0;
  std::vector<Extent> extents_;
};

inline constexpr size_t kKernelArenaBytes = size_t{8} << 20;

// The kernels as host code, on this thread.
std::unique_ptr<KernelDevice> MakeHostKernelDevice();

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_WORKER_CUDA_KERNEL_DEVICE_H_
