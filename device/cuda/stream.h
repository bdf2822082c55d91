// CudaStream and CudaEvent: work of the device in order, and points in it.
//
// All calls but Synchronize return at once and only enqueue. Copies from and to host memory are
// asynchronous where the memory is registered (device/cuda/memory.h); other memory is copied, with
// the caller waiting for it. Errors of work come back from a later call, and stick (IsDeviceLost).
// Any thread, one at a time for each object. The device outlives both.
#ifndef ZEROSHARD_DEVICE_CUDA_STREAM_H_
#define ZEROSHARD_DEVICE_CUDA_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "device/cuda/device.h"

namespace zeroshard {

enum class StreamPriority : uint8_t { kLow, kNormal, kHigh };

// kTimed can be asked for the time between two of them; costs more.
enum class EventKind : uint8_t { kOrder, kTimed };

class CudaEvent {
 public:
  static absl::StatusOr<CudaEvent> Create(const CudaDevice& device,
                                          EventKind kind = EventKind::kOrder);
  CudaEvent(CudaEvent&& other) noexcept;
  CudaEvent& operator=(CudaEvent&& other) noexcept;
  ~CudaEvent();

  // Whether all work before its last Record is done; true before the first.
  absl::StatusOr<bool> Query() const;
  // Waits for it. DeadlineExceeded after `deadline`; the work goes on.
  absl::Status Synchronize(absl::Duration deadline) const;
  // From `start` to this event, both kTimed, recorded and done.
  absl::StatusOr<absl::Duration> Since(const CudaEvent& start) const;
  CUevent handle() const { return handle_; }

 private:
  CudaEvent(const CudaDevice& device, CUevent handle) : device_(&device), handle_(handle) {}
  void Destroy();

  const CudaDevice* device_;
  CUevent handle_;
};

class CudaStream {
 public:
  // A stream that does not wait for the default stream.
  static absl::StatusOr<CudaStream> Create(const CudaDevice& device, StreamPriority priority);
  // Work on a stream of someone else (PyTorch's current one; null is the default stream), who
  // destroys it, after this object.
  static CudaStream FromHandle(const CudaDevice& device, CUstream handle);
  CudaStream(CudaStream&& other) noexcept;
  CudaStream& operator=(CudaStream&& other) noexcept;
  // Work that is enqueued still runs; functions given to Notify are still called, but for those of
  // a device that is lost.
  ~CudaStream();

  absl::Status CopyToDevice(DeviceAddress to, const void* from, size_t bytes);
  absl::Status CopyToHost(void* to, DeviceAddress from, size_t bytes);
  absl::Status CopyOnDevice(DeviceAddress to, DeviceAddress from, size_t bytes);
  absl::Status Fill(DeviceAddress to, uint8_t value, size_t bytes);

  absl::Status Record(CudaEvent& event);
  // Later work of this stream waits for the event's last Record before this call, of any stream.
  absl::Status WaitFor(const CudaEvent& event);

  // Sets the counter at `address` (8-byte aligned) after all earlier work, whose writes are visible
  // to whoever sees the value.
  absl::Status WriteValue(DeviceAddress address, uint64_t value);
  // Later work waits until the counter is at least `value`. Enqueue a wait only when its signal has
  // been enqueued: a wait for what never comes holds the stream, and whoever destroys the context,
  // for ever; kDeadCounter ends it.
  absl::Status WaitValue(DeviceAddress address, uint64_t value);

  // Calls `function` on a thread of the driver's after all earlier work, unless the device is lost
  // before. It must not call CUDA nor wait for work of a device: write to an eventfd.
  absl::Status Notify(std::function<void()> function);

  // Whether all work is done.
  absl::StatusOr<bool> Query() const;
  // Waits for all work by asking again and again, so that a device that hangs does not hold the
  // caller: DeadlineExceeded after `deadline`; the work goes on.
  absl::Status Synchronize(absl::Duration deadline) const;

  const CudaDevice& device() const { return *device_; }
  CUstream handle() const { return handle_; }

 private:
  enum class Owner : uint8_t { kNobody, kSelf, kOther };  // kNobody: moved from
  CudaStream(const CudaDevice& device, CUstream handle, Owner owner);
  absl::Status Enqueue(std::string_view what, uint64_t bytes,
                       absl::FunctionRef<CUresult(const CudaDriver&)> call) const;
  void Destroy();

  const CudaDevice* device_;
  CUstream handle_;
  Owner owner_;
  uint64_t id_;  // of Notify's functions
};

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CUDA_STREAM_H_
