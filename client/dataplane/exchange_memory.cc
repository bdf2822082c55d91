#include "client/dataplane/exchange_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/status.h"
#include "worker/cuda/parameter_table.h"

namespace zeroshard {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kAlignment = 512;

uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

absl::StatusOr<DeviceMemory> Allocate(const PlaneCore& core, uint64_t bytes,
                                      std::string_view what) {
  absl::StatusOr<DeviceMemory> memory =
      DeviceMemory::Create(core.device(), std::max<uint64_t>(bytes, 1));
  if (!memory.ok()) return Annotate(memory.status(), what);
  return memory;
}

}  // namespace

absl::StatusOr<std::unique_ptr<PinnedHost>> PinnedHost::Create(const CudaDevice& device,
                                                               uint64_t bytes) {
  const uint64_t rounded = RoundUp(std::max<uint64_t>(bytes, 1), kPage);
  auto host = std::make_unique<PinnedHost>();
  host->memory_.reset(static_cast<std::byte*>(std::aligned_alloc(kPage, rounded)));
  if (host->memory_ == nullptr) return ErrnoError(ENOMEM, "allocate", "headers of gradients");
  std::memset(host->memory_.get(), 0, rounded);
  ZS_ASSIGN_OR_RETURN(host->registered_,
                      RegisteredHost::Register(device, {host->memory_.get(), rounded}));
  return host;
}

absl::StatusOr<std::unique_ptr<ExchangeMemory>> ExchangeMemory::Create(const PlaneCore& core,
                                                                       CudaStream& stream,
                                                                       const ExchangeRoom& room) {
  std::unique_ptr<ExchangeMemory> memory(new ExchangeMemory());
  memory->ranks_ = core.ranks();
  memory->room_ = room;
  const auto units = static_cast<uint32_t>(core.layout().units().size());
  memory->index_of_.assign(units, kNone);
  for (uint32_t unit = units; unit-- > 0;) {
    const Unit& plan = core.layout().units()[unit];
    if (!plan.trainable || plan.grains == 0 || core.config().forward_only) continue;
    memory->index_of_[unit] = static_cast<uint32_t>(memory->order_.size());
    memory->order_.push_back(unit);
  }
  ZS_RETURN_IF_ERROR(memory->MakeTables(core, stream));
  ZS_RETURN_IF_ERROR(memory->MakeBuffers(core));
  return memory;
}

absl::Status ExchangeMemory::MakeTables(const PlaneCore& core, CudaStream& stream) {
  std::vector<DeviceParameter> all;
  for (const uint32_t unit : order_) {
    // Tables are read by vector loads.
    while (all.size() * sizeof(DeviceParameter) % kAlignment != 0) all.emplace_back();
    table_offsets_.push_back(all.size() * sizeof(DeviceParameter));
    const std::vector<DeviceParameter> table = ParameterTableOf(core.layout(), unit);
    all.insert(all.end(), table.begin(), table.end());
  }
  const uint64_t bytes = all.size() * sizeof(DeviceParameter);
  ZS_ASSIGN_OR_RETURN(tables_, Allocate(core, bytes, "tables of parameters"));
  if (bytes == 0) return absl::OkStatus();
  ZS_RETURN_IF_ERROR(stream.CopyToDevice(tables_.address(), all.data(), bytes));
  return stream.Synchronize(core.options().timeout);
}

absl::Status ExchangeMemory::MakeBuffers(const PlaneCore& core) {
  const bool local = core.config().local_sums;
  uint64_t local_bytes = 0;
  for (const uint32_t unit : order_) {
    const Unit& plan = core.layout().units()[unit];
    const uint64_t element = local ? sizeof(float) : SizeOf(plan.dtype);
    for (uint32_t rank = 0; rank < ranks_; ++rank) {
      const uint64_t elements = core.layout().slice(unit, rank).elements();
      piece_stride_ = std::max(piece_stride_, RoundUp(elements * element, kAlignment));
      part_stride_ = std::max(part_stride_, RoundUp(elements * sizeof(float), kAlignment));
    }
    local_offsets_.push_back(local_bytes);
    local_bytes += RoundUp(plan.elements() * sizeof(float), kAlignment);
  }
  if (ranks_ > 1) {
    ZS_ASSIGN_OR_RETURN(
        staging_, Allocate(core, piece_stride_ * (room_.pieces + 1) + part_stride_ * room_.parts,
                           "gradients of other ranks"));
  }
  if (room_.parts > 0) {
    ZS_ASSIGN_OR_RETURN(presences_, Allocate(core, room_.parts * sizeof(Presence),
                                             "what sums of other nodes hold"));
  }
  if (local) {
    ZS_ASSIGN_OR_RETURN(local_, Allocate(core, local_bytes, "sums over micro-steps"));
  }
  ZS_ASSIGN_OR_RETURN(headers_, Allocate(core, headers_bytes(), "headers of gradients"));
  ZS_ASSIGN_OR_RETURN(arrived_, PinnedHost::Create(core.device(), headers_bytes()));
  ZS_ASSIGN_OR_RETURN(outgoing_, PinnedHost::Create(core.device(), kTurns * order_.size() *
                                                                       sizeof(ExchangeHeader)));
  return absl::OkStatus();
}

}  // namespace zeroshard
