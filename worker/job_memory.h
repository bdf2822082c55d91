// JobMemory: all that one worker maps of its job, found by meaning.
//
// Owns the mappings and the descriptors that came with WorkerStart; built once at start, constant
// after that, and read by the loop thread and the lanes. The memory itself belongs to the server
// and outlives this process; what may be written by whom is said in storage/board.h and
// docs/partition.md.
#ifndef ZEROSHARD_WORKER_JOB_MEMORY_H_
#define ZEROSHARD_WORKER_JOB_MEMORY_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/shared_memory.h"
#include "base/unique_fd.h"
#include "device/cpu/core_budget.h"
#include "proto/internal.pb.h"
#include "storage/board.h"
#include "storage/device_counters.h"
#include "storage/device_mirror.h"
#include "storage/device_plan.h"
#include "storage/layout.h"
#include "storage/nvme_plan.h"
#include "storage/partition.h"
#include "storage/rank_page.h"
#include "worker/memory_pins.h"

namespace zeroshard {

class JobMemory {
 public:
  // `fds` are the descriptors of start.regions(), in order. InvalidArgument or DataLoss when a
  // region is missing, too short, or of another job; ResourceExhausted when memory must be locked
  // and cannot be. Formats fresh regions unless start.recover().
  static absl::StatusOr<std::unique_ptr<JobMemory>> Create(internal::v1::WorkerStart start,
                                                           std::vector<UniqueFd> fds);

  const internal::v1::WorkerStart& start() const { return start_; }
  const model::v1::EngineConfig& config() const { return start_.config(); }
  const Layout& layout() const { return *layout_; }
  const PartitionPlan& plan() const { return *plan_; }
  const PartitionPlan& local_plan() const { return *local_plan_; }
  bool has_local_accumulators() const { return local_plan_.has_value(); }
  // Null in a job without an NVMe tier.
  const NvmePlan* nvme_plan() const { return nvme_plan_.has_value() ? &*nvme_plan_ : nullptr; }
  std::span<std::byte> slot_table() const { return slot_table_.bytes(); }
  // Null in a job without a data plane; the same for what follows.
  const DevicePlan* device_plan() const {
    return device_plan_.has_value() ? &*device_plan_ : nullptr;
  }
  std::span<std::byte> device_table() const { return device_table_.bytes(); }
  // The page, and the counters in it.
  std::span<std::byte> device_counter_page() const { return device_counters_.bytes(); }
  DeviceCounters& device_counters() const { return *device_counters_.As<DeviceCounters>(); }
  // Null in a job without a mirror of its device memory.
  const MirrorPlan* mirror_plan() const {
    return mirror_plan_.has_value() ? &*mirror_plan_ : nullptr;
  }
  std::span<std::byte> device_mirror() const { return device_mirror_.bytes(); }
  // Descriptors of device memory that a predecessor made; not valid in the first worker.
  const UniqueFd& device_shared() const { return device_shared_; }
  const UniqueFd& device_states() const { return device_states_; }
  const Board& board() const { return *board_; }
  const UserStates& user_states() const { return *user_states_; }

  uint32_t worker() const { return start_.worker(); }
  // Raised by whatever this worker does.
  std::atomic<uint64_t>& beats() const { return board_->worker(worker()).beats; }
  uint32_t workers() const { return start_.workers(); }
  uint32_t ranks() const { return static_cast<uint32_t>(start_.ranks_size()); }
  bool is_home_of(uint32_t rank) const { return start_.ranks(rank).home_worker() == worker(); }

