// Shard: what one worker does with the bytes of its partition, as plain functions over memory.
//
// Put, Accumulate, Norm, Apply and the checkpoint's reads and writes; when they may run is the
// engine's business (worker/engine.h). Every pass that changes state in place runs under the undo
// record, so that a successor that calls the same function with the same arguments finishes it bit
// for bit. What of the partition is in another tier is read and written there (worker/tier_set.h).
// Loop thread only; the work is spread over the pool's lanes.
#ifndef ZEROSHARD_WORKER_SHARD_H_
#define ZEROSHARD_WORKER_SHARD_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "device/cpu/thread_pool.h"
#include "storage/board.h"
#include "worker/exact_sum.h"
#include "worker/grad_norm.h"
#include "worker/job_memory.h"
#include "worker/optim/kernels.h"
#include "worker/padding.h"
#include "worker/protected_pass.h"
#include "worker/reduce_kernel.h"
#include "worker/reduction_tree.h"
#include "worker/tier_set.h"
#include "worker/unit_state.h"

namespace zeroshard {

// UndoKey::op of the passes that add to an accumulator.
inline constexpr uint32_t kAccumulateOp = 0;

// One input of a sum: a rank's gradient or a partial sum of several.
struct GradientInput {
  const std::byte* data = nullptr;  // the unit's element 0; null: takes no part
  DType dtype = DType::kFloat32;
  float weight = 1.0f;  // 1: not multiplied
  Presence present = {};
};

// The sum of one micro-step of one unit.
struct AccumulateJob {
  uint32_t unit = 0;
  Tag tag = 0;
  const ReductionPlan* plan = nullptr;
  std::span<const GradientInput> inputs;
  Presence before = {};     // parameters that the accumulator already holds in this attempt
  GrainRange squared = {};  // grains of the slice whose squares afterwards are wanted
};

struct Accumulated {
  Presence present = {};
  // Of the present parameters' elements in AccumulateJob::squared; normalised.
  ExactSum squares;
};

// The inputs' sum alone, stored for the elements of `grains` (element0: the unit's element 0;
// only job.unit, plan and inputs are used).
void SumInputs(const Layout& layout, const AccumulateJob& job, GrainRange grains, float* element0,
               ThreadPool& pool);

class UnitSum;  // worker/accumulator_space.cc

// Accumulators of whole units or of a worker's slices, with their undo area.
class AccumulatorSpace {
 public:
  // `plan` and `memory` must outlive this.
  static absl::StatusOr<AccumulatorSpace> Open(const Layout& layout, const PartitionPlan& plan,
                                               std::byte* memory, DType dtype);

  // Adds the inputs' sum to the accumulator, or stores it where `before` says that nothing is there
  // yet, and takes the squares of the result in the same pass. Returns what is there afterwards;
  // the same to a successor that finishes the pass of a killed process.
  Accumulated Accumulate(const AccumulateJob& job, ThreadPool& pool) const;

  // Element 0 of the unit (index within the slice only).
  std::byte* data(uint32_t unit) const;
  DType dtype() const { return dtype_; }
  const Padding& padding() const { return *padding_; }
  const UndoArea& undo() const { return undo_; }
  UndoChunk UndoOf(uint32_t chunk) const;

 private:
  void AddProtected(const AccumulateJob& job, const UnitSum& sum, ThreadPool& pool,
                    std::span<ExactSum> squares) const;
  AccumulatorSpace(const Layout& layout, const PartitionPlan& plan, std::byte* memory, DType dtype,
                   UndoArea undo)
      : layout_(&layout),
        plan_(&plan),
        padding_(std::make_shared<const Padding>(layout)),
        memory_(memory),
        dtype_(dtype),
        undo_(undo) {}
  std::vector<ElementRange> Squared(const AccumulateJob& job, const Presence& present) const;

  const Layout* layout_;
  const PartitionPlan* plan_;
  std::shared_ptr<const Padding> padding_;
  std::byte* memory_;
  DType dtype_;
  UndoArea undo_;
};

// One worker's optimizer step.
struct ApplyJob {
  uint64_t attempt = 0;
  uint64_t step = 0;  // committed before it; what stochastic rounding draws from
  float grad_scale = 1.0f;
  // For each unit the index of the arguments of all its parameters, or kByParameter.
  std::span<const uint32_t> args_of_unit;
  // For each parameter of the units that are kByParameter the index of its arguments, or
  // kNotUpdated.
  std::span<const uint32_t> args_of;
  std::span<const UpdateArgs> args;
};
inline constexpr uint32_t kNotUpdated = ~uint32_t{0};
inline constexpr uint32_t kByParameter = ~uint32_t{0} - 1;

struct UnitUpdate;  // worker/unit_update.h

class Shard {
 public:
  // All must outlive this.
  static absl::StatusOr<Shard> Open(JobMemory& memory, ThreadPool& pool, TierSet& tiers);

