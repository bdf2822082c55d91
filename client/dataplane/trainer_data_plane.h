// TrainerDataPlane: the DataPlane of a rank on a GPU: a Gatherer and a Reducer on communicators of
// their own, behind one lock.
#ifndef ZEROSHARD_CLIENT_DATAPLANE_TRAINER_DATA_PLANE_H_
#define ZEROSHARD_CLIENT_DATAPLANE_TRAINER_DATA_PLANE_H_

#include <memory>
#include <span>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/dataplane/data_plane.h"
#include "client/dataplane/gatherer.h"
#include "client/dataplane/plane_core.h"
#include "client/dataplane/rank_links.h"
#include "client/dataplane/reducer.h"
#include "client/dataplane/trainer_memory.h"
#include "device/cuda/memory.h"

namespace zeroshard {

class TrainerDataPlane final : public DataPlane {
 public:
  // As DataPlaneLibrary::create.
  static absl::StatusOr<std::unique_ptr<DataPlane>> Create(DataPlaneOptions options);
  ~TrainerDataPlane() override;

  const DeviceFacts& device() const override { return facts_; }
  DeviceAddress parameter_address(uint32_t unit) const override { return memory_->address(unit); }
  bool resident(uint32_t unit) const override;
  std::shared_ptr<TrainerMemory> memory() const override;
  DataPlaneStats stats() const override;

  absl::Status Gather(std::span<const uint32_t> units) override;
  absl::StatusOr<uint64_t> GatherFrom(uint32_t unit, uint64_t offset) override;
  absl::Status AwaitCopied(uint64_t mark) override;
  absl::Status Place(uint32_t unit, std::span<const std::byte> values) override;
  absl::Status WaitOn(uint32_t unit, StreamHandle stream) override;
  absl::Status WaitOnHost(uint32_t unit) override;
  absl::Status Release(std::span<const uint32_t> units, StreamHandle stream) override;
  absl::StatusOr<DeviceSlot> AcquireSlot(uint64_t bytes) override;
  absl::Status AbandonSlot(uint64_t offset) override;
  absl::Status Scatter(const DeviceScatter& scatter) override;
  absl::Status EndMicroStep(uint32_t micro_step) override;
  void Begin(uint64_t attempt) override;
  absl::Status Boundary() override;
  absl::Status Committed() override;
  absl::Status Refresh() override;
  absl::Status Barrier() override;
  absl::Status Poll() override;
  bool Abort(const absl::Status& reason) override;

 private:
  // Everything that works on the device, given up as a whole where the device does not come to an
  // end with it.
  struct Engine {
    explicit Engine(std::shared_ptr<OwnMemory> own) : memory(std::move(own)) {}

    const std::shared_ptr<OwnMemory> memory;  // first: its device outlives all
    std::unique_ptr<PlaneCore> core;
    DeviceMemory shared;
    std::unique_ptr<RankLinks> links;  // null where there is one rank
    std::unique_ptr<Gatherer> gatherer;
    std::unique_ptr<Reducer> reducer;
  };

  TrainerDataPlane(std::unique_ptr<Engine> engine, DeviceFacts facts);
  static absl::Status Open(Engine& engine, DataPlaneOptions options);
  absl::Status PollLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  CudaStream StreamOf(StreamHandle handle) const;
  template <typename Call>
  absl::Status Guarded(Call call);

  const DeviceFacts facts_;
  const std::shared_ptr<OwnMemory> memory_;
  mutable absl::Mutex mu_;
  std::unique_ptr<Engine> engine_;           // guarded by mu_, but for its core's own calls
  bool ended_ ABSL_GUARDED_BY(mu_) = false;  // nothing runs on the device any more
  bool given_up_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_DATAPLANE_TRAINER_DATA_PLANE_H_
