// CudaShard: a worker's memory on a GPU by CUDA's driver (worker/device_shard.h, docs/device.md).
//
// Owns the device's context in this process, its streams, and mappings of memory that the server
// holds. Four streams: updates and norms (low priority: the rank's kernels go first), copies from
// and to the host, and the wait for the rank's counter, which may be held for long. Loop thread
// only; what is called on threads of the driver writes to an eventfd and nothing else.
#ifndef ZEROSHARD_WORKER_CUDA_CUDA_SHARD_H_
#define ZEROSHARD_WORKER_CUDA_CUDA_SHARD_H_

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "device/cuda/device.h"
#include "device/cuda/memory.h"
#include "device/cuda/registered_parts.h"
#include "device/cuda/stream.h"
#include "storage/aligned_buffer.h"
#include "storage/device_table.h"
#include "worker/cuda/kernels.h"
#include "worker/device_shard.h"
#include "worker/job_memory.h"
#include "worker/partition_pages.h"

namespace zeroshard {

struct CudaShardOptions {
  // Work of the device that takes longer has failed.
  absl::Duration timeout = absl::Minutes(2);
};

class CudaShard final : public DeviceShard {
 public:
  // Opens the device of memory.start().device(), and makes its memory or finds a predecessor's.
  // FailedPrecondition for another device than the one of that uuid; ResourceExhausted, with what
  // is needed and free, where memory is short; the errors of CudaDevice::Open. `memory` must
  // outlive this.
  static absl::StatusOr<std::unique_ptr<CudaShard>> Open(JobMemory& memory,
                                                         const CudaShardOptions& options = {});
  // Waits for work of the device, for a few seconds at most.
  ~CudaShard() override;

  // Of the rank's accumulators and of `summed`, for tests that sum by themselves.
  DeviceAddress shared_address() const { return shared_.address(); }
  DeviceAddress counters_address() const { return counters_.address(); }
  const CudaDevice& cuda_device() const { return *device_; }
  const DeviceTable& table() const { return *table_; }

  std::vector<Made> TakeMade() override { return std::move(made_); }
  model::v1::Device device() const override;

  bool Holds(uint32_t image) const override;
  bool AtHome(uint32_t image) const override;
  bool IsPlanned(uint32_t image) const override;
  bool RestsOnNvme(uint32_t image) const override;
  void SetTarget(uint32_t image, model::v1::Tier target) override;
  absl::Status Promote(std::span<const uint32_t> images) override;
  absl::Status Discard(std::span<const uint32_t> images) override;
  // What finds no room stays where it is.
  absl::Status Demote(std::span<const uint32_t> images) override;
  absl::Status Read(std::span<const uint32_t> images, Reader reader) override;

  absl::Status ReadParameters(uint32_t unit, GrainRange grains, std::byte* values) override;
  absl::Status WriteParameters(uint32_t unit, GrainRange grains, const std::byte* values) override;
  void GiveBackParameters(uint32_t unit, GrainRange grains) override;

  absl::Status AwaitSums(uint64_t attempt) override;
  bool HasSums(uint64_t attempt) const override;
  absl::StatusCode RankError() const override;
  void StartCounters() override;

  absl::Status AddSquares(std::span<const DeviceSquares> units, ThreadPool& pool,
                          ExactSum& sum) override;
  absl::Status StartUpdates(const DeviceStep& step, std::span<const DeviceUpdate> updates) override;
  absl::StatusOr<bool> PollUpdates() override;
  absl::Status FinishUpdates() override;
  absl::StatusOr<uint32_t> OpenRing(uint32_t lanes) override;
  absl::StatusOr<bool> FetchGradients(uint32_t chunk) override;
  absl::StatusOr<bool> FetchParameters(uint32_t chunk) override;
  absl::StatusOr<bool> HasFetched(uint32_t chunk) override;
  absl::Status AwaitFetched(uint32_t chunk) override;
  Parcel parcel(uint32_t chunk) const override;
  absl::Status SendParameters(uint32_t chunk) override;
  absl::Status SentParameters(uint32_t chunk) override;
  absl::Status SentParameters() override;

  absl::Status StartMirror(const MirrorPoint& point, std::string numbers,
                           ThreadPool& pool) override;
  absl::StatusOr<bool> PollMirror() override;
  absl::Status FinishMirror() override;
  std::optional<MirrorPoint> LastMirror() const override;
  void ForgetMirrorsBefore(uint64_t attempt) override { mirror_->ForgetBefore(attempt); }
  absl::StatusOr<std::string> LoadMirror(uint64_t attempt, ThreadPool& pool) override;
  bool IsBlank() const override { return blank_; }

  absl::Status health() const override { return health_; }
  DeviceCountersOfWorker counters() const override;

 private:
  CudaShard(JobMemory& memory, const CudaShardOptions& options);
  absl::Status OpenAll();
  absl::Status OpenDevice();
  absl::Status OpenStreams();
  absl::Status OpenMemory();
  absl::StatusOr<DeviceMemory> CreateRegion(uint64_t bytes);
  absl::StatusOr<DeviceMemory> OpenRegion(internal::v1::WorkerRegion::Kind kind, const UniqueFd& fd,
                                          uint64_t bytes);
  absl::Status OpenTable();
  absl::Status UploadParameterTables();
  absl::Status RegisterParameters();
  absl::Status MakeStaging();

