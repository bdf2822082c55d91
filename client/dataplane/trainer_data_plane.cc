#include "client/dataplane/trainer_data_plane.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "absl/base/const_init.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/deadline.h"
#include "base/log.h"
#include "base/status.h"

namespace zeroshard {
namespace {

// For all that is to end, and for each part after that.
constexpr absl::Duration kAbortPatience = absl::Seconds(5);
constexpr absl::Duration kLastPatience = absl::Milliseconds(200);

DeviceUuid UuidOf(const std::array<std::byte, 16>& bytes) {
  DeviceUuid uuid;
  std::memcpy(uuid.data(), bytes.data(), uuid.size());
  return uuid;
}

// The device of this process that has the uuid.
absl::StatusOr<std::unique_ptr<CudaDevice>> OpenByUuid(const DeviceUuid& uuid) {
  ZS_ASSIGN_OR_RETURN(const std::vector<CudaDeviceInfo> devices, ListCudaDevices());
  for (const CudaDeviceInfo& device : devices) {
    if (device.uuid == uuid) return CudaDevice::Open(device.ordinal);
  }
  return absl::FailedPreconditionError(
      absl::StrCat("this process does not see the GPU ", UuidText(uuid), " of its worker: it has ",
                   devices.size(), " devices (CUDA_VISIBLE_DEVICES?)"));
}

DeviceFacts FactsOf(const CudaDevice& device) {
  DeviceFacts facts{.ordinal = device.ordinal(), .name = device.name()};
  std::memcpy(facts.uuid.data(), device.uuid().data(), facts.uuid.size());
  return facts;
}

// The predecessor's memory where it fits, else new one.
absl::StatusOr<std::shared_ptr<OwnMemory>> MemoryFor(const DataPlaneOptions& options) {
  const DeviceUuid uuid = UuidOf(options.device_uuid);
  const auto kind =
      options.config.stage < 3 ? OwnMemory::WindowKind::kWhole : OwnMemory::WindowKind::kOnDemand;
  auto old = std::dynamic_pointer_cast<OwnMemory>(options.memory);
  if (old != nullptr && old->device().uuid() == uuid &&
      old->fingerprint() == options.layout.fingerprint() && old->kind() == kind) {
    return old;
  }
  ZS_ASSIGN_OR_RETURN(std::unique_ptr<CudaDevice> device, OpenByUuid(uuid));
  return OwnMemory::Create(std::move(device), options.layout, kind);
}

absl::Status CheckOptions(const DataPlaneOptions& options) {
  const Layout& layout = options.layout;
  if (options.places.size() != layout.units().size() || options.rank >= layout.workers() ||
      options.counters == nullptr || options.counters->size() < sizeof(DeviceCounters)) {
    return absl::InvalidArgumentError("options of a data plane that do not fit together");
  }
  for (uint32_t unit = 0; unit < layout.units().size(); ++unit) {
    const DeviceUnitPlace& place = options.places[unit];
    const uint64_t elements = layout.slice(unit, options.rank).elements();
    const uint64_t parameters = elements * SizeOf(layout.units()[unit].dtype);
    const bool on_device = options.host_parameters == nullptr;
    const bool summed = layout.units()[unit].trainable && !options.config.forward_only;
    const uint64_t sums = elements * SizeOf(options.config.accumulator_dtype);
    if ((on_device && place.parameters + parameters > options.shared_bytes) ||
        (summed && (place.accumulator + sums > options.shared_bytes ||
                    place.presence + sizeof(Presence) > options.shared_bytes))) {
      return absl::DataLossError(absl::StrCat("unit ", unit, " lies outside of the ",
                                              options.shared_bytes,
                                              " bytes that the worker shares"));
    }
  }
  if (options.host_parameters != nullptr &&
      options.host_parameters->size() < layout.window_bytes()) {
    return absl::DataLossError(absl::StrCat("parameters on the host have ",
                                            options.host_parameters->size(), " bytes of ",
                                            layout.window_bytes()));
  }
  return absl::OkStatus();
}

}  // namespace

TrainerDataPlane::TrainerDataPlane(std::unique_ptr<Engine> engine, DeviceFacts facts)
    : facts_(std::move(facts)), memory_(engine->memory), engine_(std::move(engine)) {}

absl::StatusOr<std::unique_ptr<DataPlane>> TrainerDataPlane::Create(DataPlaneOptions options) {
  ZS_RETURN_IF_ERROR(CheckOptions(options));
  ZS_ASSIGN_OR_RETURN(std::shared_ptr<OwnMemory> memory, MemoryFor(options));
  options.memory = nullptr;
  auto engine = std::make_unique<Engine>(std::move(memory));
  ZS_RETURN_IF_ERROR(Open(*engine, std::move(options)));
  DeviceFacts facts = FactsOf(engine->memory->device());
  return std::unique_ptr<DataPlane>(new TrainerDataPlane(std::move(engine), std::move(facts)));
}

absl::Status TrainerDataPlane::Open(Engine& engine, DataPlaneOptions options) {
  const CudaDevice& device = engine.memory->device();
  engine.core = std::make_unique<PlaneCore>(std::move(options), device);
  PlaneCore& core = *engine.core;
  absl::StatusOr<DeviceMemory> shared = DeviceMemory::Import(
      device, core.options().shared.get(), core.options().shared_bytes, Access::kReadWrite);
  if (!shared.ok()) return Annotate(shared.status(), "memory of the worker");
  engine.shared = *std::move(shared);
  if (core.ranks() > 1) {
    ZS_ASSIGN_OR_RETURN(engine.links, RankLinks::Connect(core.options(), device, core.name()));
    core.Watch(engine.links->communicators());
  }
  ZS_ASSIGN_OR_RETURN(engine.gatherer,
                      Gatherer::Create(core, *engine.memory, engine.shared, engine.links.get()));
  if (core.config().forward_only) return absl::OkStatus();
  ZS_ASSIGN_OR_RETURN(engine.reducer, Reducer::Create(core, *engine.memory, engine.shared.address(),
                                                      engine.links.get()));
  return absl::OkStatus();
}

TrainerDataPlane::~TrainerDataPlane() {
  const bool ended = Abort(absl::CancelledError("the session was closed"));
  // What the device may still touch must stay as it is until the process ends, and findable.
  if (!ended) {
    static auto* const given_up = new std::vector<std::shared_ptr<void>>;
    static absl::Mutex mu(absl::kConstInit);
    absl::MutexLock lock(&mu);
    given_up->push_back(std::move(engine_));
  }
}

bool TrainerDataPlane::Abort(const absl::Status& reason) {
  engine_->core->Fail(reason).IgnoreError();  // ends waits of other threads, which hold the lock
  absl::MutexLock lock(&mu_);
  if (ended_ || given_up_) return ended_;
  engine_->core->Watch({});
  bool ended = true;
  const Deadline all = Deadline::After(kAbortPatience);
  if (engine_->links != nullptr) ended = engine_->links->Abort(kAbortPatience);
  const Deadline deadline = Deadline::After(std::max(all.Remaining(), kLastPatience));
  while (ended) {
    const absl::StatusOr<bool> gathers = engine_->gatherer->Idle();
    const absl::StatusOr<bool> sums = engine_->reducer == nullptr ? true : engine_->reducer->Idle();
    // A device that is lost does nothing any more.
    if (!gathers.ok() || !sums.ok() || (*gathers && *sums)) break;
    if (deadline.Passed()) {
      LogWarn(absl::StrCat(engine_->core->name(), ": the device does not come to an end within ",
                           absl::FormatDuration(kAbortPatience), "; its memory is given up"));
      ended = false;
    }
    absl::SleepFor(absl::Microseconds(200));
  }
  ended_ = ended;
  given_up_ = !ended;
  return ended;
}

template <typename Call>
absl::Status TrainerDataPlane::Guarded(Call call) {
  absl::MutexLock lock(&mu_);
  ZS_RETURN_IF_ERROR(engine_->core->Health());
  return engine_->core->Check(call());
}

CudaStream TrainerDataPlane::StreamOf(StreamHandle handle) const {
  return CudaStream::FromHandle(memory_->device(), static_cast<CUstream>(handle));
}

bool TrainerDataPlane::resident(uint32_t unit) const { return engine_->gatherer->resident(unit); }

std::shared_ptr<TrainerMemory> TrainerDataPlane::memory() const {
  absl::MutexLock lock(&mu_);
  return given_up_ ? nullptr : memory_;
}

DataPlaneStats TrainerDataPlane::stats() const {
  absl::MutexLock lock(&mu_);
  DataPlaneStats stats{.gathered_bytes = engine_->gatherer->gathered_bytes(),
                       .window_bytes = memory_->mapped_bytes(),
                       .peak_window_bytes = engine_->gatherer->peak_window_bytes(),
                       .evictions = engine_->gatherer->evictions(),
                       .host_waits = engine_->core->waits()};
  if (engine_->reducer != nullptr) {
    stats.scattered_bytes = engine_->reducer->scattered_bytes();
    stats.scattered_between_nodes = engine_->reducer->scattered_between_nodes();
    stats.slot_bytes = engine_->reducer->slots().bytes();
    stats.overflows = engine_->reducer->slots().overflows();
  }
  return stats;
}

absl::Status TrainerDataPlane::Gather(std::span<const uint32_t> units) {
  return Guarded([&] { return engine_->gatherer->Gather(units); });
}

absl::StatusOr<uint64_t> TrainerDataPlane::GatherFrom(uint32_t unit, uint64_t offset) {
  uint64_t mark = 0;
  ZS_RETURN_IF_ERROR(Guarded([&]() -> absl::Status {
    ZS_ASSIGN_OR_RETURN(mark, engine_->gatherer->GatherFrom(unit, offset));
    return absl::OkStatus();
  }));
  return mark;
}

absl::Status TrainerDataPlane::AwaitCopied(uint64_t mark) {
  return Guarded([&] { return engine_->gatherer->AwaitCopied(mark); });
}

absl::Status TrainerDataPlane::Place(uint32_t unit, std::span<const std::byte> values) {
  return Guarded([&] { return engine_->gatherer->Place(unit, values); });
}

absl::Status TrainerDataPlane::WaitOn(uint32_t unit, StreamHandle handle) {
  CudaStream stream = StreamOf(handle);
  return Guarded([&] { return engine_->gatherer->WaitOn(unit, stream); });
}

absl::Status TrainerDataPlane::WaitOnHost(uint32_t unit) {
  return Guarded([&] { return engine_->gatherer->WaitOnHost(unit); });
}

absl::Status TrainerDataPlane::Release(std::span<const uint32_t> units, StreamHandle handle) {
  CudaStream stream = StreamOf(handle);
  return Guarded([&] { return engine_->gatherer->Release(units, stream); });
}

namespace {
absl::Status NoGradients() {
  return absl::FailedPreconditionError("a forward-only job has no gradients");
}
}  // namespace

absl::StatusOr<DeviceSlot> TrainerDataPlane::AcquireSlot(uint64_t bytes) {
  DeviceSlot slot;
  ZS_RETURN_IF_ERROR(Guarded([&]() -> absl::Status {
    if (engine_->reducer == nullptr) return NoGradients();
    ZS_ASSIGN_OR_RETURN(slot, engine_->reducer->slots().Acquire(bytes));
    return absl::OkStatus();
  }));
  return slot;
}

absl::Status TrainerDataPlane::AbandonSlot(uint64_t offset) {
  return Guarded([&] {
    return engine_->reducer == nullptr ? NoGradients() : engine_->reducer->slots().Abandon(offset);
  });
}

absl::Status TrainerDataPlane::Scatter(const DeviceScatter& scatter) {
  return Guarded([&] {
    return engine_->reducer == nullptr ? NoGradients() : engine_->reducer->Scatter(scatter);
  });
}

absl::Status TrainerDataPlane::EndMicroStep(uint32_t micro_step) {
  return Guarded([&] {
    return engine_->reducer == nullptr ? NoGradients() : engine_->reducer->EndMicroStep(micro_step);
  });
}

void TrainerDataPlane::Begin(uint64_t attempt) {
  absl::MutexLock lock(&mu_);
  if (engine_->reducer != nullptr) engine_->reducer->Begin(attempt);
}

absl::Status TrainerDataPlane::Boundary() {
  return Guarded(
      [&] { return engine_->reducer == nullptr ? NoGradients() : engine_->reducer->Boundary(); });
}

absl::Status TrainerDataPlane::Committed() {
  return Guarded([&] { return engine_->gatherer->Refresh(Gatherer::Which::kTrainable); });
}

absl::Status TrainerDataPlane::Refresh() {
  return Guarded([&] { return engine_->gatherer->Refresh(Gatherer::Which::kAll); });
}

absl::Status TrainerDataPlane::Barrier() {
  return Guarded([&] { return engine_->gatherer->Barrier(); });
}

absl::Status TrainerDataPlane::Poll() {
  // Whoever holds the lock waits, and looks itself.
  if (!mu_.TryLock()) return engine_->core->Health();
  const absl::Status status = PollLocked();
  mu_.Unlock();
  return status;
}

absl::Status TrainerDataPlane::PollLocked() {
  if (ended_ || given_up_) return engine_->core->Health();
  ZS_RETURN_IF_ERROR(engine_->core->Look());
  ZS_RETURN_IF_ERROR(engine_->core->Check(engine_->gatherer->CheckProgress()));
  if (engine_->reducer == nullptr) return absl::OkStatus();
  return engine_->core->Check(engine_->reducer->CheckProgress());
}

}  // namespace zeroshard
