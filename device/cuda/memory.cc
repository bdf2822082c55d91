#include "device/cuda/memory.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "device/cuda/mapping.h"

namespace zeroshard {
namespace {

// For what may only be released with a context of the device; errors of a device that is lost say
// nothing new.
template <typename Release>
void ReleaseOn(const CudaDevice& device, Release release) {
  const CurrentDevice current(device);
  release(device.driver());
}

absl::Status NotOurs(const CudaDevice& device, CUresult result, std::string_view what) {
  absl::Status status = device.Error(result, what);
  if (result != CUDA_ERROR_INVALID_VALUE && result != CUDA_ERROR_INVALID_HANDLE &&
      result != CUDA_ERROR_OPERATING_SYSTEM) {
    return status;
  }
  return absl::InvalidArgumentError(status.message());
}

// The maker's device, as this process numbers it, must be `device`.
absl::Status CheckPlace(const CudaDevice& device, CUmemGenericAllocationHandle handle) {
  CUmemAllocationProp properties = {};
  ZS_RETURN_IF_ERROR(
      device.Error(device.driver().MemGetAllocationPropertiesFromHandle(&properties, handle),
                   "cuMemGetAllocationPropertiesFromHandle"));
  if (properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
      properties.location.id == device.handle()) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat("the shared memory lies on cuda:", properties.location.id,
                   ", but this process uses ", device.label(), " (", UuidText(device.uuid()),
                   "): a trainer must run on the GPU of its worker"));
}

}  // namespace

absl::StatusOr<DeviceMemory> DeviceMemory::Create(const CudaDevice& device, uint64_t bytes) {
  if (bytes == 0) return absl::InvalidArgumentError("device memory of no bytes");
  const CurrentDevice current(device);
  ZS_RETURN_IF_ERROR(current.status());
  const uint64_t size = RoundUpTo(bytes, device.granularity());
  const CUmemAllocationProp properties = device.SharedMemoryProperties();
  CUmemGenericAllocationHandle handle = 0;
  ZS_RETURN_IF_ERROR(
      device.Error(device.driver().MemCreate(&handle, size, &properties, 0), "cuMemCreate", size));
  DeviceMemory memory(device, handle, size);
  ZS_RETURN_IF_ERROR(memory.Map(Access::kReadWrite));
  return memory;
}