  // Puts back what a killed predecessor tore; its pass is finished by calling it again.
  absl::Status Recover() const;
  // The step in flight that an unfinished pass belongs to.
  static uint64_t AttemptOfPass(const UndoKey& key) { return AttemptOf(key.tag >> 1); }
  // Forgets unfinished passes of a dropped attempt.
  void Abandon() const { accumulators_.undo().Abandon(); }

  // Copies the part of `values` (elements [offset, offset + elements) of the unit) that lies in
  // this worker's slices to the parameters at rest and the master, and notes it; where the window
  // is an island's own, all of it to a resident unit. Returns whether every grain of the unit has
  // been put. What shall rest in another tier is there afterwards, as far as it was put whole; an
  // error is the tier's, and the same put may be done again.
  absl::StatusOr<bool> Put(uint32_t unit, uint64_t offset, uint64_t elements,
                           const std::byte* values) const;

  const AccumulatorSpace& accumulators() const { return accumulators_; }

  // Adds the squares of this worker's accumulated gradients of the present parameters; of jobs
  // without a data plane.
  void AddSquares(uint32_t unit, const Presence& present, ExactSum& sum) const;

  // The optimizer update of all units, then the new parameters where they rest. An error is a
  // tier's: nothing that is committed has changed there, and the same job may be applied again.
  absl::Status Apply(const ApplyJob& job) const;

  // Copies this worker's shards of units, wherever they are, into the window.
  absl::Status FillWindows(std::span<const uint32_t> units) const;
  // The same to elsewhere. A unit may be named several times.
  struct Target {
    uint32_t unit = 0;
    std::byte* shard = nullptr;  // where the shard's first element goes
  };
  absl::Status CopyShards(std::span<const Target> targets) const;
  // Copies this worker's shard of a unit out.
  absl::Status ReadParameters(uint32_t unit, std::span<std::byte> out) const;

  // The arrays of one unit that a checkpoint holds: "parameter", "master" and the optimizer's
  // states. kShard: the grains of which this worker is responsible (to write); kSlice: all that it
  // holds, which is more at stage 0 (to read).
  enum class Extent { kShard, kSlice };
  std::vector<StateArray> StateArrays(uint32_t unit, Extent extent) const;
  // Copies the part `grains` of each of them out, wherever it is.
  absl::Status ReadArrays(uint32_t unit, std::span<const StateArray> arrays, GrainRange grains,
                          std::span<std::vector<std::byte>> outs) const;
  // Copies the part `grains` of one of them in (see WriteStateArray), on the host.
  void WriteArray(uint32_t unit, const StateArray& array, GrainRange grains,
                  std::span<const std::byte> in) const;
  // After the parameters of an opened run were written as arrays: where there is no master, what
  // stands for it beside them (tiered jobs).
  void MasterOfParameters(uint32_t unit, GrainRange run) const;
  // Reads all that is in a tier, and makes the parameters on the host whose states are
  // there: each is its rounded master. For regions that are new; all units count as put afterwards.
  absl::Status RestoreParameters() const;
  // Whether a part of the unit is in another tier now.
  bool OnTier(uint32_t unit) const;

  // The grains of a unit in runs that are changed one after the other where states can be in
  // another tier, so that little memory is taken at a time; else one run. Each run is opened,
  // changed on the host, and settled.
  std::vector<GrainRange> Runs(uint32_t unit, GrainRange grains) const;
  // Brings what is on the tier to the host; kDropped: all of it will be written anew.
  enum class OldContents : uint8_t { kKept, kDropped };
  absl::Status OpenRun(uint32_t unit, GrainRange run, OldContents old) const;
  // Notes that the run holds values, and moves to the tier what shall rest there and holds values
  // whole.
  absl::Status SettleRun(uint32_t unit, GrainRange run) const;
  // Whether all grains of the unit hold values.
  bool IsPut(uint32_t unit) const;
  bool IsPut(uint32_t unit, GrainRange grains) const;