  const DevicePlan& plan() const { return *memory_.device_plan(); }
  DeviceAddress SlotAddress(uint32_t slot) const {
    return states_.address() + plan().slot_offset(slot);
  }
  DeviceAddress GradientAddress(uint32_t unit, uint64_t element) const;
  DeviceAddress ParameterAddress(uint32_t unit, uint64_t element) const;
  uint64_t ParameterOffset(uint32_t unit, uint64_t element) const;  // in the partition
  uint64_t WindowOffset(uint32_t unit, uint64_t element) const;

  // Mirrors (cuda_shard_mirror.cc).
  absl::Status OpenMirror();
  absl::Status EnqueueMirror(std::byte* half);
  // A few more checksums; true once all are there.
  bool SumParts();
  absl::Status VerifyMirror(uint32_t half, ThreadPool& pool);
  absl::Status LoadImages(std::byte* half);
  absl::Status LoadParameters(std::byte* half);
  // From a mirror, which may be in pieces that are locked one by one.
  absl::Status CopyFromMirror(DeviceAddress to, const std::byte* from, uint64_t bytes);
  void RingDoorbell() const;
  absl::Status CompleteMirror();

  // Remembers that the device is lost.
  absl::Status Note(absl::Status status);
  // Waits for the event in turns, saying that this worker is alive.
  absl::Status Wait(const CudaEvent& event);
  void ReleaseWait();

  // Images through staging memory: enqueue(image, buffer) starts the copy of each, finish(image,
  // buffer) follows when it is done.
  template <typename Enqueue, typename Finish>
  absl::Status Stage(std::span<const uint32_t> images, const Enqueue& enqueue,
                     const Finish& finish);
  void CopyArrays(uint32_t image, std::byte* buffer, bool to_partition) const;
  void Punch(uint32_t image) const;

  absl::Status FlushSquares(uint32_t half, uint64_t count);
  absl::Status CollectSquares(uint32_t half, ThreadPool& pool, ExactSum& sum);

  struct Launched {
    uint32_t image = 0;
    uint32_t slot = 0;
  };
  struct Batch {
    std::vector<Launched> images;
    CudaEvent event;
  };
  absl::Status LaunchMore();
  absl::StatusOr<UpdateLaunch> LaunchOf(const DeviceUpdate& update, uint32_t from,
                                        uint32_t to) const;
  absl::Status CloseBatch();
  void NameBatch();
  absl::StatusOr<CudaEvent> TakeEvent();

  JobMemory& memory_;
  const CudaShardOptions options_;
  std::unique_ptr<CudaDevice> device_;
  std::unique_ptr<CudaKernels> kernels_;
  std::optional<CudaStream> update_stream_, fetch_stream_, send_stream_, wait_stream_;
  DeviceMemory shared_, states_;
  std::vector<Made> made_;
  RegisteredHost counters_;
  std::optional<DeviceTable> table_;
  std::optional<PartitionPages> pages_;
  std::optional<RegisteredParts> host_parameters_;  // where they rest on the host
  std::shared_ptr<UniqueFd> doorbell_;

  // Of images on their way; made when it is first needed.
  std::optional<AlignedBuffer> staging_;
  RegisteredHost registered_staging_;
  uint64_t staging_bytes_ = 0;  // of one buffer
  std::vector<CudaEvent> staging_events_;

  // Squares of two halves and presence words of all units.
  std::optional<AlignedBuffer> squares_;
  RegisteredHost registered_squares_;
  std::vector<CudaEvent> squares_events_;
  uint64_t squares_pending_[2] = {};

  DeviceStep step_;
  std::span<const DeviceUpdate> updates_;
  size_t next_ = 0;  // of updates_
  std::vector<Launched> open_;
  std::vector<UpdateLaunch> launches_;  // of open_, not in the stream yet
  absl::Status launch_error_;           // of open_, some of which may be in the stream
  std::deque<Batch> batches_;
  std::vector<CudaEvent> free_events_;
  std::optional<CudaEvent> sent_;

  // Of chunks that are computed on the host (cuda_shard_ring.cc); made when it is first needed.
  static constexpr uint32_t kNoParcel = ~uint32_t{0};
  struct RingSlot {
    uint32_t chunk = kNoImage;  // none: free
    bool going = false;         // else its gradients come, or are there
    CudaEvent event;            // of the last copy
  };
  // Gives the chunk a parcel; false: none is free.
  absl::StatusOr<bool> TakeParcel(uint32_t chunk);
  void FreeParcel(size_t slot);
  std::optional<AlignedBuffer> ring_memory_;
  RegisteredHost registered_ring_;
  DeviceRing ring_plan_;
  std::vector<RingSlot> ring_;
  std::vector<uint32_t> parcel_of_;  // by chunk

  // Of a job that has mirrors.
  std::optional<DeviceMirror> mirror_;
  std::vector<RegisteredHost> registered_mirror_;  // parts of it, in order
  std::optional<CudaEvent> mirrored_;
  struct Mirroring {
    uint32_t half = 0;
    MirrorPoint point;
    std::string numbers;
    absl::Time since;
    ThreadPool* pool = nullptr;
    size_t summed = 0;  // parts
  };
  std::optional<Mirroring> mirroring_;  // under way
  absl::Duration mirror_time_;
  uint64_t damaged_mirrors_ = 0;
  bool blank_ = false;

  absl::Status health_;
  absl::Duration busy_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_CUDA_CUDA_SHARD_H_
