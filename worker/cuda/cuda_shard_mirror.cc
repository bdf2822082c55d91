// What the device holds is copied to host memory now and then, and comes back when a device was
// lost.
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/fault_point.h"
#include "base/log.h"
#include "base/status.h"
#include "worker/cuda/cuda_shard.h"

namespace zeroshard {
namespace {

// To lock memory takes its time: this worker says that it is alive between two pieces.
constexpr uint64_t kPiece = uint64_t{1} << 30;
// Images that are in the partition at one time on their way back.
constexpr size_t kLoadedTogether = 8;

}  // namespace

absl::Status CudaShard::OpenMirror() {
  if (memory_.mirror_plan() == nullptr) return absl::OkStatus();
  const DeviceMirror::Identity identity = {.job_id = memory_.start().job_id(),
                                           .layout_fingerprint = memory_.layout().fingerprint(),
                                           .plan_fingerprint = plan().fingerprint(),
                                           .worker = memory_.worker()};
  const std::span<std::byte> region = memory_.device_mirror();
  ZS_ASSIGN_OR_RETURN(mirror_, DeviceMirror::Open(region, *memory_.mirror_plan(), identity));
  ZS_ASSIGN_OR_RETURN(mirrored_, CudaEvent::Create(*device_));
  for (uint64_t at = 0; at < region.size(); at += kPiece) {
    auto piece = RegisteredHost::Register(*device_,
                                          region.subspan(at, std::min(kPiece, region.size() - at)));
    memory_.beats().fetch_add(1, std::memory_order_relaxed);
    if (!piece.ok()) {
      // Pieces that are locked and others that are not cannot both be in one copy.
      registered_mirror_.clear();
      LogWarn(absl::StrCat("mirrors are slow error=\"", piece.status().message(), "\""));
      break;
    }
    registered_mirror_.push_back(*std::move(piece));
  }
  return absl::OkStatus();
}

std::optional<MirrorPoint> CudaShard::LastMirror() const {
  return mirror_.has_value() ? mirror_->Newest() : std::nullopt;
}

absl::Status CudaShard::EnqueueMirror(std::byte* half) {
  const MirrorPlan& places = *memory_.mirror_plan();
  // No copy crosses the end of a piece.
  const auto copy = [&](std::byte* to, DeviceAddress from, uint64_t bytes) -> absl::Status {
    while (bytes > 0) {
      const auto at = static_cast<uint64_t>(to - memory_.device_mirror().data());
      const uint64_t part = std::min(bytes, kPiece - at % kPiece);
      ZS_RETURN_IF_ERROR(fetch_stream_->CopyToHost(to, from, part));
      if (registered_mirror_.empty()) memory_.beats().fetch_add(1, std::memory_order_relaxed);
      to += part;
      from += part;
      bytes -= part;
    }
    return absl::OkStatus();
  };
  for (uint32_t image = 0; image < plan().images().size(); ++image) {
    if (plan().images()[image].elements == 0) continue;
    std::byte* const to = half + places.image(image);
    if (Holds(image)) {
      ZS_RETURN_IF_ERROR(
          copy(to, SlotAddress(table_->place(image)->slot), plan().image_bytes(image)));
    } else {
      CopyArrays(image, to - kImageHeaderBytes, /*to_partition=*/false);
      memory_.beats().fetch_add(1, std::memory_order_relaxed);
    }
  }
  for (uint32_t unit = 0; unit < memory_.layout().units().size(); ++unit) {
    const uint64_t bytes =
        memory_.plan().unit(unit).shard.elements() * SizeOf(memory_.layout().units()[unit].dtype);
    if (host_parameters_.has_value()) {
      ZS_RETURN_IF_ERROR(
          ReadParameters(unit, memory_.plan().unit(unit).shard, half + places.parameters(unit)));
      memory_.beats().fetch_add(1, std::memory_order_relaxed);
      continue;
    }
    ZS_RETURN_IF_ERROR(copy(half + places.parameters(unit),
                            shared_.address() + plan().unit(unit).parameters, bytes));
  }
  ZS_RETURN_IF_ERROR(fetch_stream_->Record(*mirrored_));
  return fetch_stream_->Notify([doorbell = doorbell_] {
    constexpr uint64_t kOne = 1;
    // A full counter (EAGAIN) is a doorbell that rings already.
    [[maybe_unused]] const ssize_t written = write(doorbell->get(), &kOne, sizeof(kOne));
  });
}

absl::Status CudaShard::StartMirror(const MirrorPoint& point, std::string numbers) {
  if (!mirror_.has_value()) return absl::FailedPreconditionError("the job has no mirror");
  ZS_RETURN_IF_ERROR(FinishMirror());
  const absl::Time since = absl::Now();
  const uint32_t half = mirror_->Begin();
  ZS_FAULT_POINT("worker.device.mirror.begun");
  ZS_RETURN_IF_ERROR(Note(EnqueueMirror(mirror_->half(half))));
  mirroring_ = {half, point, std::move(numbers), since};
  return absl::OkStatus();
}

absl::Status CudaShard::CompleteMirror() {
  const Mirroring done = *std::exchange(mirroring_, std::nullopt);
  mirror_time_ += absl::Now() - done.since;
  ZS_FAULT_POINT("worker.device.mirror.before_complete");
  return mirror_->Finish(done.half, done.point, done.numbers);
}

absl::StatusOr<bool> CudaShard::PollMirror() {
  if (!mirroring_.has_value()) return true;
  const absl::StatusOr<bool> there = mirrored_->Query();
  if (!there.ok()) return Note(there.status());
  if (!*there) return false;
  ZS_RETURN_IF_ERROR(CompleteMirror());
  return true;
}

absl::Status CudaShard::FinishMirror() {
  if (!mirroring_.has_value()) return absl::OkStatus();
  ZS_RETURN_IF_ERROR(Wait(*mirrored_));
  return CompleteMirror();
}

absl::Status CudaShard::LoadImages(std::byte* half) {
  std::vector<uint32_t> images;
  const auto settle = [&]() -> absl::Status {
    std::erase_if(images, [&](uint32_t image) { return !AtHome(image); });
    ZS_RETURN_IF_ERROR(Demote(images));
    images.clear();
    return absl::OkStatus();
  };
  for (uint32_t image = 0; image < plan().images().size(); ++image) {
    if (plan().images()[image].elements == 0) continue;
    ZS_RETURN_IF_ERROR(Discard({&image, 1}));
    ZS_RETURN_IF_ERROR(pages_->Reserve(image));
    CopyArrays(image, half + memory_.mirror_plan()->image(image) - kImageHeaderBytes,
               /*to_partition=*/true);
    memory_.beats().fetch_add(1, std::memory_order_relaxed);
    images.push_back(image);
    if (images.size() == kLoadedTogether) ZS_RETURN_IF_ERROR(settle());
  }
  return settle();
}

absl::StatusOr<std::string> CudaShard::LoadMirror(uint64_t attempt) {
  if (!mirror_.has_value()) return absl::FailedPreconditionError("the job has no mirror");
  // Nothing is written any more to the half that may be under way.
  if (mirroring_.has_value()) {
    ZS_RETURN_IF_ERROR(Wait(*mirrored_));
    mirroring_.reset();
  }
  const std::optional<uint32_t> found = mirror_->Find(attempt);
  if (!found.has_value()) {
    return absl::NotFoundError(
        absl::StrCat("worker ", memory_.worker(), " has no mirror of attempt ", attempt));
  }
  std::byte* const half = mirror_->half(*found);
  ZS_RETURN_IF_ERROR(LoadImages(half));
  ZS_FAULT_POINT("worker.device.mirror.before_parameters");
  for (uint32_t unit = 0; unit < memory_.layout().units().size(); ++unit) {
    const GrainRange shard = memory_.plan().unit(unit).shard;
    if (shard.elements() == 0) continue;
    ZS_RETURN_IF_ERROR(
        WriteParameters(unit, shard, half + memory_.mirror_plan()->parameters(unit)));
  }
  mirror_->ForgetAfter(attempt);
  blank_ = false;
  return std::string(mirror_->numbers(*found));
}

}  // namespace zeroshard
