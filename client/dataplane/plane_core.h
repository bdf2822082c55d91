// PlaneCore: what the parts of a data plane share: the device, how to wait for it, and how it
// failed. Only for client/dataplane.
#ifndef ZEROSHARD_CLIENT_DATAPLANE_PLANE_CORE_H_
#define ZEROSHARD_CLIENT_DATAPLANE_PLANE_CORE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/dataplane/data_plane.h"
#include "device/cuda/device.h"
#include "device/cuda/memory.h"
#include "storage/device_counters.h"
#include "transport/nccl/communicator.h"

namespace zeroshard {

class PlaneCore {
 public:
  // `options` moved in; `device` outlives the object.
  PlaneCore(DataPlaneOptions options, const CudaDevice& device);

  const CudaDevice& device() const { return device_; }
  const DataPlaneOptions& options() const { return options_; }
  const Layout& layout() const { return options_.layout; }
  const DataPlaneConfig& config() const { return options_.config; }
  uint32_t rank() const { return options_.rank; }
  uint32_t ranks() const { return options_.layout.workers(); }
  DeviceCounters& counters() const { return *options_.counters->As<DeviceCounters>(); }
  DeviceUnitPlace place(uint32_t unit) const { return options_.places[unit]; }

  // All communicators, to be polled and interrupted; none may go before this object is told.
  void Watch(std::vector<NcclCommunicator*> communicators);

  // Waits until `done` says so. Ends with the reason when the data plane is dead, the generation
  // is, a communicator fails, or the collective timeout passes.
  absl::Status Await(const std::function<absl::StatusOr<bool>()>& done, std::string_view what);
  uint64_t waits() const { return waits_; }

  // OK, or why the data plane is dead. Any thread.
  absl::Status Health() const;
  // Looks at communicators and at what the device has found.
  absl::Status Look();
  // The data plane is dead for this reason, unless it was before; the worker is told, but for what
  // the control plane knows already: the session's end (Cancelled), the generation's. Returns the
  // reason that counts. Any thread.
  enum class Tell : uint8_t { kWorker, kNobody };
  absl::Status Fail(const absl::Status& reason, Tell tell = Tell::kWorker);
  // Fails for anything but the caller's mistakes.
  absl::Status Check(absl::Status status);

  // Two headers that arrived together are not of the same step; told by a thread of the driver.
  struct Mismatch {
    std::atomic<bool> found{false};
    uint32_t rank = 0;
    uint32_t unit = 0;
    uint64_t tag = 0;
    uint64_t expected = 0;
  };
  const std::shared_ptr<Mismatch>& mismatch() const { return mismatch_; }

  std::string name() const;  // "job gpt, generation 3, rank 1"

 private:
  DataPlaneOptions options_;
  const CudaDevice& device_;
  const std::shared_ptr<Mismatch> mismatch_ = std::make_shared<Mismatch>();
  std::atomic<uint64_t> waits_{0};
  mutable absl::Mutex mu_;
  absl::Status dead_ ABSL_GUARDED_BY(mu_);
  std::vector<NcclCommunicator*> communicators_ ABSL_GUARDED_BY(mu_);
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_DATAPLANE_PLANE_CORE_H_