 private:
  Shard(JobMemory& memory, ThreadPool& pool, TierSet& tiers, AccumulatorSpace accumulators)
      : memory_(&memory), pool_(&pool), tiers_(&tiers), accumulators_(accumulators) {}
  // Past the caches when the unit is large.
  void CopyOut(uint32_t unit, std::byte* target, const std::byte* values, uint64_t bytes) const;
  // Of a shard that is on the host.
  void CopyWhole(const Target& target) const;
  UndoChunk ApplyUndo(uint32_t chunk) const;
  void ApplyRange(const PreparedUpdate& silent, const PreparedUpdate& writing, uint32_t unit,
                  uint64_t begin, uint64_t end) const;
  std::vector<UnitUpdate> PrepareUpdates(const ApplyJob& job) const;
  // The chunks that an update touches, by where their states are.
  struct TouchedChunks {
    std::vector<uint32_t> on_host;
    std::vector<uint32_t> on_nvme;  // or their parameters are
    std::vector<uint32_t> on_device;
    std::vector<bool> silent;  // by chunk: its parameters are written from the new master
  };
  TouchedChunks FindTouched(std::span<const UnitUpdate> updates) const;
  void ApplyOnHost(const ApplyJob& job, std::span<const UnitUpdate> updates,
                   std::span<const uint32_t> chunks, const std::vector<bool>& silent) const;
  absl::Status ApplyOnTier(const ApplyJob& job, std::span<const UnitUpdate> updates,
                           std::span<const uint32_t> chunks, TierFeed* feed = nullptr) const;
  // Jobs with a data plane (shard_device.cc).
  absl::Status ApplyWithDevice(const ApplyJob& job, std::span<const UnitUpdate> updates,
                               const TouchedChunks& touched) const;
  absl::Status ApplyOffDevice(const ApplyJob& job, std::span<const UnitUpdate> updates,
                              const TouchedChunks& touched) const;
  // What protects the update of chunks on the host.
  ProtectedPass ProtectedApply(const ApplyJob& job) const;
  // Calls update(chunk, begin, end), of elements of its unit, for all elements of the chunks on the
  // host that no predecessor has updated.
  void RunApply(const ApplyJob& job, std::span<const uint32_t> chunks,
                absl::FunctionRef<void(uint32_t, uint64_t, uint64_t)> update) const;
  // Chunks on the host whose gradients are in their parcels, and whose parameters are afterwards.
  void ApplyParcels(const ApplyJob& job, std::span<const UnitUpdate> updates,
                    std::span<const uint32_t> chunks) const;
  // The update of a chunk whose gradients and parameters are in its parcel.
  UpdatePass PassOfParcel(const UnitUpdate& update, const UpdateArrays& arrays,
                          uint32_t chunk) const;
  // New parameters of chunks whose states are on the device, where parameters rest on the NVMe
  // tier.
  absl::Status WriteParametersOf(const ApplyJob& job, std::span<const UnitUpdate> updates,
                                 std::span<const uint32_t> chunks) const;
  uint32_t RingLanes() const;  // that the device's ring has room for
  // Those that a predecessor left in the middle first, and how many these are.
  size_t TornFirst(const ApplyJob& job, std::vector<uint32_t>& chunks) const;
  DeviceUpdate UpdateOnDevice(const UnitUpdate& update, uint32_t chunk) const;
  bool ParametersOnDevice() const;
  // The whole chunk's parameters go to the device, if they rest there: also those that this pass
  // has not computed are made, each of its master.
  void CompleteParameters(const UnitUpdate& update, const UnitState& state, uint32_t chunk,
                          uint64_t computed) const;
  // Nothing to do where parameters are not on a device: the run's come to the partition; those of
  // the partition go there.
  absl::Status OpenParameters(uint32_t unit, GrainRange run) const;
  absl::Status SettleParameters(uint32_t unit, GrainRange run) const;
  absl::Status ReadDeviceParameters(uint32_t unit, std::span<const StateArray> arrays,
                                    GrainRange grains,
                                    std::span<std::vector<std::byte>> outs) const;
  // As TierSet::Read; parameters whose image is damaged are made anew of their masters.
  absl::Status ReadImages(std::span<const uint32_t> images, ChunkTier::Reader reader) const;
  // Of those that are damaged; the error that was met when there is something that cannot be made
  // anew.
  absl::Status RebuildParameters(std::span<const uint32_t> images, const absl::Status& met) const;
  absl::Status ParametersFromMaster(uint32_t chunk) const;
  UnitState StateOfImage(uint32_t chunk, std::byte* image) const;
  // Writes the chunk's parameters at rest, on the host, each made of its master.
  void MakeParameters(const UnitState& state, uint32_t chunk) const;
  void RestoreFromImage(uint32_t chunk, std::byte* image) const;
  void UpdateImage(const UnitUpdate& update, const TierItem& item,
                   const TierBuffers& buffers) const;
  uint32_t ParameterImageHeld(uint32_t chunk) const;
  void PutOnHost(uint32_t unit, uint64_t offset, uint64_t elements, const std::byte* values) const;
  void ClearPadding(uint32_t unit, const ElementRange& mastered, const ElementRange& copied) const;
  void MarkPut(uint32_t unit, GrainRange grains) const;
  std::vector<uint32_t> ParameterImages(uint32_t unit) const;
  // All images of the run, on the tier or not.
  std::vector<uint32_t> ImagesOf(uint32_t unit, GrainRange run) const;

  JobMemory* memory_;
  ThreadPool* pool_;
  TierSet* tiers_;
  AccumulatorSpace accumulators_;
  OptimizerKind kind_ = OptimizerKind::kAdamW;  // of a job that has one
  std::vector<UnitState> states_;               // by unit; empty where there is no optimizer
};

// The elements [begin, end) of `unit` that belong to its parameters at the positions set in
// `present`, clipped to [first, last): increasing, touching ranges merged.
std::vector<ElementRange> PresentRanges(const Layout& layout, uint32_t unit,
                                        const Presence& present, uint64_t first, uint64_t last);

inline bool IsPresent(const Presence& presence, uint32_t position) {
  return presence[position / 64] >> (position % 64) & 1;
}
// All parameters of the unit.
Presence FullPresence(const Unit& unit);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_SHARD_H_
