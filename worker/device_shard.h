// DeviceShard: one worker's memory on its GPU, and the passes over it, in a job with a data plane.
//
// Gradient accumulators (DEVICE_SHARED) are always there, and parameters at rest in most jobs; the
// states of a chunk where the table says so (a ChunkTier). Work is enqueued on streams of this
// object's own; a call that has to wait does so in short turns that say to the server that the
// worker is alive, and gives up on a device that does not answer. Every pass may be run again with
// the same arguments by a successor of a killed process. Format and protocol: docs/device.md.
//
// An interface, so that the engine knows no CUDA: worker/cuda/cuda_shard.h implements it. After a
// device was lost every call fails with Aborted "device lost"; what it held is gone for this
// process. Loop thread only, unless said otherwise.
#ifndef ZEROSHARD_WORKER_DEVICE_SHARD_H_
#define ZEROSHARD_WORKER_DEVICE_SHARD_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/unique_fd.h"
#include "device/cpu/thread_pool.h"
#include "proto/internal.pb.h"
#include "proto/model.pb.h"
#include "storage/board.h"
#include "storage/device_mirror.h"
#include "storage/layout.h"
#include "storage/state_format.h"
#include "worker/chunk_tier.h"
#include "worker/exact_sum.h"
#include "worker/optim/kernels.h"

namespace zeroshard {

// One unit's gradients, of which the present parameters' count.
struct DeviceSquares {
  uint32_t unit = 0;
  Presence present = {};
};

// One chunk of a step. What the spans lie in must outlive the updates.
struct DeviceUpdate {
  uint32_t chunk = 0;
  MasterKind master = MasterKind::kFloat32;
  uint64_t random_key = 0;                       // kStochastic: of its unit
  std::span<const UpdateSegment> segments = {};  // of its unit
  uint64_t first_block = 0;                      // 8-bit states: of the chunk's first element
  uint64_t blocks = 0;
};

struct DeviceStep {
  uint64_t attempt = 0;
  OptimizerKind kind = OptimizerKind::kAdamW;
  StateFormat state_format = StateFormat::kFloat32;
  std::span<const UpdateArgs> args;
  float grad_scale = 1.0f;
};

// Marks an error after which nothing that the device held is to be used by any process; survives
// Annotate.
inline constexpr char kMemoryLostPayload[] = "zeroshard/memory_lost";
inline bool IsMemoryLost(const absl::Status& status) {
  return status.GetPayload(kMemoryLostPayload).has_value();
}

struct DeviceCountersOfWorker {
  uint64_t free_bytes = 0;  // of the device
  absl::Duration busy;      // in passes
  absl::Duration mirror;    // from the start of each mirror to its end
  uint64_t damaged_mirrors = 0;
  uint64_t ring_bytes = 0;  // host memory through which gradients and parameters go
};

class DeviceShard : public ChunkTier {
 public:
  // Memory that this process has made, to be handed to the server; each once.
  struct Made {
    internal::v1::WorkerRegion::Kind kind = internal::v1::WorkerRegion::KIND_UNSPECIFIED;
    uint64_t bytes = 0;
    UniqueFd fd;
  };
  virtual std::vector<Made> TakeMade() = 0;
  virtual model::v1::Device device() const = 0;

  // Where an image shall rest: not told yet, so as planned; on the NVMe tier.
  virtual bool IsPlanned(uint32_t image) const = 0;
  virtual bool RestsOnNvme(uint32_t image) const = 0;
  virtual void SetTarget(uint32_t image, model::v1::Tier target) = 0;

  // Parameters at rest: a part of this worker's shard, from the device or to it. `values` are those
  // of the part, and may be used by the call only. Errors are the device's.
  virtual absl::Status ReadParameters(uint32_t unit, GrainRange grains, std::byte* values) = 0;
  virtual absl::Status WriteParameters(uint32_t unit, GrainRange grains,
                                       const std::byte* values) = 0;
  // The pages of the partition that the part takes are not needed any more.
  virtual void GiveBackParameters(uint32_t unit, GrainRange grains) = 0;

