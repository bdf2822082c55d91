#include "device/cuda/stream.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "device/cuda/host_calls.h"
#include "device/cuda/poll.h"

namespace zeroshard {
namespace {

// True, false, or the error, of a call that may answer "not ready".
absl::StatusOr<bool> IsDone(const CudaDevice& device, CUresult result, std::string_view what) {
  if (result == CUDA_SUCCESS) return true;
  if (result == CUDA_ERROR_NOT_READY) return false;
  return device.Error(result, what);
}

// Handles are reused by the driver, numbers of ours are not.
uint64_t NextStreamId() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

void CUDA_CB RunHostCall(void* ticket) {
  HostCalls::Get().Run(reinterpret_cast<uintptr_t>(ticket));
}

}  // namespace

absl::StatusOr<CudaEvent> CudaEvent::Create(const CudaDevice& device, EventKind kind) {
  const CurrentDevice current(device);
  ZS_RETURN_IF_ERROR(current.status());
  CUevent handle = nullptr;
  const CUevent_flags flags =
      kind == EventKind::kTimed ? CU_EVENT_DEFAULT : CU_EVENT_DISABLE_TIMING;
  ZS_RETURN_IF_ERROR(device.Error(device.driver().EventCreate(&handle, flags), "cuEventCreate"));
  return CudaEvent(device, handle);
}

CudaEvent::CudaEvent(CudaEvent&& other) noexcept
    : device_(other.device_), handle_(std::exchange(other.handle_, nullptr)) {}

CudaEvent& CudaEvent::operator=(CudaEvent&& other) noexcept {
  if (this == &other) return *this;
  Destroy();
  device_ = other.device_;
  handle_ = std::exchange(other.handle_, nullptr);
  return *this;
}

CudaEvent::~CudaEvent() { Destroy(); }

void CudaEvent::Destroy() {
  if (handle_ == nullptr) return;
  const CurrentDevice current(*device_);
  device_->driver().EventDestroy(std::exchange(handle_, nullptr));
}

absl::StatusOr<bool> CudaEvent::Query() const {
  const CurrentDevice current(*device_);
  ZS_RETURN_IF_ERROR(current.status());
  return IsDone(*device_, device_->driver().EventQuery(handle_), "cuEventQuery");
}

absl::Status CudaEvent::Synchronize(absl::Duration deadline) const {
  return PollUntil([this] { return Query(); }, deadline,
                   absl::StrCat("work of ", device_->label(), " before an event"));
}

absl::StatusOr<absl::Duration> CudaEvent::Since(const CudaEvent& start) const {
  const CurrentDevice current(*device_);
  ZS_RETURN_IF_ERROR(current.status());
  float milliseconds = 0;
  ZS_RETURN_IF_ERROR(
      device_->Error(device_->driver().EventElapsedTime(&milliseconds, start.handle_, handle_),
                     "cuEventElapsedTime"));
  return absl::Milliseconds(static_cast<double>(milliseconds));
}

absl::StatusOr<CudaStream> CudaStream::Create(const CudaDevice& device, StreamPriority priority) {
  const CurrentDevice current(device);
  ZS_RETURN_IF_ERROR(current.status());
  int least = 0;  // numerically the largest
  int greatest = 0;
  ZS_RETURN_IF_ERROR(device.Error(device.driver().CtxGetStreamPriorityRange(&least, &greatest),
                                  "cuCtxGetStreamPriorityRange"));
  // 0 is what streams have that nobody gave a priority.
  int value = std::clamp(0, greatest, least);
  if (priority == StreamPriority::kLow) value = least;
  if (priority == StreamPriority::kHigh) value = greatest;
  CUstream handle = nullptr;
  ZS_RETURN_IF_ERROR(
      device.Error(device.driver().StreamCreateWithPriority(&handle, CU_STREAM_NON_BLOCKING, value),
                   "cuStreamCreateWithPriority"));
  return CudaStream(device, handle, Owner::kSelf);
}

CudaStream CudaStream::FromHandle(const CudaDevice& device, CUstream handle) {
  return CudaStream(device, handle, Owner::kOther);
}

CudaStream::CudaStream(const CudaDevice& device, CUstream handle, Owner owner)
    : device_(&device), handle_(handle), owner_(owner), id_(NextStreamId()) {}

CudaStream::CudaStream(CudaStream&& other) noexcept
    : device_(other.device_),
      handle_(std::exchange(other.handle_, nullptr)),
      owner_(std::exchange(other.owner_, Owner::kNobody)),
      id_(other.id_) {}

CudaStream& CudaStream::operator=(CudaStream&& other) noexcept {
  if (this == &other) return *this;
  Destroy();
  device_ = other.device_;
  handle_ = std::exchange(other.handle_, nullptr);
  owner_ = std::exchange(other.owner_, Owner::kNobody);
  id_ = other.id_;
  return *this;
}

CudaStream::~CudaStream() { Destroy(); }

void CudaStream::Destroy() {
  if (owner_ == Owner::kNobody) return;
  const bool lost = !Query().ok();
  if (owner_ == Owner::kSelf) {
    const CurrentDevice current(*device_);
    device_->driver().StreamDestroy(handle_);
  }
  if (lost) HostCalls::Get().DropStream(id_);
  handle_ = nullptr;
  owner_ = Owner::kNobody;
}

absl::Status CudaStream::Enqueue(std::string_view what, uint64_t bytes,
                                 absl::FunctionRef<CUresult(const CudaDriver&)> call) const {
  const CurrentDevice current(*device_);
  ZS_RETURN_IF_ERROR(current.status());
  return device_->Error(call(device_->driver()), what, bytes);
}

absl::Status CudaStream::CopyToDevice(DeviceAddress to, const void* from, size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  return Enqueue("cuMemcpyHtoDAsync", bytes, [&](const CudaDriver& driver) {
    return driver.MemcpyHtoDAsync(to, from, bytes, handle_);
  });
}

absl::Status CudaStream::CopyToHost(void* to, DeviceAddress from, size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  return Enqueue("cuMemcpyDtoHAsync", bytes, [&](const CudaDriver& driver) {
    return driver.MemcpyDtoHAsync(to, from, bytes, handle_);
  });
}

absl::Status CudaStream::CopyOnDevice(DeviceAddress to, DeviceAddress from, size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  return Enqueue("cuMemcpyDtoDAsync", bytes, [&](const CudaDriver& driver) {
    return driver.MemcpyDtoDAsync(to, from, bytes, handle_);
  });
}

absl::Status CudaStream::Fill(DeviceAddress to, uint8_t value, size_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  return Enqueue("cuMemsetD8Async", bytes, [&](const CudaDriver& driver) {
    return driver.MemsetD8Async(to, value, bytes, handle_);
  });
}

absl::Status CudaStream::Record(CudaEvent& event) {
  return Enqueue("cuEventRecord", 0, [&](const CudaDriver& driver) {
    return driver.EventRecord(event.handle(), handle_);
  });
}

absl::Status CudaStream::WaitFor(const CudaEvent& event) {
  return Enqueue("cuStreamWaitEvent", 0, [&](const CudaDriver& driver) {
    return driver.StreamWaitEvent(handle_, event.handle(), 0);
  });
}

absl::Status CudaStream::WriteValue(DeviceAddress address, uint64_t value) {
  return Enqueue("cuStreamWriteValue64", 0, [&](const CudaDriver& driver) {
    return driver.StreamWriteValue64(handle_, address, value, CU_STREAM_WRITE_VALUE_DEFAULT);
  });
}

absl::Status CudaStream::WaitValue(DeviceAddress address, uint64_t value) {
  return Enqueue("cuStreamWaitValue64", 0, [&](const CudaDriver& driver) {
    return driver.StreamWaitValue64(handle_, address, value, CU_STREAM_WAIT_VALUE_GEQ);
  });
}

absl::Status CudaStream::Notify(std::function<void()> function) {
  const uintptr_t ticket = HostCalls::Get().Add(id_, std::move(function));
  const absl::Status status = Enqueue("cuLaunchHostFunc", 0, [&](const CudaDriver& driver) {
    return driver.LaunchHostFunc(handle_, &RunHostCall, reinterpret_cast<void*>(ticket));
  });
  if (!status.ok()) HostCalls::Get().Drop(ticket);
  return status;
}

absl::StatusOr<bool> CudaStream::Query() const {
  const CurrentDevice current(*device_);
  ZS_RETURN_IF_ERROR(current.status());
  return IsDone(*device_, device_->driver().StreamQuery(handle_), "cuStreamQuery");
}

absl::Status CudaStream::Synchronize(absl::Duration deadline) const {
  return PollUntil([this] { return Query(); }, deadline,
                   absl::StrCat("work of a stream of ", device_->label()));
}

}  // namespace zeroshard
