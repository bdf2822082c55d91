#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "device/cuda/mapping.h"
#include "device/cuda/memory.h"

namespace zeroshard {

absl::StatusOr<DeviceRange> DeviceRange::Reserve(const CudaDevice& device, uint64_t bytes,
                                                 const DeviceRangeOptions& options) {
  DeviceRange range;
  range.segment_bytes_ = options.segment_bytes == 0 ? device.granularity() : options.segment_bytes;
  range.spare_limit_ = options.spare_segments;
  if (bytes == 0 || range.segment_bytes_ % device.granularity() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a range of ", bytes, " bytes in segments of ", range.segment_bytes_,
                     ": expected some, and a multiple of ", device.granularity()));
  }
  const CurrentDevice current(device);
  ZS_RETURN_IF_ERROR(current.status());
  const uint64_t size = RoundUpTo(bytes, range.segment_bytes_);
  CUdeviceptr address = 0;
  ZS_RETURN_IF_ERROR(device.Error(device.driver().MemAddressReserve(&address, size, 0, 0, 0),
                                  "cuMemAddressReserve", size));
  range.device_ = &device;
  range.address_ = address;
  range.segments_.resize(size / range.segment_bytes_);
  return range;
}

DeviceRange::DeviceRange(DeviceRange&& other) noexcept { *this = std::move(other); }

DeviceRange& DeviceRange::operator=(DeviceRange&& other) noexcept {
  if (this == &other) return *this;
  Destroy();
  device_ = std::exchange(other.device_, nullptr);
  address_ = std::exchange(other.address_, 0);
  segment_bytes_ = other.segment_bytes_;
  spare_limit_ = other.spare_limit_;
  mapped_ = std::exchange(other.mapped_, 0);
  segments_ = std::exchange(other.segments_, {});
  spares_ = std::exchange(other.spares_, {});
  return *this;
}

DeviceRange::~DeviceRange() { Destroy(); }

void DeviceRange::Destroy() {
  if (device_ == nullptr) return;
  const CurrentDevice current(*device_);
  for (uint64_t index = 0; index < segments_.size(); ++index) {
    if (segments_[index].maps > 0) UnmapSegment(index).IgnoreError();
  }
  Trim();
  device_->driver().MemAddressFree(address_, bytes());
  device_ = nullptr;
  address_ = 0;
  segments_.clear();
}

absl::Status DeviceRange::CheckRange(uint64_t offset, uint64_t bytes) const {
  if (bytes > 0 && offset < this->bytes() && bytes <= this->bytes() - offset) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("bytes ", offset, " to ", offset, " + ", bytes,
                                                 " of a device range of ", this->bytes()));
}

absl::Status DeviceRange::MapSegment(uint64_t index) {
  const CudaDriver& driver = device_->driver();
  CUmemGenericAllocationHandle handle = 0;
  if (!spares_.empty()) {
    handle = spares_.back();
    spares_.pop_back();
  } else {
    const CUmemAllocationProp properties = device_->SharedMemoryProperties();
    ZS_RETURN_IF_ERROR(device_->Error(driver.MemCreate(&handle, segment_bytes_, &properties, 0),
                                      "cuMemCreate", segment_bytes_));
  }
  const CUresult result =
      driver.MemMap(address_ + index * segment_bytes_, segment_bytes_, 0, handle, 0);
  if (result != CUDA_SUCCESS) {
    Forget(handle);
    return device_->Error(result, "cuMemMap", segment_bytes_);
  }
  segments_[index].handle = handle;
  ++mapped_;
  return absl::OkStatus();
}

absl::Status DeviceRange::UnmapSegment(uint64_t index) {
  const CUmemGenericAllocationHandle handle = std::exchange(segments_[index].handle, 0);
  segments_[index].maps = 0;
  --mapped_;
  const CUresult result =
      device_->driver().MemUnmap(address_ + index * segment_bytes_, segment_bytes_);
  Forget(handle);
  return device_->Error(result, "cuMemUnmap", segment_bytes_);
}

void DeviceRange::Forget(CUmemGenericAllocationHandle handle) {
  if (spares_.size() < spare_limit_) {
    spares_.push_back(handle);
  } else {
    device_->driver().MemRelease(handle);
  }
}

void DeviceRange::Trim() {
  if (device_ == nullptr) return;
  const CurrentDevice current(*device_);
  for (const CUmemGenericAllocationHandle handle : spares_) device_->driver().MemRelease(handle);
  spares_.clear();
}

// All segments from `begin` to `end` are mapped. One call; to those that had access it changes
// nothing.
absl::Status DeviceRange::Allow(uint64_t begin, uint64_t end) {
  return AllowAccess(*device_, address_ + begin * segment_bytes_, (end - begin) * segment_bytes_,
                     Access::kReadWrite)
      .status();
}

absl::Status DeviceRange::Map(uint64_t offset, uint64_t bytes) {
  ZS_RETURN_IF_ERROR(CheckRange(offset, bytes));
  const CurrentDevice current(*device_);
  ZS_RETURN_IF_ERROR(current.status());
  const uint64_t begin = offset / segment_bytes_;
  const uint64_t end = (offset + bytes - 1) / segment_bytes_ + 1;
  uint64_t first_new = end;
  uint64_t last_new = begin;
  absl::Status status;
  for (uint64_t index = begin; index < end && status.ok(); ++index) {
    if (segments_[index].maps > 0) continue;
    status = MapSegment(index);
    if (!status.ok()) break;
    first_new = std::min(first_new, index);
    last_new = index + 1;
  }
  if (status.ok() && first_new < last_new) status = Allow(first_new, last_new);
  if (!status.ok()) {
    for (uint64_t index = first_new; index < last_new; ++index) {
      if (segments_[index].maps == 0) UnmapSegment(index).IgnoreError();
    }
    return Annotate(status,
                    absl::StrCat("mapping ", bytes, " bytes at ", offset, " of a window of ",
                                 this->bytes(), ", of which ", mapped_bytes(), " are mapped"));
  }
  for (uint64_t index = begin; index < end; ++index) ++segments_[index].maps;
  return absl::OkStatus();
}

absl::Status DeviceRange::Unmap(uint64_t offset, uint64_t bytes) {
  ZS_RETURN_IF_ERROR(CheckRange(offset, bytes));
  const CurrentDevice current(*device_);
  ZS_RETURN_IF_ERROR(current.status());
  const uint64_t begin = offset / segment_bytes_;
  const uint64_t end = (offset + bytes - 1) / segment_bytes_ + 1;
  for (uint64_t index = begin; index < end; ++index) {
    if (segments_[index].maps == 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("unmapping bytes ", offset, " to ", offset + bytes,
                       " of a device range, of which not all are mapped"));
    }
  }
  absl::Status first;
  for (uint64_t index = begin; index < end; ++index) {
    if (--segments_[index].maps > 0) continue;
    KeepFirstError(first, UnmapSegment(index));
  }
  return first;
}

}  // namespace zeroshard
