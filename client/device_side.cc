#include "client/device_side.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client/dataplane/loader.h"
#include "proto/model.pb.h"
#include "storage/device_plan.h"
#include "storage/layout_proto.h"
#include "storage/partition.h"

namespace zeroshard {
namespace {

// How long the reason why a generation died may stay behind a data plane that died of it.
constexpr absl::Duration kReasonPatience = absl::Seconds(5);
constexpr absl::Duration kWatchInterval = absl::Milliseconds(50);
// Gathers that are remembered for a late Wait.
constexpr size_t kKeptGathers = 4096;

absl::StatusOr<DataPlaneConfig> PlaneConfig(const Layout& layout,
                                            const model::v1::EngineConfig& config) {
  DataPlaneConfig plane{
      .stage = config.stage(),
      .reduction_group = config.reduction_group(),
      .local_sums = config.stage() == 1 && config.accumulation_steps() > 1 &&
                    !config.ranks_first() && !config.forward_only(),
      .forward_only = config.forward_only(),
      .slot_bytes = GradientWindowBytes(layout, config),
      .max_live_elements = config.max_live_elements(),
      .persistence_threshold = config.persistence_threshold(),
  };
  ZS_ASSIGN_OR_RETURN(plane.accumulator_dtype, DTypeFromProto(config.accumulator_dtype()));
  return plane;
}

absl::StatusOr<std::vector<DeviceUnitPlace>> PlacesOf(const Layout& layout,
                                                      const model::v1::EngineConfig& config,
                                                      uint32_t rank) {
  ZS_ASSIGN_OR_RETURN(const PartitionPlan partition,
                      PartitionPlan::Create(layout, config, rank, /*lanes=*/1));
  ZS_ASSIGN_OR_RETURN(const DevicePlan plan, DevicePlan::Create(layout, partition, config));
  std::vector<DeviceUnitPlace> places;
  for (uint32_t unit = 0; unit < layout.units().size(); ++unit) {
    const DeviceUnit& place = plan.unit(unit);
    places.push_back({.parameters = place.parameters,
                      .accumulator = place.accumulator,
                      .presence = place.presence});
  }
  return places;
}

// Not of this generation's end: what a caller must not take for a reason to attach anew.
absl::Status AsAborted(const absl::Status& reason) {
  if (absl::IsAborted(reason)) return reason;
  return absl::AbortedError(absl::StrCat("the step in flight is aborted: ", reason.message()));
}

}  // namespace

DeviceSide::~DeviceSide() {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  if (watcher_.joinable()) watcher_.join();
}

void DeviceSide::Watch() {
  while (true) {
    {
      absl::MutexLock lock(&mu_);
      if (mu_.AwaitWithTimeout(absl::Condition(&stopping_), kWatchInterval)) return;
    }
    if (const absl::Status status = plane_->Poll(); !status.ok()) {
      plane_->Abort(status);
      return;
    }
  }
}

absl::StatusOr<std::unique_ptr<DeviceSide>> DeviceSide::Create(Attachment& attachment,
                                                               const AttachOptions& options,
                                                               const DaemonClient& daemon,
                                                               RequestChannel& channel) {
  ZS_ASSIGN_OR_RETURN(const DataPlaneLibrary* library, LoadDataPlaneLibrary());
  const trainer::v1::AttachReply& reply = attachment.reply;
  const model::v1::EngineConfig& config = reply.config();
  std::vector<uint64_t> shard_bytes;
  std::vector<ParameterSpec> parameters(attachment.layout.parameters().begin(),
                                        attachment.layout.parameters().end());
  absl::StatusOr<Layout> layout = Layout::Create(std::move(parameters), options.world_size);
  if (!layout.ok()) return layout.status();
  ZS_ASSIGN_OR_RETURN(DataPlaneConfig plane_config, PlaneConfig(*layout, config));
  ZS_ASSIGN_OR_RETURN(std::vector<DeviceUnitPlace> places, PlacesOf(*layout, config, options.rank));
  for (uint32_t unit = 0; unit < layout->units().size(); ++unit) {
    shard_bytes.push_back(layout->slice(unit, options.rank).elements() *
                          SizeOf(layout->units()[unit].dtype));
  }
  DataPlaneOptions plane{
      .layout = *std::move(layout),
      .config = plane_config,
      .places = std::move(places),
      .rank = options.rank,
      .job = options.job,
      .generation = reply.generation(),
      .shared = std::move(attachment.device_shared),
      .shared_bytes = attachment.device_shared_bytes,
      .counters = std::make_shared<const MappedRegion>(std::move(attachment.device_counters)),
      .timeout = absl::Milliseconds(config.collective_timeout_ms()),
      .memory = options.device_memory,
      .node = absl::StrCat(reply.node()),
      .alive = [&channel] { return channel.Health(); },
  };
  const auto window = std::make_shared<const MappedRegion>(std::move(attachment.parameter_window));
  if (!HasDeviceParameters(config)) plane.host_parameters = window;
  if (HasNvmeParameters(config)) plane.ring = attachment.gradient_window;
  if (reply.device().uuid().size() != plane.device_uuid.size()) {
    return absl::DataLossError("the daemon did not say which GPU the rank's worker has");
  }
  std::memcpy(plane.device_uuid.data(), reply.device().uuid().data(), plane.device_uuid.size());
  plane.rendezvous = [&daemon, job = options.job, token = reply.token(),
                      generation = reply.generation()](
                         const std::string& key, const std::optional<std::string>& value,
                         absl::Duration timeout) -> absl::StatusOr<std::string> {
    trainer::v1::RendezvousRequest request;
    request.set_job(job);
    request.set_token(token);
    request.set_generation(generation);
    request.set_key(key);
    if (value.has_value()) request.set_value(*value);
    request.set_timeout_ms(static_cast<uint32_t>(absl::ToInt64Milliseconds(timeout)));
    ZS_ASSIGN_OR_RETURN(auto answer, daemon.Rendezvous(request, timeout + absl::Seconds(10)));
    return answer.value();
  };
  std::unique_ptr<DeviceSide> side(new DeviceSide(attachment.layout, window, channel));
  ZS_ASSIGN_OR_RETURN(side->plane_, library->create(std::move(plane)));
  if (HasNvmeParameters(config)) {
    const uint64_t ring = ParameterRingBytes(attachment.layout, config);
    side->feed_ = std::make_unique<ParameterFeed>(attachment.gradient_window->size() - ring, ring,
                                                  std::move(shard_bytes), *side->plane_, channel);
  }
  {
    absl::MutexLock lock(&side->mu_);
    side->attempt_ = channel.hello().attempt();
    if (channel.hello().initialized()) std::ranges::fill(side->readable_, 1);
    side->plane_->Begin(side->attempt_);
  }
  side->watcher_ = std::thread([watched = side.get()] { watched->Watch(); });
  return side;
}

absl::Status DeviceSide::Gathered(RequestId id, std::span<const uint32_t> units) {
  bool wait = false;
  bool first = false;
  {
    absl::MutexLock lock(&mu_);
    for (const uint32_t unit : units) {
      wait |= readable_[unit] == 0;
      first |= gathered_[unit] == 0;
      gathered_[unit] = 1;
    }
  }
  Note(id, units);
  // The others gather it now.
  if (first) ZS_RETURN_IF_ERROR(ArrangeAll());
  if (wait) {
    ZS_RETURN_IF_ERROR(channel_.Wait(id, channel_.timeout()));
    absl::MutexLock lock(&mu_);
    for (const uint32_t unit : units) readable_[unit] = 1;
  }
  return plane_->Gather(units);
}

void DeviceSide::Note(RequestId id, std::span<const uint32_t> units) {
  absl::MutexLock lock(&mu_);
  gathers_[id] = {units.begin(), units.end()};
  while (gathers_.size() > kKeptGathers) gathers_.erase(gathers_.begin());
}

absl::StatusOr<RequestId> DeviceSide::GatherAlone(std::span<const uint32_t> units,
                                                  const Submit& submit) {
  std::vector<uint32_t> staying;
  RequestId last = 0;
  for (const uint32_t unit : units) {
    if (plane_->resident(unit)) {
      staying.push_back(unit);
      continue;
    }
    trainer::v1::SessionRequest gather;
    gather.mutable_gather()->add_units(unit);
    gather.mutable_gather()->set_alone(true);
    ZS_ASSIGN_OR_RETURN(last, submit(std::move(gather)));
    ZS_RETURN_IF_ERROR(channel_.Wait(last, channel_.timeout()));
    const Unit& plan = layout_.units()[unit];
    const absl::Status placed =
        plane_->Place(unit, window_->bytes().subspan(plan.window_offset, plan.bytes()));
    trainer::v1::SessionRequest release;
    release.mutable_release()->add_units(unit);
    release.mutable_release()->set_alone(true);
    ZS_RETURN_IF_ERROR(submit(std::move(release)).status());
    ZS_RETURN_IF_ERROR(placed);
  }
  if (!staying.empty() || units.empty()) {
    trainer::v1::SessionRequest gather;
    gather.mutable_gather()->mutable_units()->Add(staying.begin(), staying.end());
    gather.mutable_gather()->set_alone(true);
    ZS_ASSIGN_OR_RETURN(last, submit(std::move(gather)));
    ZS_RETURN_IF_ERROR(Gathered(last, staying));
  }
  Note(last, units);
  return last;
}

absl::StatusOr<RequestId> DeviceSide::GatherFed(std::span<const uint32_t> units, bool prefetch,
                                                const Submit& submit) {
  std::vector<uint32_t> staying;
  std::copy_if(units.begin(), units.end(), std::back_inserter(staying),
               [&](uint32_t unit) { return plane_->resident(unit); });
  RequestId last = 0;
  if (!staying.empty()) {
    trainer::v1::SessionRequest gather;
    gather.mutable_gather()->mutable_units()->Add(staying.begin(), staying.end());
    gather.mutable_gather()->set_prefetch(prefetch);
    ZS_ASSIGN_OR_RETURN(last, submit(std::move(gather)));
    ZS_RETURN_IF_ERROR(Gathered(last, staying));
  }
  for (const uint32_t unit : units) {
    if (plane_->resident(unit)) continue;
    ZS_ASSIGN_OR_RETURN(last, feed_->Gather(unit, prefetch, submit));
  }
  Note(last, units);
  return last;
}

absl::Status DeviceSide::Arrange(std::span<const uint32_t> units) {
  return feed_ == nullptr ? absl::OkStatus() : feed_->Arrange(units);
}

absl::Status DeviceSide::ArrangeAll() {
  return feed_ == nullptr ? absl::OkStatus() : feed_->ArrangeAll();
}

absl::Status DeviceSide::Release(std::span<const uint32_t> units, StreamHandle stream) {
  ZS_RETURN_IF_ERROR(Arrange(units));
  ZS_RETURN_IF_ERROR(plane_->Release(units, stream));
  if (feed_ != nullptr) feed_->Released(units);
  return absl::OkStatus();
}

std::vector<uint32_t> DeviceSide::UnitsOf(RequestId id) const {
  absl::MutexLock lock(&mu_);
  const auto gather = gathers_.find(id);
  return gather == gathers_.end() ? std::vector<uint32_t>{} : gather->second;
}

absl::Status DeviceSide::BeforeStep() {
  if (feed_ != nullptr) ZS_RETURN_IF_ERROR(feed_->EndStep());
  return plane_->Boundary();
}

void DeviceSide::StepSent(RequestId id) {
  absl::MutexLock lock(&mu_);
  step_ = id;
}

bool DeviceSide::IsUnsettledStep(RequestId id) const {
  absl::MutexLock lock(&mu_);
  return step_ == id;
}

absl::Status DeviceSide::Settle(const std::function<absl::Status(RequestId)>& wait,
                                const std::function<StepResult()>& result) {
  absl::MutexLock settling(&settling_);
  std::optional<RequestId> step;
  {
    absl::MutexLock lock(&mu_);
    step = step_;
  }
  if (!step.has_value()) return absl::OkStatus();
  ZS_RETURN_IF_ERROR(wait(*step));
  const StepResult done = result();
  {
    absl::MutexLock lock(&mu_);
    step_.reset();
    attempt_ = done.attempt;
  }
  plane_->Begin(done.attempt);
  return done.skipped != 0 ? absl::OkStatus() : plane_->Committed();
}

absl::Status DeviceSide::Restored() {
  if (feed_ != nullptr) ZS_RETURN_IF_ERROR(feed_->EndStep());
  {
    absl::MutexLock lock(&mu_);
    // A restore takes the identity of the step in flight, as a commit does.
    plane_->Begin(++attempt_);
    std::ranges::fill(readable_, 1);
  }
  return plane_->Refresh();
}

absl::Status DeviceSide::Poll() {
  const absl::Status status = plane_->Poll();
  if (status.ok()) return status;
  // The worker is told, and says why the generation ends.
  const absl::Time deadline = absl::Now() + kReasonPatience;
  absl::Status health = channel_.Health();
  while (health.ok() && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(10));
    health = channel_.Health();
  }
  return health.ok() ? AsAborted(status) : health;
}

}  // namespace zeroshard
