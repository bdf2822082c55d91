#include "worker/job_memory.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "storage/layout_proto.h"
#include "storage/undo_area.h"

namespace zeroshard {
namespace {

using internal::v1::WorkerRegion;

absl::Status Missing(absl::string_view what, uint64_t index) {
  return absl::InvalidArgumentError(absl::StrCat("the start message brings no ", what, " ", index));
}

BoardShape ShapeOf(const internal::v1::WorkerStart& start, const Layout& layout) {
  return {.workers = start.workers(),
          .ranks = static_cast<uint32_t>(start.ranks_size()),
          .units = static_cast<uint32_t>(layout.units().size()),
          .parameters = static_cast<uint32_t>(layout.parameters().size())};
}

}  // namespace

absl::StatusOr<std::unique_ptr<JobMemory>> JobMemory::Create(internal::v1::WorkerStart start,
                                                             std::vector<UniqueFd> fds) {
  if (fds.size() != static_cast<size_t>(start.regions_size())) {
    return absl::InvalidArgumentError(absl::StrCat("the start message names ", start.regions_size(),
                                                   " regions but brings ", fds.size(),
                                                   " descriptors"));
  }
  std::unique_ptr<JobMemory> memory(new JobMemory());
  memory->start_ = std::move(start);
  ZS_ASSIGN_OR_RETURN(Layout layout,
                      LayoutFromProto(memory->start_.manifest(), memory->start_.workers()));
  if (layout.fingerprint() != memory->start_.layout_fingerprint()) {
    return absl::InvalidArgumentError("server and worker compute different layouts: mixed builds");
  }
  memory->layout_ = std::move(layout);
  ZS_ASSIGN_OR_RETURN(memory->plan_,
                      PartitionPlan::Create(*memory->layout_, memory->config(), memory->worker(),
                                            memory->start_.lanes()));
  if (UsesLocalAccumulators(memory->config())) {
    ZS_ASSIGN_OR_RETURN(
        memory->local_plan_,
        PartitionPlan::CreateLocal(*memory->layout_, memory->config(), memory->start_.lanes()));
  }
  ZS_RETURN_IF_ERROR(memory->PlanNvme());
  if (DevicePlan::Exists(memory->config())) {
    ZS_ASSIGN_OR_RETURN(memory->device_plan_,
                        DevicePlan::Create(*memory->layout_, *memory->plan_, memory->config()));
  }
  if (MirrorPlan::Exists(memory->config())) {
    memory->mirror_plan_ = MirrorPlan::Create(*memory->layout_, *memory->plan_,
                                              *memory->device_plan_, memory->config());
  }
  for (uint32_t worker = 0; worker < memory->workers(); ++worker) {
    memory->one_island_ &= memory->in_island(worker);
  }
  ZS_RETURN_IF_ERROR(memory->MapRegions(std::move(fds)));
  ZS_RETURN_IF_ERROR(memory->OpenBoard());
  ZS_RETURN_IF_ERROR(memory->PinPartition());
  ZS_RETURN_IF_ERROR(memory->OpenStates());
  return memory;
}

absl::Status JobMemory::PlanNvme() {
  if (!NvmePlan::Exists(config())) return absl::OkStatus();
  std::vector<uint64_t> weights;
  for (const internal::v1::NvmePath& path : start_.nvme_paths()) weights.push_back(path.weight());
  ZS_ASSIGN_OR_RETURN(nvme_plan_, NvmePlan::Create(*layout_, *plan_, config(), weights));
  return absl::OkStatus();
}

absl::Status JobMemory::MapRegions(std::vector<UniqueFd> fds) {
  gradients_.resize(ranks());
  local_.resize(ranks());
  rank_pages_.resize(ranks());
  doorbells_.resize(workers());
  for (int i = 0; i < start_.regions_size(); ++i) {
    const WorkerRegion& region = start_.regions(i);
    ZS_RETURN_IF_ERROR(Annotate(
        MapRegion(region, std::move(fds[i])),
        absl::StrCat("region ", WorkerRegion::Kind_Name(region.kind()), " ", region.index())));
  }
  return CheckRegions();
}

absl::Status JobMemory::MapRegion(const WorkerRegion& region, UniqueFd fd) {
  const uint32_t index = region.index();
  const uint32_t limit = region.kind() == WorkerRegion::KIND_DOORBELL ? workers() : ranks();
  const bool by_rank = region.kind() == WorkerRegion::KIND_GRADIENT_WINDOW ||
                       region.kind() == WorkerRegion::KIND_RANK_PAGE ||
                       region.kind() == WorkerRegion::KIND_LOCAL_ACCUMULATOR;
  if ((by_rank || region.kind() == WorkerRegion::KIND_DOORBELL) && index >= limit) {
    return absl::InvalidArgumentError("index out of range");
  }
  auto map = [&](Access access, MappedRegion& target) -> absl::Status {
    ZS_RETURN_IF_ERROR(VerifySealed(fd.get(), region.bytes()));
    ZS_ASSIGN_OR_RETURN(target, MappedRegion::Map(fd.get(), region.bytes(), access));
    return absl::OkStatus();
  };
  switch (region.kind()) {
    case WorkerRegion::KIND_PARTITION:
      ZS_RETURN_IF_ERROR(map(Access::kReadWrite, partition_));
      partition_fd_ = std::move(fd);
      return absl::OkStatus();
    case WorkerRegion::KIND_SLOT_TABLE:
      return map(Access::kReadWrite, slot_table_);
    case WorkerRegion::KIND_DEVICE_TABLE:
      return map(Access::kReadWrite, device_table_);
    case WorkerRegion::KIND_DEVICE_COUNTERS:
      return map(Access::kReadWrite, device_counters_);
    case WorkerRegion::KIND_DEVICE_MIRROR:
      return map(Access::kReadWrite, device_mirror_);
    case WorkerRegion::KIND_DEVICE_SHARED:
      device_shared_ = std::move(fd);
      return absl::OkStatus();
    case WorkerRegion::KIND_DEVICE_STATES:
      device_states_ = std::move(fd);
      return absl::OkStatus();
    case WorkerRegion::KIND_IO_BUDGET:
      io_holder_ = index;
      return map(Access::kReadWrite, io_memory_);
    case WorkerRegion::KIND_PARAMETER_WINDOW:
      ZS_RETURN_IF_ERROR(map(Access::kReadWrite, window_));
      window_fd_ = std::move(fd);
      return absl::OkStatus();
    case WorkerRegion::KIND_GRADIENT_WINDOW:
      return map(HasNvmeParameters(config()) ? Access::kReadWrite : Access::kReadOnly,
                 gradients_[index]);
    case WorkerRegion::KIND_BOARD:
      return map(Access::kReadWrite, board_memory_);
    case WorkerRegion::KIND_RANK_PAGE:
      return map(Access::kReadWrite, rank_pages_[index]);
    case WorkerRegion::KIND_LOCAL_ACCUMULATOR:
      return map(Access::kReadWrite, local_[index]);
    case WorkerRegion::KIND_USER_STATE:
      return map(Access::kReadWrite, user_state_memory_);
    case WorkerRegion::KIND_CORE_BUDGET: {
      ZS_RETURN_IF_ERROR(map(Access::kReadWrite, core_memory_));
      ZS_ASSIGN_OR_RETURN(const CoreBudget budget, CoreBudget::Adopt(core_memory_.bytes()));
      if (index >= CoreBudget::kMaxHolders) return absl::InvalidArgumentError("no such holder");
      cores_ = CoreShare{.budget = budget, .holder = index};
      return absl::OkStatus();
    }
    case WorkerRegion::KIND_DOORBELL:
      doorbells_[index] = std::move(fd);
      return absl::OkStatus();
    case WorkerRegion::KIND_LISTENER:
      listener_ = std::move(fd);
      return absl::OkStatus();
    default:
      return absl::InvalidArgumentError("unknown kind of region");
  }
}

absl::Status JobMemory::CheckRegions() const {
  if (partition_.size() < plan_->bytes())
    return Missing("partition of enough bytes for worker", worker());
  if (nvme_plan_.has_value() && slot_table_.size() < nvme_plan_->table_bytes())
    return Missing("slot table of enough bytes for worker", worker());
  if (device_plan_.has_value() && device_table_.size() < device_plan_->table_bytes())
    return Missing("device table of enough bytes for worker", worker());
  if (device_plan_.has_value() && device_counters_.size() < kDeviceCounterBytes)
    return Missing("page of device counters for worker", worker());
  if (mirror_plan_.has_value() && device_mirror_.size() < mirror_plan_->bytes())
    return Missing("mirror of enough bytes for worker", worker());
  if (window_.size() < layout_->window_bytes())
    return Missing("parameter window of enough bytes", 0);
  const uint64_t user_bytes = UserStates::Bytes(ranks(), config().user_state_bytes());
  if (user_state_memory_.size() < user_bytes)
    return Missing("user state region of enough bytes", 0);
  for (uint32_t w = 0; w < workers(); ++w) {
    if (in_island(w) && !doorbells_[w].valid()) {
      return Missing("doorbell of worker", w);
    }
  }
  const uint32_t island = start_.worker_places(worker()).island();
  for (uint32_t r = 0; r < ranks(); ++r) {
    if (start_.ranks(r).home_worker() >= workers()) return Missing("home worker of rank", r);
    if (start_.ranks(r).island() != island) continue;
    if (gradients_[r].size() == 0) return Missing("gradient window of rank", r);
    if (is_home_of(r) && rank_pages_[r].size() < sizeof(RankPage))
      return Missing("page of rank", r);
    if (local_plan_.has_value() && local_[r].size() < local_plan_->bytes()) {
      return Missing("local accumulator of rank", r);
    }
  }
  return absl::OkStatus();
}

absl::Status JobMemory::OpenBoard() {
  // The server formats the board before the first worker starts.
  ZS_ASSIGN_OR_RETURN(board_, Board::Adopt(board_memory_.bytes(), ShapeOf(start_, *layout_),
                                           start_.job_id(), layout_->fingerprint()));
  user_states_.emplace(user_state_memory_.bytes(), ranks(), config().user_state_bytes());
  return absl::OkStatus();
}

absl::Status JobMemory::PinPartition() {
  pins_ = MemoryPins(start_, cores_);
  uint64_t staging = 0;  // pinned when the tier opens
  if (nvme_plan_.has_value()) {
    staging =
        nvme_plan_->max_image_bytes() * nvme_plan_->StagingBuffers(config().nvme(), start_.lanes());
  }
  return pins_.PinStates(partition_.bytes(), staging);
}

absl::Status JobMemory::OpenStates() const {
  ZS_RETURN_IF_ERROR(OpenStateRegion(partition_.data(), *plan_, worker()));
  if (!local_plan_.has_value()) return absl::OkStatus();
  for (uint32_t r = 0; r < ranks(); ++r) {
    if (!is_home_of(r)) continue;
    ZS_RETURN_IF_ERROR(
        Annotate(OpenStateRegion(local_[r].data(), *local_plan_, r), "local accumulator"));
  }
  return absl::OkStatus();
}

absl::Status JobMemory::OpenStateRegion(std::byte* memory, const PartitionPlan& plan,
                                        uint32_t owner) const {
  auto* header = reinterpret_cast<PartitionHeader*>(memory);
  if (header->formatted == 1) {
    if (header->magic != kPartitionMagic || header->version != kPartitionVersion ||
        header->job_id != start_.job_id() || header->owner != owner ||
        header->layout_fingerprint != layout_->fingerprint() || header->bytes != plan.bytes()) {
      return absl::DataLossError("the region does not belong to this worker, job or version");
    }
    return absl::OkStatus();
  }
  const auto chunks = std::max<uint32_t>(1, static_cast<uint32_t>(plan.chunks().size()));
  ZS_RETURN_IF_ERROR(
      UndoArea::Format(memory + plan.undo_offset(), plan.undo_bytes(), start_.lanes(), chunks)
          .status());
  header->magic = kPartitionMagic;
  header->version = kPartitionVersion;
  header->owner = owner;
  header->job_id = start_.job_id();
  header->layout_fingerprint = layout_->fingerprint();
  header->bytes = plan.bytes();
  std::atomic_thread_fence(std::memory_order_release);
  header->formatted = 1;
  return absl::OkStatus();
}

RankPage* JobMemory::rank_page(uint32_t rank) const { return rank_pages_[rank].As<RankPage>(); }

std::byte* JobMemory::parameters_at_rest(uint32_t unit) const {
  const UnitPlan& unit_plan = plan_->unit(unit);
  if (unit_plan.resident) return unit_window(unit);
  const uint64_t skipped = unit_plan.shard.first_element() * SizeOf(layout_->units()[unit].dtype);
  return partition() + unit_plan.shard_data - skipped;
}

}  // namespace zeroshard
