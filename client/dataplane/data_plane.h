// DataPlane: how one rank of a job on GPUs gets parameters and hands in gradients.
//
// Kernels of two processes do not overlap on one GPU, and NCCL refuses two ranks on it: so the
// collectives and the sums over ranks run in the trainer, and the worker alone holds the optimizer
// (docs/gpu.md). The control plane goes on as on hosts: whatever is done here is also a request of
// the Session, which moves no bytes in such a job.
//
//   parameter shards --all-gather--> window of this rank           Gather, on a side stream
//   slot with a gradient --all-to-all--> staging --tree sum--> accumulators of this rank's slice
//                                                                  Scatter, on another one
//   Boundary: the counter `summed` is set to the attempt, behind the last sum on that stream
//
// Parameter shards and accumulators are memory of the worker (DEVICE_SHARED), window and slots are
// this process's own. No call waits for the device in the steady state: work is ordered with the
// caller's stream by events. A call waits, at most for the job's collective timeout, where a
// resource is short: released units that must leave the window, a slot that is still being summed.
//
// Implemented by libzeroshard-dataplane.so, which the SDK opens at run time (loader.h): the only
// part of the client that knows CUDA and NCCL. Nothing here needs their headers.
//
// Threads: any, one call at a time inside; callers' CUDA context becomes the device's primary one.
// Failure: the first error (of NCCL, the device, a peer that does not come, Abort) is kept, told to
// the worker through the `error` counter, and returned by every later call: the generation is dead.
// The rank attaches anew and makes another DataPlane.
#ifndef ZEROSHARD_CLIENT_DATAPLANE_DATA_PLANE_H_
#define ZEROSHARD_CLIENT_DATAPLANE_DATA_PLANE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/dtype.h"
#include "base/shared_memory.h"
#include "base/unique_fd.h"
#include "device/cuda/address.h"
#include "storage/layout.h"

namespace zeroshard {

using StreamHandle = void*;  // CUstream or cudaStream_t; null: the legacy default stream

// A GPU as this process sees it.
struct DeviceFacts {
  int ordinal = 0;  // CUDA_VISIBLE_DEVICES applied
  std::array<std::byte, 16> uuid = {};
  std::string name = {};
};

// Device memory of a trainer that outlives its generations: window and slots. Views of parameters
// stay right when the process attaches again.
class TrainerMemory {
 public:
  virtual ~TrainerMemory() = default;
};

// Of the configuration what matters here. Plain values: two copies of a protobuf message's code
// cannot be in one process.
struct DataPlaneConfig {
  uint32_t stage = 3;
  DType accumulator_dtype = DType::kFloat32;
  uint32_t reduction_group = 1;        // g of the canonical order
  bool local_sums = false;             // stage 1: micro-steps are summed before ranks
  bool forward_only = false;           // no gradients
  uint64_t slot_bytes = 0;             // of the ring of slots, at first
  uint64_t max_live_elements = 0;      // of the window at stage 3
  uint64_t persistence_threshold = 0;  // units of at most so many elements stay
};

// Where this rank's part of a unit lies in DEVICE_SHARED, in bytes. Of its slice's first element.
struct DeviceUnitPlace {
  uint64_t parameters = 0;   // unless they rest on the host
  uint64_t accumulator = 0;  // of trainable units
  uint64_t presence = 0;     // 16 words: parameters with a gradient
};

struct DataPlaneOptions {
  Layout layout;  // for as many workers as there are ranks
  DataPlaneConfig config{};
  std::vector<DeviceUnitPlace> places{};  // by unit
  uint32_t rank = 0;
  std::string job{};  // for messages
  uint64_t generation = 0;
  std::array<std::byte, 16> device_uuid = {};  // of the rank's worker: the one to use
  UniqueFd shared{};                           // descriptor of DEVICE_SHARED
  uint64_t shared_bytes = 0;
  std::shared_ptr<const MappedRegion> counters{};  // DEVICE_COUNTERS
  // Where parameters rest on the host, or on the NVMe tier and those of units that stay gathered on
  // the host: the units at their window offsets. Else null.
  std::shared_ptr<const MappedRegion> host_parameters{};
  // Where they rest on the NVMe tier: through which this rank's shards come. Else null.
  std::shared_ptr<const MappedRegion> ring{};
  absl::Duration timeout = absl::Minutes(2);  // of every wait: the collective timeout
  std::shared_ptr<TrainerMemory> memory{};    // of the predecessor in this process, or null
  // The value of `key` among the ranks of this generation; with `value` it is set first.
  std::function<absl::StatusOr<std::string>(
      const std::string& key, const std::optional<std::string>& value, absl::Duration timeout)>
      rendezvous{};
  // Equal for ranks whose GPUs are in one node: which traffic crosses the network.
  std::string node{};
  // OK, or why the generation is dead: asked while a call waits.
  std::function<absl::Status()> alive{};
};

// Room for a gradient.
struct DeviceSlot {
  uint64_t offset = 0;  // names it
  DeviceAddress address = 0;
};

struct DeviceScatter {
  uint32_t unit = 0;
  uint32_t micro_step = 0;        // within the step, from 0
  uint64_t slot = 0;              // DeviceSlot::offset; the whole unit's gradient in its data type
  std::string present{};          // one bit a parameter, LSB first; empty: all
  float weight = 1.0F;            // 1: not multiplied
  StreamHandle stream = nullptr;  // on which the gradient is complete
};

struct DataPlaneStats {
  uint64_t gathered_bytes = 0;           // received from other ranks
  uint64_t scattered_bytes = 0;          // sent to other ranks
  uint64_t scattered_between_nodes = 0;  // of these, to ranks of other nodes
  uint64_t window_bytes = 0;             // mapped now
  uint64_t peak_window_bytes = 0;
  uint64_t slot_bytes = 0;  // of all rings
  uint64_t overflows = 0;   // times a ring was added because gradients came out of order
  uint64_t evictions = 0;   // units whose memory was given back
  uint64_t host_waits = 0;  // calls that waited for the device
};

class DataPlane {
 public:
  // Destroying aborts what is under way, for at most 5 s a communicator.
  virtual ~DataPlane() = default;