absl::StatusOr<DeviceMemory> DeviceMemory::Import(const CudaDevice& device, int fd, uint64_t bytes,
                                                  Access access) {
  if (fd < 0 || bytes == 0) {
    return absl::InvalidArgumentError(
        "import of device memory without a descriptor or of no bytes");
  }
  const CurrentDevice current(device);
  ZS_RETURN_IF_ERROR(current.status());
  CUmemGenericAllocationHandle handle = 0;
  const CUresult result = device.driver().MemImportFromShareableHandle(
      &handle, reinterpret_cast<void*>(static_cast<uintptr_t>(fd)),
      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (result != CUDA_SUCCESS) {
    return NotOurs(device, result, "importing a descriptor of device memory");
  }
  DeviceMemory memory(device, handle, RoundUpTo(bytes, device.granularity()));
  ZS_RETURN_IF_ERROR(CheckPlace(device, handle));
  ZS_RETURN_IF_ERROR(memory.Map(access));
  return memory;
}

absl::Status DeviceMemory::Map(Access access) {
  const CudaDriver& driver = device_->driver();
  CUdeviceptr address = 0;
  ZS_RETURN_IF_ERROR(device_->Error(driver.MemAddressReserve(&address, bytes_, 0, 0, 0),
                                    "cuMemAddressReserve", bytes_));
  address_ = address;
  const CUresult result = driver.MemMap(address_, bytes_, 0, handle_, 0);
  if (result != CUDA_SUCCESS) {
    return NotOurs(*device_, result, absl::StrCat("mapping ", bytes_, " bytes of device memory"));
  }
  mapped_ = true;
  ZS_ASSIGN_OR_RETURN(access_, AllowAccess(*device_, address_, bytes_, access));
  return absl::OkStatus();
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }

DeviceMemory& DeviceMemory::operator=(DeviceMemory&& other) noexcept {
  if (this == &other) return *this;
  Destroy();
  device_ = std::exchange(other.device_, nullptr);
  handle_ = std::exchange(other.handle_, 0);
  bytes_ = std::exchange(other.bytes_, 0);
  address_ = std::exchange(other.address_, 0);
  mapped_ = std::exchange(other.mapped_, false);
  access_ = other.access_;
  return *this;
}

DeviceMemory::~DeviceMemory() { Destroy(); }

void DeviceMemory::Destroy() {
  if (device_ == nullptr) return;
  ReleaseOn(*device_, [this](const CudaDriver& driver) {
    if (mapped_) driver.MemUnmap(address_, bytes_);
    if (address_ != 0) driver.MemAddressFree(address_, bytes_);
    driver.MemRelease(handle_);
  });
  device_ = nullptr;
  mapped_ = false;
  address_ = 0;
  bytes_ = 0;
}

absl::StatusOr<UniqueFd> DeviceMemory::Export() const {
  if (device_ == nullptr) return absl::FailedPreconditionError("export of no device memory");
  const CurrentDevice current(*device_);
  ZS_RETURN_IF_ERROR(current.status());
  int fd = -1;
  ZS_RETURN_IF_ERROR(device_->Error(device_->driver().MemExportToShareableHandle(
                                        &fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                                    "cuMemExportToShareableHandle", bytes_));
  UniqueFd exported(fd);
  // The driver does not promise that children of exec do not get it.
  if (fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) {
    return ErrnoError(errno, "fcntl", "a descriptor of device memory");
  }
  return exported;
}

absl::StatusOr<RegisteredHost> RegisteredHost::Register(const CudaDevice& device,
                                                        std::span<std::byte> memory,
                                                        Access access) {
  if (memory.empty()) return absl::InvalidArgumentError("registration of no host memory");
  const CurrentDevice current(device);
  ZS_RETURN_IF_ERROR(current.status());
  unsigned flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
  if (access == Access::kReadOnly) flags |= CU_MEMHOSTREGISTER_READ_ONLY;
  const CUresult result = device.driver().MemHostRegister(memory.data(), memory.size(), flags);
  if (result != CUDA_SUCCESS) {
    // Not Error(): what is free on the device has nothing to do with it.
    return CudaStatus(result, absl::StrCat(device.label(), ": cuMemHostRegister, which locks ",
                                           memory.size() >> 20, " MiB (", memory.size(),
                                           " bytes) of host memory"));
  }
  RegisteredHost registered(device, memory);
  CUdeviceptr address = 0;
  ZS_RETURN_IF_ERROR(
      device.Error(device.driver().MemHostGetDevicePointer(&address, memory.data(), 0),
                   "cuMemHostGetDevicePointer"));
  registered.address_ = address;
  return registered;
}

RegisteredHost::RegisteredHost(RegisteredHost&& other) noexcept { *this = std::move(other); }

RegisteredHost& RegisteredHost::operator=(RegisteredHost&& other) noexcept {
  if (this == &other) return *this;
  Destroy();
  device_ = std::exchange(other.device_, nullptr);
  memory_ = std::exchange(other.memory_, {});
  address_ = std::exchange(other.address_, 0);
  return *this;
}

RegisteredHost::~RegisteredHost() { Destroy(); }

void RegisteredHost::Destroy() {
  if (device_ == nullptr) return;
  ReleaseOn(*device_,
            [this](const CudaDriver& driver) { driver.MemHostUnregister(memory_.data()); });
  device_ = nullptr;
  memory_ = {};
  address_ = 0;
}

}  // namespace zeroshard
