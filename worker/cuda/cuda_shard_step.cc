// A step on the device: norms, updates from image to image, and what goes over the host.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/status.h"
#include "storage/layout_proto.h"
#include "worker/cuda/cuda_shard.h"

namespace zeroshard {
namespace {

// Updates behind one event.
constexpr size_t kBatch = 8;

class Stopwatch {
 public:
  explicit Stopwatch(absl::Duration& total) : total_(total) {}
  ~Stopwatch() { total_ += absl::Now() - start_; }

 private:
  absl::Duration& total_;
  const absl::Time start_ = absl::Now();
};

std::span<const UpdateSegment> Clip(std::span<const UpdateSegment> segments, uint64_t begin,
                                    uint64_t end) {
  const auto first =
      std::partition_point(segments.begin(), segments.end(),
                           [&](const UpdateSegment& segment) { return segment.end <= begin; });
  const auto last = std::partition_point(
      first, segments.end(), [&](const UpdateSegment& segment) { return segment.begin < end; });
  return {first, last};
}

}  // namespace

absl::Status CudaShard::FlushSquares(uint32_t half, uint64_t count) {
  const uint64_t at = half * kDeviceSquares * sizeof(double);
  ZS_RETURN_IF_ERROR(update_stream_->CopyToHost(
      squares_->data() + at, states_.address() + plan().squares() + at, count * sizeof(double)));
  squares_pending_[half] = count;
  return update_stream_->Record(squares_events_[half]);
}

absl::Status CudaShard::CollectSquares(uint32_t half, ThreadPool& pool, ExactSum& sum) {
  const uint64_t count = std::exchange(squares_pending_[half], 0);
  if (count == 0) return absl::OkStatus();
  ZS_RETURN_IF_ERROR(Wait(squares_events_[half]));
  const auto* const numbers =
      reinterpret_cast<const double*>(squares_->data()) + half * kDeviceSquares;
  std::vector<ExactSum> parts(pool.lanes());
  pool.ParallelFor(parts.size(), [&](size_t item, int) {
    const ItemRange range = ItemsOfLane(count, static_cast<int>(item), pool.lanes());
    for (uint64_t i = range.begin; i < range.end; ++i) parts[item].Add(numbers[i]);
    parts[item].Normalize();
  });
  for (const ExactSum& part : parts) sum.Merge(part);
  return absl::OkStatus();
}

absl::Status CudaShard::AddSquares(std::span<const DeviceSquares> units, ThreadPool& pool,
                                   ExactSum& sum) {
  const Stopwatch watch(busy_);
  if (units.empty()) return absl::OkStatus();
  ZS_ASSIGN_OR_RETURN(const DType dtype, DTypeFromProto(memory_.config().accumulator_dtype()));
  auto* const presence =
      reinterpret_cast<Presence*>(squares_->data() + 2 * kDeviceSquares * sizeof(double));
  for (const DeviceSquares& unit : units) presence[unit.unit] = unit.present;
  squares_pending_[0] = squares_pending_[1] = 0;
  ZS_RETURN_IF_ERROR(
      Note(update_stream_->CopyToDevice(states_.address() + plan().presence(0), presence,
                                        memory_.layout().units().size() * sizeof(Presence))));
  uint32_t half = 0;
  uint64_t used = 0;
  for (const DeviceSquares& unit : units) {
    const GrainRange slice = memory_.plan().unit(unit.unit).slice;
    const auto parameters =
        static_cast<uint32_t>(memory_.layout().units()[unit.unit].parameters.size());
    for (uint64_t grain = slice.begin; grain < slice.end;) {
      const uint64_t grains = std::min(slice.end - grain, kDeviceSquares - used);
      const uint64_t at = half * kDeviceSquares + used;
      ZS_RETURN_IF_ERROR(Note(kernels_->Squares(
          *update_stream_,
          {.accumulator = GradientAddress(unit.unit, grain * kGrainElements),
           .dtype = dtype,
           .presence = states_.address() + plan().presence(unit.unit),
           .parameters = states_.address() + plan().parameter_table(unit.unit),
           .parameter_count = parameters,
           .first = grain * kGrainElements,
           .elements = grains * kGrainElements,
           .squares = states_.address() + plan().squares() + at * sizeof(double)})));
      grain += grains;
      used += grains;
      if (used < kDeviceSquares) continue;
      ZS_RETURN_IF_ERROR(Note(FlushSquares(half, std::exchange(used, 0))));
      half ^= 1;
      ZS_RETURN_IF_ERROR(CollectSquares(half, pool, sum));
    }
  }
  if (used > 0) ZS_RETURN_IF_ERROR(Note(FlushSquares(half, used)));
  ZS_RETURN_IF_ERROR(CollectSquares(half ^ 1, pool, sum));
  return CollectSquares(half, pool, sum);
}

absl::StatusOr<CudaEvent> CudaShard::TakeEvent() {
  if (free_events_.empty()) return CudaEvent::Create(*device_);
  CudaEvent event = std::move(free_events_.back());
  free_events_.pop_back();
  return event;
}

absl::Status CudaShard::StartUpdates(const DeviceStep& step,
                                     std::span<const DeviceUpdate> updates) {
  const Stopwatch watch(busy_);
  // What an attempt that failed has left in flight.
  if (!open_.empty() || !batches_.empty()) {
    ZS_RETURN_IF_ERROR(Note(update_stream_->Synchronize(options_.timeout)));
    for (const Launched& launched : open_) table_->Release(launched.slot);
    open_.clear();
    launches_.clear();
    launch_error_ = absl::OkStatus();
    while (!batches_.empty()) NameBatch();
  }
  step_ = step;
  updates_ = updates;
  next_ = 0;
  return Note(LaunchMore());
}

absl::Status CudaShard::LaunchMore() {
  // No later batch may name what this one did not launch.
  ZS_RETURN_IF_ERROR(launch_error_);
  for (; next_ < updates_.size(); ++next_) {
    const DeviceUpdate& update = updates_[next_];
    const DeviceTable::Place place = *table_->place(update.chunk);
    if (place.attempt == step_.attempt) continue;
    const std::optional<uint32_t> slot =
        table_->Reserve(update.chunk, DeviceTable::Purpose::kUpdate);
    if (!slot.has_value()) break;
    ZS_FAULT_POINT("worker.device.update.before_launch");
    absl::StatusOr<UpdateLaunch> launch = LaunchOf(update, place.slot, *slot);
    if (!launch.ok()) {
      table_->Release(*slot);
      return launch.status();
    }
    launches_.push_back(*launch);
    open_.push_back({update.chunk, *slot});
    if (open_.size() >= kBatch) ZS_RETURN_IF_ERROR(CloseBatch());
  }
  return open_.empty() ? absl::OkStatus() : CloseBatch();
}

// The batch's chunks share kernels where they can.
absl::Status CudaShard::CloseBatch() {
  launch_error_ = kernels_->UpdateChunks(*update_stream_, std::exchange(launches_, {}));
  ZS_RETURN_IF_ERROR(launch_error_);
  ZS_ASSIGN_OR_RETURN(CudaEvent event, TakeEvent());
  ZS_RETURN_IF_ERROR(update_stream_->Record(event));
  batches_.push_back({std::exchange(open_, {}), std::move(event)});
  return absl::OkStatus();
}

absl::StatusOr<UpdateLaunch> CudaShard::LaunchOf(const DeviceUpdate& update, uint32_t from,
                                                 uint32_t to) const {
  const DeviceImage& image = plan().images()[update.chunk];
  ZS_ASSIGN_OR_RETURN(const DType grad_dtype, DTypeFromProto(memory_.config().accumulator_dtype()));
  const std::span<const UpdateSegment> segments =
      Clip(update.segments, image.begin, image.begin + image.elements);
  UpdateLaunch launch{.kind = step_.kind, .first = image.begin, .elements = image.elements};
  launch.grad = GradientAddress(image.unit, image.begin);
  launch.grad_dtype = grad_dtype;
  launch.master_kind = update.master;
  launch.random_key = update.random_key;
  launch.state_format = step_.state_format;
  launch.first_block = update.first_block;
  launch.blocks = update.blocks;
  // On the NVMe tier they are written of the new masters (FetchParameters).
  if (!HasNvmeParameters(memory_.config())) {
    launch.parameter = ParameterAddress(image.unit, image.begin);
  }
  launch.parameter_dtype = memory_.layout().units()[image.unit].dtype;
  launch.segments = absl::MakeConstSpan(segments.data(), segments.size());
  launch.args = absl::MakeConstSpan(step_.args.data(), step_.args.size());
  launch.grad_scale = step_.grad_scale;
  for (size_t i = 0; i < image.arrays.size(); ++i) {
    const uint64_t offset = plan().array_offset(update.chunk, i);
    const DeviceArrayPair pair{SlotAddress(from) + offset, SlotAddress(to) + offset};
    switch (image.arrays[i].array.kind) {
      case ChunkArrayKind::kMaster:
        launch.master = pair;
        break;
      case ChunkArrayKind::kState0:
        launch.state[0] = pair;
        break;
      case ChunkArrayKind::kState1:
        launch.state[1] = pair;
        break;
      case ChunkArrayKind::kScales0:
        launch.scales[0] = pair;
        break;
      case ChunkArrayKind::kScales1:
        launch.scales[1] = pair;
        break;
      case ChunkArrayKind::kParameter:
        break;
    }
  }
  return launch;
}

// Of the oldest batch, whose kernels are done.
void CudaShard::NameBatch() {
  Batch batch = std::move(batches_.front());
  batches_.pop_front();
  for (const Launched& launched : batch.images) {
    ZS_FAULT_POINT("worker.device.update.before_name");
    table_->Name(launched.image, launched.slot, step_.attempt);
    ZS_FAULT_POINT("worker.device.update.after_name");
  }
  free_events_.push_back(std::move(batch.event));
  memory_.beats().fetch_add(1, std::memory_order_relaxed);
}

absl::StatusOr<bool> CudaShard::PollUpdates() {
  while (!batches_.empty()) {
    const absl::StatusOr<bool> done = batches_.front().event.Query();
    if (!done.ok()) return Note(done.status());
    if (!*done) break;
    NameBatch();
  }
  ZS_RETURN_IF_ERROR(Note(LaunchMore()));
  return batches_.empty() && next_ == updates_.size();
}

absl::Status CudaShard::FinishUpdates() {
  const Stopwatch watch(busy_);
  while (true) {
    ZS_ASSIGN_OR_RETURN(const bool done, PollUpdates());
    if (done) return absl::OkStatus();
    if (batches_.empty()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("no free slot on ", device_->label(), " for an update"));
    }
    ZS_RETURN_IF_ERROR(Wait(batches_.front().event));
  }
}

}  // namespace zeroshard