  virtual const DeviceFacts& device() const = 0;
  // Of the unit's element 0 in the window, the same for the job's life.
  virtual DeviceAddress parameter_address(uint32_t unit) const = 0;
  // Whether the unit stays gathered: all units at stages 1 and 2, small ones at stage 3.
  virtual bool resident(uint32_t unit) const = 0;
  // To hand to the successor.
  virtual std::shared_ptr<TrainerMemory> memory() const = 0;
  virtual DataPlaneStats stats() const = 0;

  // Gathers units into the window. Collective: the ranks call it with the same units in the same
  // order; so every call moves the bytes of units that are not resident, gathered already or not.
  // A resident unit is gathered by the first call that names it, and after each Committed.
  // The values are there for what a stream runs after WaitOn.
  virtual absl::Status Gather(std::span<const uint32_t> units) = 0;
  // The same of one unit that does not stay, where parameters rest on the NVMe tier: this rank's
  // shard lies at `offset` of the ring, and stays there until AwaitCopied of the number that is
  // returned.
  virtual absl::StatusOr<uint64_t> GatherFrom(uint32_t unit, uint64_t offset) = 0;
  virtual absl::Status AwaitCopied(uint64_t mark) = 0;
  // The same for this rank alone, at any time, of a unit that is not resident: its values, in its
  // data type, are in host memory, and are copied before the call returns.
  virtual absl::Status Place(uint32_t unit, std::span<const std::byte> values) = 0;
  virtual absl::Status WaitOn(uint32_t unit, StreamHandle stream) = 0;
  // The same for the host's own reading of device memory.
  virtual absl::Status WaitOnHost(uint32_t unit) = 0;
  // Undoes one Gather of each: what `stream` was given so far was the last use. The memory of units
  // that nobody uses goes when others need it (stage3_max_live_parameters).
  virtual absl::Status Release(std::span<const uint32_t> units, StreamHandle stream) = 0;

  // Memory for a gradient of `bytes`, 512-byte aligned; bound to the next Scatter that names it,
  // and free again once it was summed.
  virtual absl::StatusOr<DeviceSlot> AcquireSlot(uint64_t bytes) = 0;
  virtual absl::Status AbandonSlot(uint64_t offset) = 0;

  // This rank's gradient of one unit. In any order: units are exchanged from the last to the first,
  // those that a rank does not have with the others' at the end of the micro-step.
  virtual absl::Status Scatter(const DeviceScatter& scatter) = 0;
  virtual absl::Status EndMicroStep(uint32_t micro_step) = 0;

  // The step in flight has this identity: before its first Scatter.
  virtual void Begin(uint64_t attempt) = 0;
  // All micro-steps have ended: what is left is summed, and the worker is told behind it. Before
  // the Session's Step.
  virtual absl::Status Boundary() = 0;
  // The step is committed and has changed the parameters: resident units are gathered again.
  // Collective.
  virtual absl::Status Committed() = 0;
  // The same after something else changed all parameters (Restore, Put).
  virtual absl::Status Refresh() = 0;

  // Returns when all ranks have called it.
  virtual absl::Status Barrier() = 0;

  // OK, or why the data plane is dead. Also finds what hangs: asked by waits of the Session.
  virtual absl::Status Poll() = 0;
  // Ends the data plane for this reason; true when nothing runs on the device any more.
  virtual bool Abort(const absl::Status& reason) = 0;
};

// What the library exports: `extern "C" const DataPlaneLibrary* zeroshard_data_plane(uint32_t)`,
// null for another version than its own.
inline constexpr uint32_t kDataPlaneVersion = 3;
inline constexpr char kDataPlaneSymbol[] = "zeroshard_data_plane";
struct DataPlaneLibrary {
  uint32_t version = kDataPlaneVersion;
  // Unavailable: no driver, or no such device.
  absl::StatusOr<DeviceFacts> (*device)(int ordinal) = nullptr;
  // All ranks at about the same time: communicators are made.
  absl::StatusOr<std::unique_ptr<DataPlane>> (*create)(DataPlaneOptions options) = nullptr;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_DATAPLANE_DATA_PLANE_H_
