// The part of a session that jobs on GPUs have: gathers and scatters go through the data plane.
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "client/session.h"
#include "client/session_impl.h"
#include "proto/model.pb.h"

namespace zeroshard {

absl::Status Session::Impl::OpenDevice(const AttachOptions& options) {
  if (!attachment.reply.config().data_plane()) return absl::OkStatus();
  ZS_ASSIGN_OR_RETURN(device, DeviceSide::Create(attachment, options, daemon, *channel));
  channel->Watch([this] { return device->Poll(); });
  return absl::OkStatus();
}

absl::Status Session::Impl::Settle() {
  return Explain(
      device->Settle([this](RequestId id) { return channel->Wait(id, channel->timeout()); },
                     [this] { return Result(); }));
}

absl::Status Session::Impl::Explain(const absl::Status& status) const {
  if (status.ok() || absl::IsInvalidArgument(status) || absl::IsFailedPrecondition(status)) {
    return status;
  }
  const absl::Status reason = device->Poll();
  return reason.ok() ? status : reason;
}

absl::Status Session::Impl::CheckOnDevice() const {
  ZS_RETURN_IF_ERROR(CheckHere());
  if (device != nullptr) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "job ", job, " trains on the host: its parameters and gradients are in the windows"));
}

void Session::Impl::CloseDevice() {
  if (device != nullptr) device->plane().Abort(absl::CancelledError("the session was closed"));
}

absl::Status Session::Impl::ScatterOnDevice(const ScatterRequest& request) {
  ZS_RETURN_IF_ERROR(Settle());
  return Explain(device->plane().Scatter({.unit = request.unit,
                                          .micro_step = request.micro_step,
                                          .slot = request.window_offset,
                                          .present = request.present,
                                          .weight = request.weight == 0.0F ? 1.0F : request.weight,
                                          .stream = request.stream}));
}

absl::StatusOr<RequestId> Session::Impl::GatherOnDevice(std::span<const uint32_t> units,
                                                        const GatherOptions& options) {
  const auto submit = [this](trainer::v1::SessionRequest message) {
    return channel->Submit(std::move(message));
  };
  absl::StatusOr<RequestId> id = options.alone ? device->GatherAlone(units, submit)
                                               : device->GatherFed(units, options.prefetch, submit);
  if (!id.ok()) return Explain(id.status());
  return id;
}

absl::Status Session::Impl::FinishOnDevice(RequestId id) {
  if (device->IsUnsettledStep(id)) return Settle();
  const std::vector<uint32_t> units = device->UnitsOf(id);
  ZS_RETURN_IF_ERROR(Explain(device->Arrange(units)));
  for (const uint32_t unit : units) {
    ZS_RETURN_IF_ERROR(Explain(device->plane().WaitOnHost(unit)));
  }
  return absl::OkStatus();
}

bool Session::on_device() const { return impl_->device != nullptr; }

const DeviceFacts& Session::device() const { return impl_->device->plane().device(); }

DeviceAddress Session::parameter_address(uint32_t unit) const {
  if (!impl_->CheckOnDevice().ok() || !impl_->CheckUnit(unit).ok()) return 0;
  return impl_->device->plane().parameter_address(unit);
}

absl::StatusOr<DeviceSlot> Session::AcquireDeviceSlot(uint64_t bytes) {
  ZS_RETURN_IF_ERROR(impl_->CheckOnDevice());
  absl::StatusOr<DeviceSlot> slot = impl_->device->plane().AcquireSlot(bytes);
  if (!slot.ok()) return impl_->Explain(slot.status());
  return slot;
}

absl::Status Session::AbandonDeviceSlot(uint64_t offset) {
  ZS_RETURN_IF_ERROR(impl_->CheckOnDevice());
  return impl_->Explain(impl_->device->plane().AbandonSlot(offset));
}

absl::Status Session::WaitOn(std::span<const uint32_t> units, StreamHandle stream) {
  ZS_RETURN_IF_ERROR(impl_->CheckOnDevice());
  ZS_RETURN_IF_ERROR(impl_->Settle());
  ZS_RETURN_IF_ERROR(impl_->Explain(impl_->device->Arrange(units)));
  for (const uint32_t unit : units) {
    ZS_RETURN_IF_ERROR(impl_->Explain(impl_->device->plane().WaitOn(unit, stream)));
  }
  return absl::OkStatus();
}

absl::Status Session::Refresh() {
  ZS_RETURN_IF_ERROR(impl_->CheckOnDevice());
  ZS_RETURN_IF_ERROR(impl_->Settle());
  ZS_RETURN_IF_ERROR(impl_->Explain(impl_->device->ArrangeAll()));
  return impl_->Explain(impl_->device->plane().Refresh());
}

absl::Status Session::Barrier() {
  ZS_RETURN_IF_ERROR(impl_->CheckOnDevice());
  ZS_RETURN_IF_ERROR(impl_->Settle());
  ZS_RETURN_IF_ERROR(impl_->Explain(impl_->device->ArrangeAll()));
  return impl_->Explain(impl_->device->plane().Barrier());
}

std::shared_ptr<TrainerMemory> Session::device_memory() const {
  return impl_->device == nullptr ? nullptr : impl_->device->plane().memory();
}

DataPlaneStats Session::device_stats() const {
  return impl_->device == nullptr ? DataPlaneStats{} : impl_->device->plane().stats();
}

}  // namespace zeroshard
