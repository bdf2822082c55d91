#include "client/dataplane/gatherer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/log.h"
#include "base/status.h"

namespace zeroshard {
namespace {

// Units that are gathered by one operation.
constexpr size_t kUnitsAtOnce = 32;

}  // namespace

Gatherer::Gatherer(PlaneCore& core, OwnMemory& memory, DeviceAddress shared, RankLinks* links,
                   StreamLog log)
    : core_(core),
      memory_(memory),
      shared_(shared),
      links_(links),
      log_(std::move(log)),
      units_(core.layout().units().size()) {
  for (uint32_t unit = 0; unit < units_.size(); ++unit) {
    units_[unit].resident = core.config().stage < 3 ||
                            core.layout().persistent(unit, core.config().persistence_threshold);
    // Of a predecessor.
    if (!memory.mapped(unit) || units_[unit].resident) continue;
    mapped_elements_ += core.layout().units()[unit].elements();
    units_[unit].idle = idle_.insert(idle_.end(), unit);
  }
}

absl::StatusOr<std::unique_ptr<Gatherer>> Gatherer::Create(PlaneCore& core, OwnMemory& memory,
                                                           const DeviceMemory& shared,
                                                           RankLinks* links) {
  ZS_ASSIGN_OR_RETURN(StreamLog log, StreamLog::Create(core.device(), StreamPriority::kHigh));
  std::unique_ptr<Gatherer> gatherer(
      new Gatherer(core, memory, shared.address(), links, std::move(log)));
  gatherer->RegisterHostParameters();
  ZS_RETURN_IF_ERROR(gatherer->RegisterRing());
  ZS_RETURN_IF_ERROR(gatherer->Register(shared));
  return gatherer;
}

absl::Status Gatherer::Register(const DeviceMemory& shared) {
  if (links_ == nullptr || !links_->registers() ||
      memory_.kind() != OwnMemory::WindowKind::kWhole) {
    return absl::OkStatus();
  }
  for (uint32_t unit = 0; unit < units_.size(); ++unit) ZS_RETURN_IF_ERROR(Map(unit));
  if (memory_.mapped_bytes() == 0) return absl::OkStatus();
  const CurrentDevice current(core_.device());
  ZS_RETURN_IF_ERROR(current.status());
  ZS_RETURN_IF_ERROR(links_->Register({shared.address(), shared.bytes()}));
  return links_->Register({memory_.window_address(), memory_.mapped_bytes()});
}

void Gatherer::RegisterHostParameters() {
  const auto& window = core_.options().host_parameters;
  if (window == nullptr) return;
  std::vector<HostPart> parts;
  for (uint32_t unit = 0; unit < units_.size(); ++unit) {
    // Pages of others come and go.
    if (core_.options().ring != nullptr && !units_[unit].resident) continue;
    const Unit& described = core_.layout().units()[unit];
    const GrainRange slice = core_.layout().slice(unit, core_.rank());
    const uint64_t begin =
        described.window_offset + slice.first_element() * SizeOf(described.dtype);
    parts.push_back({begin, begin + slice.elements() * SizeOf(described.dtype)});
  }
  auto registered = RegisteredParts::Register(core_.device(), {window->data(), window->size()},
                                              std::move(parts), Access::kReadOnly);
  if (registered.ok()) {
    host_parameters_ = *std::move(registered);
  } else {
    LogWarn(absl::StrCat(core_.name(), ": gathers of parameters on the host are slow: ",
                         registered.status().message()));
  }
}

// Copies of other memory would wait for the stream.
absl::Status Gatherer::RegisterRing() {
  const auto& ring = core_.options().ring;
  if (ring == nullptr) return absl::OkStatus();
  absl::StatusOr<RegisteredHost> registered =
      RegisteredHost::Register(core_.device(), ring->bytes());
  ZS_RETURN_IF_ERROR(
      Annotate(registered.status(), "memory through which parameters come from nvme"));
  ring_ = *std::move(registered);
  return absl::OkStatus();
}

absl::Status Gatherer::FetchSlice(uint32_t unit, const std::byte* shard) {
  const Unit& described = core_.layout().units()[unit];
  const GrainRange slice = core_.layout().slice(unit, core_.rank());
  const uint64_t at = slice.first_element() * SizeOf(described.dtype);
  if (shard == nullptr) {
    shard = core_.options().host_parameters->data() + described.window_offset + at;
  }
  if (slice.size() == 0) return absl::OkStatus();
  return log_.stream().CopyToDevice(memory_.address(unit) + at, shard,
                                    slice.elements() * SizeOf(described.dtype));
}

absl::Status Gatherer::CheckUnits(std::span<const uint32_t> units) const {
  for (const uint32_t unit : units) {
    if (unit < units_.size()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("there is no unit ", unit, ": the job has ", units_.size()));
  }
  return absl::OkStatus();
}

absl::Status Gatherer::Gather(std::span<const uint32_t> units) {
  ZS_RETURN_IF_ERROR(CheckUnits(units));
  std::vector<uint32_t> some;
  for (size_t i = 0; i < units.size(); ++i) {
    Use& use = units_[units[i]];
    ++use.users;
    Busy(use);
    if (!use.resident || use.mark == 0) {
      ZS_RETURN_IF_ERROR(Map(units[i]));
      some.push_back(units[i]);
    }
    if (some.size() < kUnitsAtOnce && i + 1 < units.size()) continue;
    ZS_RETURN_IF_ERROR(Enqueue(some));
    some.clear();
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> Gatherer::GatherFrom(uint32_t unit, uint64_t offset) {
  ZS_RETURN_IF_ERROR(CheckUnits({&unit, 1}));
  Use& use = units_[unit];
  const uint64_t bytes = core_.layout().slice(unit, core_.rank()).elements() *
                         SizeOf(core_.layout().units()[unit].dtype);
  const auto& ring = core_.options().ring;
  if (use.resident || ring == nullptr || bytes > ring->size() || offset > ring->size() - bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("a shard of unit ", unit, " at byte ", offset, " of the ring"));
  }
  ++use.users;
  Busy(use);
  ZS_RETURN_IF_ERROR(Map(unit));
  ZS_RETURN_IF_ERROR(Enqueue({&unit, 1}, ring->data() + offset));
  return copied_;
}

absl::Status Gatherer::AwaitCopied(uint64_t mark) {
  return core_.Await([&] { return log_.Done(mark); }, "a copy of parameters to the device");
}

absl::Status Gatherer::Place(uint32_t unit, std::span<const std::byte> values) {
  ZS_RETURN_IF_ERROR(CheckUnits({&unit, 1}));
  Use& use = units_[unit];
  if (use.resident || values.size() != core_.layout().units()[unit].bytes()) {
    return absl::InvalidArgumentError(absl::StrCat("values of ", values.size(), " bytes for unit ",
                                                   unit, ", which ",
                                                   use.resident ? "stays gathered" : "has others"));
  }
  ++use.users;
  Busy(use);
  ZS_RETURN_IF_ERROR(Map(unit));
  if (use.has_release) ZS_RETURN_IF_ERROR(log_.stream().WaitFor(*use.released));
  use.has_release = false;
  ZS_RETURN_IF_ERROR(CopyFromHost(unit, values));
  ZS_ASSIGN_OR_RETURN(use.mark, log_.Mark({"copy from the host", unit}));
  return WaitOnHost(unit);
}

// Of parameters that rest on the host, some are known to CUDA.
absl::Status Gatherer::CopyFromHost(uint32_t unit, std::span<const std::byte> values) {
  const uint64_t place = core_.layout().units()[unit].window_offset;
  for (uint64_t at = 0; at < values.size();) {
    uint64_t end = values.size();
    if (host_parameters_) end = host_parameters_->RunEnd(place + at, place + end) - place;
    ZS_RETURN_IF_ERROR(
        log_.stream().CopyToDevice(memory_.address(unit) + at, values.data() + at, end - at));
    at = end;
  }
  return absl::OkStatus();
}

absl::Status Gatherer::Refresh(Which which) {
  std::vector<uint32_t> some;
  for (uint32_t unit = 0; unit < units_.size(); ++unit) {
    const bool wanted = which == Which::kAll || core_.layout().units()[unit].trainable;
    if (units_[unit].resident && units_[unit].mark != 0 && wanted) some.push_back(unit);
    if (some.size() < kUnitsAtOnce) continue;
    ZS_RETURN_IF_ERROR(Enqueue(some));
    some.clear();
  }
  return Enqueue(some);
}

NcclGather Gatherer::PlanOf(uint32_t unit) const {
  const Layout& layout = core_.layout();
  const uint64_t element = SizeOf(layout.units()[unit].dtype);
  NcclGather gather;
  for (uint32_t rank = 0; rank < core_.ranks(); ++rank) {
    const GrainRange slice = layout.slice(unit, rank);
    gather.receive.push_back(
        {memory_.address(unit) + slice.first_element() * element, slice.elements() * element});
  }
  gather.send = gather.receive[core_.rank()];
  if (core_.options().host_parameters != nullptr) return gather;
  gather.send = {shared_ + core_.place(unit).parameters, gather.receive[core_.rank()].bytes};
  return gather;
}

absl::Status Gatherer::Enqueue(std::span<const uint32_t> units, const std::byte* shard) {
  if (units.empty()) return absl::OkStatus();
  ZS_FAULT_POINT("client.dataplane.gather");
  std::vector<NcclGather> gathers;
  for (const uint32_t unit : units) {
    Use& use = units_[unit];
    if (use.has_release) ZS_RETURN_IF_ERROR(log_.stream().WaitFor(*use.released));
    use.has_release = false;
    if (core_.layout().units()[unit].grains == 0) continue;
    if (core_.options().host_parameters != nullptr) ZS_RETURN_IF_ERROR(FetchSlice(unit, shard));
    if (shard != nullptr) {
      ZS_ASSIGN_OR_RETURN(copied_, log_.Mark({"copy from the host", unit}));
    }
    gathers.push_back(PlanOf(unit));
    gathered_bytes_ += core_.layout().units()[unit].bytes() - gathers.back().send.bytes;
  }
  if (links_ != nullptr && !gathers.empty()) {
    const CurrentDevice current(core_.device());
    ZS_RETURN_IF_ERROR(current.status());
    ZS_RETURN_IF_ERROR(links_->AllGather(log_.stream().handle(), gathers));
  } else if (core_.options().host_parameters == nullptr) {
    for (const NcclGather& gather : gathers) {
      ZS_RETURN_IF_ERROR(log_.stream().CopyOnDevice(gather.receive[0].address, gather.send.address,
                                                    gather.send.bytes));
    }
  }
  ZS_ASSIGN_OR_RETURN(const uint64_t mark, log_.Mark({"all-gather", units.front()}));
  for (const uint32_t unit : units) units_[unit].mark = mark;
  return absl::OkStatus();
}

absl::Status Gatherer::WaitOn(uint32_t unit, CudaStream& stream) {
  ZS_RETURN_IF_ERROR(CheckUnits({&unit, 1}));
  if (units_[unit].mark == 0) {
    return absl::FailedPreconditionError(absl::StrCat("unit ", unit, " was not gathered"));
  }
  return log_.Order(stream, units_[unit].mark);
}

absl::Status Gatherer::WaitOnHost(uint32_t unit) {
  ZS_RETURN_IF_ERROR(CheckUnits({&unit, 1}));
  if (units_[unit].mark == 0) {
    return absl::FailedPreconditionError(absl::StrCat("unit ", unit, " was not gathered"));
  }
  return core_.Await([&] { return log_.Done(units_[unit].mark); },
                     absl::StrCat("the all-gather of unit ", unit));
}

absl::Status Gatherer::Release(std::span<const uint32_t> units, CudaStream& stream) {
  ZS_RETURN_IF_ERROR(CheckUnits(units));
  for (const uint32_t unit : units) {
    Use& use = units_[unit];
    if (use.users == 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("release of unit ", unit, ", which is not gathered"));
    }
    if (!use.released.has_value()) {
      ZS_ASSIGN_OR_RETURN(use.released, CudaEvent::Create(core_.device()));
    }
    // An event holds one point: that of another stream before is waited for by the next gather.
    if (use.has_release) ZS_RETURN_IF_ERROR(log_.stream().WaitFor(*use.released));
    ZS_RETURN_IF_ERROR(stream.Record(*use.released));
    use.has_release = true;
    if (--use.users == 0 && !use.resident) use.idle = idle_.insert(idle_.end(), unit);
  }
  return absl::OkStatus();
}

absl::Status Gatherer::Barrier() {
  if (links_ == nullptr) return absl::OkStatus();
  constexpr uint64_t kBytes = 256;
  if (meeting_.address() == 0) {
    ZS_ASSIGN_OR_RETURN(meeting_, DeviceMemory::Create(core_.device(), core_.ranks() * kBytes));
  }
  NcclGather gather;
  for (uint32_t rank = 0; rank < core_.ranks(); ++rank) {
    gather.receive.push_back({meeting_.address() + rank * kBytes, kBytes});
  }
  gather.send = gather.receive[core_.rank()];
  const CurrentDevice current(core_.device());
  ZS_RETURN_IF_ERROR(current.status());
  ZS_RETURN_IF_ERROR(links_->AllGather(log_.stream().handle(), {&gather, 1}));
  ZS_ASSIGN_OR_RETURN(const uint64_t mark, log_.Mark({"barrier, behind the all-gather", 0}));
  return core_.Await([&] { return log_.Done(mark); }, "a barrier of all ranks");
}

void Gatherer::Busy(Use& use) {
  if (!use.idle.has_value()) return;
  idle_.erase(*use.idle);
  use.idle.reset();
}

absl::Status Gatherer::Map(uint32_t unit) {
  if (memory_.mapped(unit)) return absl::OkStatus();
  const uint64_t elements = units_[unit].resident ? 0 : core_.layout().units()[unit].elements();
  const uint64_t limit = core_.config().max_live_elements;
  while (elements > 0 && limit > 0 && mapped_elements_ + elements > limit && !idle_.empty()) {
    ZS_RETURN_IF_ERROR(EvictOldest());
  }
  absl::Status mapped = memory_.Map(unit);
  while (absl::IsResourceExhausted(mapped) && !idle_.empty()) {
    ZS_RETURN_IF_ERROR(EvictOldest());
    mapped = memory_.Map(unit);
  }
  if (!mapped.ok()) return Annotate(mapped, absl::StrCat("window memory of unit ", unit));
  mapped_elements_ += elements;
  peak_window_bytes_ = std::max(peak_window_bytes_, memory_.mapped_bytes());
  return absl::OkStatus();
}

// The device must be done with what is unmapped: the host waits here if it is far ahead.
absl::Status Gatherer::EvictOldest() {
  const uint32_t unit = idle_.front();
  Use& use = units_[unit];
  ZS_RETURN_IF_ERROR(core_.Await(
      [&]() -> absl::StatusOr<bool> {
        ZS_ASSIGN_OR_RETURN(const bool gathered, log_.Done(use.mark));
        return gathered && use.has_release ? use.released->Query() : gathered;
      },
      absl::StrCat("the last use of unit ", unit)));
  Busy(use);
  use.has_release = false;
  use.mark = 0;
  mapped_elements_ -= core_.layout().units()[unit].elements();
  ++evictions_;
  return memory_.Unmap(unit);
}

}  // namespace zeroshard