  std::byte* partition() const { return partition_.data(); }
  int partition_fd() const { return partition_fd_.get(); }
  std::byte* window() const { return window_.data(); }
  int window_fd() const { return window_fd_.get(); }
  std::span<const std::byte> gradient_window(uint32_t rank) const {
    return gradients_[rank].bytes();
  }
  // Where parameters of a data plane rest on the NVMe tier, to hand them to the rank.
  std::byte* writable_gradient_window(uint32_t rank) const { return gradients_[rank].data(); }
  // Stage 1: the region of a rank's local accumulators.
  std::byte* local_accumulator(uint32_t rank) const { return local_[rank].data(); }
  // One unit of it: fp32, the whole unit.
  const std::byte* local_unit(uint32_t rank, uint32_t unit) const {
    return local_[rank].data() + local_plan_->unit(unit).accumulator;
  }
  // Completion page of a rank whose home this worker is.
  RankPage* rank_page(uint32_t rank) const;
  int doorbell(uint32_t worker) const { return doorbells_[worker].get(); }
  // Whether this worker shares memory with `worker`.
  bool in_island(uint32_t worker) const {
    return start_.worker_places(worker).island() == start_.worker_places(this->worker()).island();
  }
  // Whether all workers of the job share memory.
  bool one_island() const { return one_island_; }
  UniqueFd TakeListener() { return std::move(listener_); }
  // What passes take their cores from; nothing where nobody shares them out.
  const std::optional<CoreShare>& cores() const { return cores_; }
  // The page of the node's I/O budget, and this worker's number in it; empty where there is none.
  std::span<std::byte> io_budget() const { return io_memory_.bytes(); }
  uint32_t io_holder() const { return io_holder_; }
  // What is locked in memory; the partition is, where the job wants that, once this exists.
  MemoryPins& pins() { return pins_; }
  const MemoryPins& pins() const { return pins_; }

  // Parameters at rest of this worker's shard of a unit: in the window or in the partition. Points
  // at the unit's element 0 (which may lie outside the shard: index by element of the unit within
  // it only).
  std::byte* parameters_at_rest(uint32_t unit) const;
  // The unit in the window.
  std::byte* unit_window(uint32_t unit) const {
    return window() + layout_->units()[unit].window_offset;
  }

 private:
  JobMemory() = default;
  absl::Status MapRegions(std::vector<UniqueFd> fds);
  absl::Status MapRegion(const internal::v1::WorkerRegion& region, UniqueFd fd);
  absl::Status PlanNvme();
  absl::Status CheckRegions() const;
  absl::Status OpenBoard();
  absl::Status PinPartition();
  absl::Status OpenStates() const;
  // Formats a zeroed region of states, or checks that a predecessor's is this job's. `owner`:
  // worker or rank.
  absl::Status OpenStateRegion(std::byte* memory, const PartitionPlan& plan, uint32_t owner) const;

  internal::v1::WorkerStart start_;
  std::optional<Layout> layout_;
  std::optional<PartitionPlan> plan_;
  std::optional<PartitionPlan> local_plan_;
  std::optional<NvmePlan> nvme_plan_;
  std::optional<DevicePlan> device_plan_;
  std::optional<MirrorPlan> mirror_plan_;
  std::optional<Board> board_;
  std::optional<UserStates> user_states_;
  MappedRegion partition_;
  MappedRegion window_;
  MappedRegion board_memory_;
  MappedRegion user_state_memory_;
  MappedRegion core_memory_;
  MappedRegion slot_table_;
  MappedRegion device_table_;
  MappedRegion device_counters_;
  MappedRegion device_mirror_;
  MappedRegion io_memory_;
  uint32_t io_holder_ = 0;
  std::optional<CoreShare> cores_;
  std::vector<MappedRegion> gradients_;   // by rank
  std::vector<MappedRegion> local_;       // by rank
  std::vector<MappedRegion> rank_pages_;  // by rank
  std::vector<UniqueFd> doorbells_;       // by worker
  UniqueFd device_shared_;
  UniqueFd device_states_;
  UniqueFd window_fd_;
  UniqueFd partition_fd_;
  UniqueFd listener_;
  bool one_island_ = true;
  MemoryPins pins_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_JOB_MEMORY_H_
