#include "worker/cuda/cuda_shard.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/shared_memory.h"
#include "base/status.h"
#include "storage/bytes.h"
#include "storage/layout_proto.h"
#include "worker/cuda/parameter_table.h"

namespace zeroshard {
namespace {

using internal::v1::WorkerRegion;

constexpr uint64_t kPage = 4096;
constexpr absl::Duration kTurn = absl::Milliseconds(100);
constexpr absl::Duration kFarewell = absl::Seconds(5);
constexpr size_t kSquaresBytes = 2 * kDeviceSquares * sizeof(double);

std::vector<ImagePages> PagesOf(const DevicePlan& plan) {
  std::vector<ImagePages> pages;
  for (const DeviceImage& image : plan.images()) pages.push_back({image.unit, false, image.arrays});
  return pages;
}

// Says of an error that the device's memory failed, so that it is known also where CUDA is not.
absl::Status Marked(absl::Status status) {
  if (IsMemoryFailure(status)) status.SetPayload(kMemoryLostPayload, absl::Cord());
  return status;
}

}  // namespace

CudaShard::CudaShard(JobMemory& memory, const CudaShardOptions& options)
    : memory_(memory), options_(options) {}

absl::StatusOr<std::unique_ptr<CudaShard>> CudaShard::Open(JobMemory& memory,
                                                           const CudaShardOptions& options) {
  std::unique_ptr<CudaShard> shard(new CudaShard(memory, options));
  ZS_RETURN_IF_ERROR(Marked(shard->OpenAll()));
  return shard;
}

absl::Status CudaShard::OpenAll() {
  ZS_RETURN_IF_ERROR(OpenDevice());
  ZS_RETURN_IF_ERROR(OpenStreams());
  ZS_RETURN_IF_ERROR(OpenMemory());
  ZS_RETURN_IF_ERROR(OpenTable());
  ZS_RETURN_IF_ERROR(UploadParameterTables());
  ZS_RETURN_IF_ERROR(RegisterParameters());
  return OpenMirror();
}

CudaShard::~CudaShard() {
  for (std::optional<CudaStream>* stream : {&update_stream_, &fetch_stream_, &send_stream_}) {
    if (stream->has_value()) (*stream)->Synchronize(kFarewell).IgnoreError();
  }
  ReleaseWait();
}

// A wait whose signal does not come would hold the device for ever.
void CudaShard::ReleaseWait() {
  if (!wait_stream_.has_value() || wait_stream_->Query().value_or(true)) return;
  std::atomic<uint64_t>& summed = memory_.device_counters().summed;
  const uint64_t before = summed.exchange(kDeadCounter);
  wait_stream_->Synchronize(kFarewell).IgnoreError();
  uint64_t dead = kDeadCounter;
  if (before != kDeadCounter) summed.compare_exchange_strong(dead, before);
}

absl::Status CudaShard::OpenDevice() {
  const model::v1::Device& wanted = memory_.start().device();
  ZS_ASSIGN_OR_RETURN(device_, CudaDevice::Open(static_cast<int>(wanted.ordinal())));
  const auto& uuid = device_->uuid();
  const bool same = wanted.uuid().size() == uuid.size() &&
                    std::memcmp(wanted.uuid().data(), uuid.data(), uuid.size()) == 0;
  if (!wanted.uuid().empty() && !same) {
    return absl::FailedPreconditionError(absl::StrCat(
        device_->label(), " is ", UuidText(uuid),
        " for this worker and another device for the daemon: they must see the same devices in the "
        "same order (CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER)"));
  }
  ZS_RETURN_IF_ERROR(device_->MakeCurrent());
  ZS_ASSIGN_OR_RETURN(kernels_, CudaKernels::Load(*device_));
  return absl::OkStatus();
}

absl::Status CudaShard::OpenStreams() {
  ZS_ASSIGN_OR_RETURN(update_stream_, CudaStream::Create(*device_, StreamPriority::kLow));
  ZS_ASSIGN_OR_RETURN(fetch_stream_, CudaStream::Create(*device_, StreamPriority::kNormal));
  ZS_ASSIGN_OR_RETURN(send_stream_, CudaStream::Create(*device_, StreamPriority::kNormal));
  ZS_ASSIGN_OR_RETURN(wait_stream_, CudaStream::Create(*device_, StreamPriority::kHigh));
  ZS_ASSIGN_OR_RETURN(sent_, CudaEvent::Create(*device_));
  for (int half = 0; half < 2; ++half) {
    ZS_ASSIGN_OR_RETURN(CudaEvent event, CudaEvent::Create(*device_));
    squares_events_.push_back(std::move(event));
  }
  return absl::OkStatus();
}

// What a lost device held is only free when the rank, too, has let go of it.
absl::StatusOr<DeviceMemory> CudaShard::CreateRegion(uint64_t bytes) {
  absl::StatusOr<DeviceMemory> memory = DeviceMemory::Create(*device_, bytes);
  const bool goes_back = memory_.start().recover() && memory_.mirror_plan() != nullptr;
  for (absl::Duration waited;
       goes_back && waited < options_.timeout && absl::IsResourceExhausted(memory.status());
       waited += kTurn) {
    absl::SleepFor(kTurn);
    memory_.beats().fetch_add(1, std::memory_order_relaxed);
    memory = DeviceMemory::Create(*device_, bytes);
  }
  return memory;
}

absl::StatusOr<DeviceMemory> CudaShard::OpenRegion(WorkerRegion::Kind kind, const UniqueFd& fd,
                                                   uint64_t bytes) {
  if (fd.valid()) {
    auto imported = DeviceMemory::Import(*device_, fd.get(), bytes, Access::kReadWrite);
    if (imported.ok() || absl::IsFailedPrecondition(imported.status())) return imported;
    absl::Status gone = absl::AbortedError(absl::StrCat(
        "device lost: memory that was there is not any more: ", imported.status().message()));
    gone.SetPayload(kMemoryLostPayload, absl::Cord());
    return gone;
  }
  ZS_ASSIGN_OR_RETURN(DeviceMemory memory, CreateRegion(bytes));
  ZS_RETURN_IF_ERROR(update_stream_->Fill(memory.address(), 0, memory.bytes()));
  ZS_ASSIGN_OR_RETURN(UniqueFd exported, memory.Export());
  made_.push_back({kind, memory.bytes(), std::move(exported)});
  return memory;
}

absl::Status CudaShard::OpenMemory() {
  const std::string what =
      absl::StrCat("memory of ", device_->label(), " for job ", memory_.start().job());
  auto shared =
      OpenRegion(WorkerRegion::KIND_DEVICE_SHARED, memory_.device_shared(), plan().shared_bytes());
  ZS_RETURN_IF_ERROR(Annotate(shared.status(), what));
  shared_ = *std::move(shared);
  auto states =
      OpenRegion(WorkerRegion::KIND_DEVICE_STATES, memory_.device_states(), plan().states_bytes());
  ZS_RETURN_IF_ERROR(Annotate(states.status(), what));
  states_ = *std::move(states);
  blank_ = memory_.start().recover() && !made_.empty();
  ZS_ASSIGN_OR_RETURN(counters_, RegisteredHost::Register(*device_, memory_.device_counter_page()));
  UniqueFd doorbell(dup(memory_.doorbell(memory_.worker())));
  if (!doorbell.valid()) return ErrnoError(errno, "dup", "doorbell");
  doorbell_ = std::make_shared<UniqueFd>(std::move(doorbell));
  return absl::OkStatus();
}

absl::Status CudaShard::OpenTable() {
  ZS_ASSIGN_OR_RETURN(table_,
                      DeviceTable::Open(memory_.device_table(), plan(), memory_.start().job_id(),
                                        memory_.layout().fingerprint()));
  pages_.emplace(memory_, PagesOf(plan()));
  // A predecessor may have died before it gave them back.
  for (uint32_t image = 0; image < plan().images().size(); ++image) {
    if (Holds(image)) Punch(image);
  }
  return absl::OkStatus();
}

absl::Status CudaShard::UploadParameterTables() {
  const size_t units = memory_.layout().units().size();
  for (uint32_t unit = 0; unit < units; ++unit) {
    const std::vector<DeviceParameter> table = ParameterTableOf(memory_.layout(), unit);
    if (table.empty()) continue;
    ZS_RETURN_IF_ERROR(
        update_stream_->CopyToDevice(states_.address() + plan().parameter_table(unit), table.data(),
                                     table.size() * sizeof(DeviceParameter)));
    ZS_RETURN_IF_ERROR(update_stream_->Record(squares_events_[0]));
    ZS_RETURN_IF_ERROR(Wait(squares_events_[0]));
  }
  const size_t presence = units * sizeof(Presence);
  ZS_ASSIGN_OR_RETURN(squares_, AlignedBuffer::Make(RoundUpTo(kSquaresBytes + presence, kPage)));
  ZS_ASSIGN_OR_RETURN(registered_squares_, RegisteredHost::Register(*device_, squares_->bytes()));
  return absl::OkStatus();
}

// Kernels write new parameters to where they rest.
absl::Status CudaShard::RegisterParameters() {
  if (!HasHostParameters(memory_.config())) return absl::OkStatus();
  std::vector<HostPart> parts;
  for (uint32_t unit = 0; unit < memory_.layout().units().size(); ++unit) {
    const GrainRange shard = memory_.plan().unit(unit).shard;
    const uint64_t begin = WindowOffset(unit, shard.first_element());
    parts.push_back({begin, WindowOffset(unit, shard.end * kGrainElements)});
  }
  absl::StatusOr<RegisteredParts> registered = RegisteredParts::Register(
      *device_, {memory_.window(), memory_.layout().window_bytes()}, std::move(parts),
      Access::kReadWrite, [this] { memory_.beats().fetch_add(1, std::memory_order_relaxed); });
  ZS_RETURN_IF_ERROR(Annotate(registered.status(), "parameters that rest in host memory"));
  host_parameters_ = *std::move(registered);
  return absl::OkStatus();
}

model::v1::Device CudaShard::device() const {
  model::v1::Device device;
  device.set_ordinal(static_cast<uint32_t>(device_->ordinal()));
  device.set_uuid(device_->uuid().data(), device_->uuid().size());
  device.set_name(device_->name());
  return device;
}

DeviceAddress CudaShard::GradientAddress(uint32_t unit, uint64_t element) const {
  const uint64_t first = memory_.plan().unit(unit).slice.first_element();
  const uint64_t bytes = SizeOf(*DTypeFromProto(memory_.config().accumulator_dtype()));
  return shared_.address() + plan().unit(unit).accumulator + (element - first) * bytes;
}

uint64_t CudaShard::WindowOffset(uint32_t unit, uint64_t element) const {
  const Unit& described = memory_.layout().units()[unit];
  return described.window_offset + element * SizeOf(described.dtype);
}

DeviceAddress CudaShard::ParameterAddress(uint32_t unit, uint64_t element) const {
  if (host_parameters_.has_value()) {
    return host_parameters_->address(WindowOffset(unit, element));
  }
  const uint64_t first = memory_.plan().unit(unit).shard.first_element();
  const uint64_t bytes = SizeOf(memory_.layout().units()[unit].dtype);
  return shared_.address() + plan().unit(unit).parameters + (element - first) * bytes;
}

uint64_t CudaShard::ParameterOffset(uint32_t unit, uint64_t element) const {
  const UnitPlan& planned = memory_.plan().unit(unit);
  const uint64_t bytes = SizeOf(memory_.layout().units()[unit].dtype);
  return planned.shard_data + (element - planned.shard.first_element()) * bytes;
}

absl::Status CudaShard::Note(absl::Status status) {
  if (health_.ok() && IsDeviceLost(status)) health_ = Marked(status);
  return status;
}

absl::Status CudaShard::Wait(const CudaEvent& event) {
  for (absl::Duration waited; waited < options_.timeout; waited += kTurn) {
    ZS_ASSIGN_OR_RETURN(const bool done, event.Query());
    if (done) return absl::OkStatus();
    const absl::Status status = event.Synchronize(kTurn);
    if (!absl::IsDeadlineExceeded(status)) return Note(status);
    memory_.beats().fetch_add(1, std::memory_order_relaxed);
  }
  health_ =
      absl::AbortedError(absl::StrCat("device lost: ", device_->label(), " has not answered for ",
                                      absl::FormatDuration(options_.timeout)));
  return health_;
}

absl::Status CudaShard::AwaitSums(uint64_t attempt) {
  const DeviceAddress summed = counters_.address() + offsetof(DeviceCounters, summed);
  ZS_RETURN_IF_ERROR(Note(wait_stream_->WaitValue(summed, attempt)));
  return Note(wait_stream_->Notify([doorbell = doorbell_] {
    constexpr uint64_t kOne = 1;
    // A full counter (EAGAIN) is a doorbell that rings already.
    [[maybe_unused]] const ssize_t written = write(doorbell->get(), &kOne, sizeof(kOne));
  }));
}

bool CudaShard::HasSums(uint64_t attempt) const {
  const uint64_t summed = memory_.device_counters().summed.load(std::memory_order_acquire);
  return summed >= attempt && summed != kDeadCounter;
}

absl::StatusCode CudaShard::RankError() const {
  const uint64_t error = memory_.device_counters().error.load(std::memory_order_acquire);
  if (error == 0 || error == kDeadCounter) return absl::StatusCode::kOk;
  return error <= 16 ? static_cast<absl::StatusCode>(error) : absl::StatusCode::kUnknown;
}

void CudaShard::StartCounters() {
  DeviceCounters& counters = memory_.device_counters();
  counters.error.store(0, std::memory_order_release);
  uint64_t dead = kDeadCounter;
  counters.summed.compare_exchange_strong(dead, 0);
}

DeviceCountersOfWorker CudaShard::counters() const {
  DeviceCountersOfWorker counters{.busy = busy_,
                                  .mirror = mirror_time_,
                                  .damaged_mirrors = damaged_mirrors_,
                                  .ring_bytes = ring_plan_.bytes()};
  if (const absl::StatusOr<DeviceMemoryInfo> memory = device_->Memory(); memory.ok()) {
    counters.free_bytes = memory->free;
  }
  return counters;
}

}  // namespace zeroshard
