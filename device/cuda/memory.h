// Device memory that processes share by descriptor, ranges of addresses that memory is put behind
// on demand, and host memory that devices may use.
//
// Physical memory of a DeviceMemory lives as long as any process has it mapped or holds a
// descriptor of it: it survives kill -9 of its maker. What is in it is never cleared by CUDA's
// contract: who creates it zeroes it (CudaStream::Fill) before another may see it. Unmapping does
// not wait for work of the device: destroy or unmap only what no enqueued work touches. Each
// object: one thread at a time. The device outlives all of them.
#ifndef ZEROSHARD_DEVICE_CUDA_MEMORY_H_
#define ZEROSHARD_DEVICE_CUDA_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/shared_memory.h"
#include "base/unique_fd.h"
#include "device/cuda/device.h"

namespace zeroshard {

// One allocation of a device, mapped for it. Movable.
class DeviceMemory {
 public:
  // At least `bytes` (> 0), rounded up to the device's granularity. ResourceExhausted with what was
  // asked for, what is free and the device's total.
  static absl::StatusOr<DeviceMemory> Create(const CudaDevice& device, uint64_t bytes);

  // Maps what another process exported. `fd` stays the caller's and may be closed afterwards;
  // `bytes` is what the maker asked for or its rounded size. FailedPrecondition where the memory is
  // of another device than `device`; InvalidArgument where the descriptor is none of CUDA's or the
  // memory is shorter. Read-only is advisory: a driver that has no such mappings gives a writable
  // one (access()).
  static absl::StatusOr<DeviceMemory> Import(const CudaDevice& device, int fd, uint64_t bytes,
                                             Access access);

  DeviceMemory() = default;
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory& operator=(DeviceMemory&& other) noexcept;
  ~DeviceMemory();

  // A descriptor of the memory, close-on-exec, to be sent to another process; keeps it alive.
  absl::StatusOr<UniqueFd> Export() const;

  // 0 when empty. Other processes have the memory at other addresses.
  DeviceAddress address() const { return address_; }
  // Rounded.
  uint64_t bytes() const { return bytes_; }
  Access access() const { return access_; }

 private:
  DeviceMemory(const CudaDevice& device, CUmemGenericAllocationHandle handle, uint64_t bytes)
      : device_(&device), handle_(handle), bytes_(bytes) {}
  absl::Status Map(Access access);
  void Destroy();

  const CudaDevice* device_ = nullptr;
  CUmemGenericAllocationHandle handle_ = 0;
  uint64_t bytes_ = 0;
  DeviceAddress address_ = 0;
  bool mapped_ = false;
  Access access_ = Access::kReadWrite;
};

struct DeviceRangeOptions {
  // Memory is mapped in pieces of this size, a multiple of the device's granularity; 0: of that.
  uint64_t segment_bytes = 0;
  // How many pieces that were unmapped are kept for the next Map, which then need not be made.
  uint64_t spare_segments = 0;
};

// A range of addresses of this process with memory behind only a part of it. Movable.
class DeviceRange {
 public:
  static absl::StatusOr<DeviceRange> Reserve(const CudaDevice& device, uint64_t bytes,
                                             const DeviceRangeOptions& options = {});
  DeviceRange() = default;
  DeviceRange(DeviceRange&& other) noexcept;
  DeviceRange& operator=(DeviceRange&& other) noexcept;
  // Unmaps everything.
  ~DeviceRange();

  // Puts memory, of undefined content where it is new, behind all segments that [offset, offset +
  // bytes) touches. Maps of ranges that share a segment are counted: it stays until each was undone
  // by one Unmap of the same range. On failure (ResourceExhausted with figures) nothing has
  // changed.
  absl::Status Map(uint64_t offset, uint64_t bytes);
  // Undoes one Map of the same range. The device must be done with it.
  absl::Status Unmap(uint64_t offset, uint64_t bytes);
  // Gives spare segments back to the device.
  void Trim();

  DeviceAddress address() const { return address_; }
  uint64_t bytes() const { return segments_.size() * segment_bytes_; }
  uint64_t segment_bytes() const { return segment_bytes_; }
  // Memory behind the range, and in spare segments.
  uint64_t mapped_bytes() const { return mapped_ * segment_bytes_; }
  uint64_t spare_bytes() const { return spares_.size() * segment_bytes_; }

 private:
  struct Segment {
    CUmemGenericAllocationHandle handle = 0;
    uint32_t maps = 0;
  };
  absl::Status CheckRange(uint64_t offset, uint64_t bytes) const;
  absl::Status MapSegment(uint64_t index);
  absl::Status UnmapSegment(uint64_t index);
  absl::Status Allow(uint64_t begin, uint64_t end);
  void Forget(CUmemGenericAllocationHandle handle);
  void Destroy();

  const CudaDevice* device_ = nullptr;
  DeviceAddress address_ = 0;
  uint64_t segment_bytes_ = 0;
  uint64_t spare_limit_ = 0;
  uint64_t mapped_ = 0;  // segments
  std::vector<Segment> segments_;
  std::vector<CUmemGenericAllocationHandle> spares_;
};

// Host memory (a mapping of a memfd, say) that copies are asynchronous from and to, and that
// kernels and streams can address. Locks its pages. Movable.
class RegisteredHost {
 public:
  // The memory, page-aligned, must stay mapped as long as the object lives; kReadOnly for a mapping
  // that is read-only. AlreadyExists where a part of it is registered; ResourceExhausted with the
  // size where it cannot be locked.
  static absl::StatusOr<RegisteredHost> Register(const CudaDevice& device,
                                                 std::span<std::byte> memory,
                                                 Access access = Access::kReadWrite);
  RegisteredHost() = default;
  RegisteredHost(RegisteredHost&& other) noexcept;
  RegisteredHost& operator=(RegisteredHost&& other) noexcept;
  ~RegisteredHost();

  // Of the first byte, on the device.
  DeviceAddress address() const { return address_; }
  std::span<std::byte> memory() const { return memory_; }

 private:
  RegisteredHost(const CudaDevice& device, std::span<std::byte> memory)
      : device_(&device), memory_(memory) {}
  void Destroy();

  const CudaDevice* device_ = nullptr;
  std::span<std::byte> memory_;
  DeviceAddress address_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CUDA_MEMORY_H_