  // Rings this worker's doorbell once the rank has summed the attempt's gradients; to be called
  // when it has arrived, so that the signal is on its way.
  virtual absl::Status AwaitSums(uint64_t attempt) = 0;
  virtual bool HasSums(uint64_t attempt) const = 0;
  // The first error of the rank's data plane in this generation.
  virtual absl::StatusCode RankError() const = 0;
  // The rank has a new process, or is of a new generation.
  virtual void StartCounters() = 0;

  // Adds the squares of this worker's accumulated gradients of the present parameters.
  virtual absl::Status AddSquares(std::span<const DeviceSquares> units, ThreadPool& pool,
                                  ExactSum& sum) = 0;

  // The update of images that are here: StartUpdates, then PollUpdates until it says true. Images
  // that a predecessor has updated in the attempt are left out. No image is named before it is
  // whole.
  virtual absl::Status StartUpdates(const DeviceStep& step,
                                    std::span<const DeviceUpdate> updates) = 0;
  virtual absl::StatusOr<bool> PollUpdates() = 0;
  // Waits until all are done.
  virtual absl::Status FinishUpdates() = 0;

  // Chunks that are computed on the host go through a ring of registered memory: gradients come
  // into a chunk's parcel, lanes read them and leave its new parameters there, these go to the
  // device, and the room is free again. So copies run while others are computed, and host memory is
  // the ring's.
  //
  // OpenRing comes before each pass, waits for what a failed one left on its way, and returns how
  // many parcels there are: three for each lane, unless that is more than there are chunks.
  virtual absl::StatusOr<uint32_t> OpenRing(uint32_t lanes) = 0;
  // Begins to bring the gradients; false: no parcel is free now.
  virtual absl::StatusOr<bool> FetchGradients(uint32_t chunk) = 0;
  // The same for new parameters of a chunk whose states are on the device, which are made there of
  // the masters: behind the updates that were launched.
  virtual absl::StatusOr<bool> FetchParameters(uint32_t chunk) = 0;
  virtual absl::StatusOr<bool> HasFetched(uint32_t chunk) = 0;
  virtual absl::Status AwaitFetched(uint32_t chunk) = 0;
  // From a fetch to SendParameters; of the chunk's first element. Any thread.
  struct Parcel {
    std::byte* gradients = nullptr;
    std::byte* parameters = nullptr;
  };
  virtual Parcel parcel(uint32_t chunk) const = 0;
  // The parcel is free at once where parameters do not rest on the device.
  virtual absl::Status SendParameters(uint32_t chunk) = 0;
  // Waits until the chunk's parameters, or those of all chunks, are on the device.
  virtual absl::Status SentParameters(uint32_t chunk) = 0;
  virtual absl::Status SentParameters() = 0;

  // Mirrors in host memory, of jobs that have them (storage/device_mirror.h). StartMirror enqueues
  // the copies of all states and parameters as they are, then PollMirror until it says true, or
  // FinishMirror, which waits; in between no state may change. The doorbell rings when they are
  // there. `numbers`: the job's, may be empty.
  // `pool`, which takes the checksums, must outlive the mirror.
  virtual absl::Status StartMirror(const MirrorPoint& point, std::string numbers,
                                   ThreadPool& pool) = 0;
  virtual absl::StatusOr<bool> PollMirror() = 0;
  virtual absl::Status FinishMirror() = 0;
  virtual std::optional<MirrorPoint> LastMirror() const = 0;
  // Mirrors of earlier attempts count no longer: the job's history begins anew.
  virtual void ForgetMirrorsBefore(uint64_t attempt) = 0;
  // Everything is again as the attempt committed it; returns the numbers that were given. NotFound
  // without such a mirror; DataLoss, before anything has changed, when it is damaged: that mirror
  // is gone, and the error is marked as one after which the memory holds nothing (IsMemoryLost).
  // May be done again. Mirrors of later attempts are gone afterwards.
  virtual absl::StatusOr<std::string> LoadMirror(uint64_t attempt, ThreadPool& pool) = 0;
  // The memory is new and the job is not: nothing in it may be used before LoadMirror.
  virtual bool IsBlank() const = 0;

  // Aborted once the device is lost.
  virtual absl::Status health() const = 0;

  virtual DeviceCountersOfWorker counters() const = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_DEVICE_SHARD_H_
