// What the device holds is copied to host memory now and then, and comes back when a device was
// lost.
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/cord.h"
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
// Copies that are on their way to the device at one time.
constexpr size_t kLoadedTogether = 8;
// Parts of which a lane takes checksums before the worker looks after others again.
constexpr size_t kPartsOfLane = 4;

std::string NameOf(const MirrorPart& part, const DevicePlan& plan) {
  if (part.image == MirrorPart::kNone) return absl::StrCat("parameters of unit ", part.unit);
  const DeviceImage& image = plan.images()[part.image];
  return absl::StrCat("chunk ", part.image, " (unit ", part.unit, ", elements ", image.begin,
                      " to ", image.begin + image.elements, ")");
}

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

void CudaShard::RingDoorbell() const {
  constexpr uint64_t kOne = 1;
  [[maybe_unused]] const ssize_t written = write(doorbell_->get(), &kOne, sizeof(kOne));
}

absl::Status CudaShard::StartMirror(const MirrorPoint& point, std::string numbers,
                                    ThreadPool& pool) {
  if (!mirror_.has_value()) return absl::FailedPreconditionError("the job has no mirror");
  ZS_RETURN_IF_ERROR(FinishMirror());
  const absl::Time since = absl::Now();
  const uint32_t half = mirror_->Begin();
  ZS_FAULT_POINT("worker.device.mirror.begun");
  ZS_RETURN_IF_ERROR(Note(EnqueueMirror(mirror_->half(half))));
  mirroring_ = {half, point, std::move(numbers), since, &pool};
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
  if (!SumParts()) {
    RingDoorbell();
    return false;
  }
  ZS_RETURN_IF_ERROR(CompleteMirror());
  return true;
}

absl::Status CudaShard::FinishMirror() {
  if (!mirroring_.has_value()) return absl::OkStatus();
  ZS_RETURN_IF_ERROR(Wait(*mirrored_));
  while (!SumParts()) continue;
  return CompleteMirror();
}

bool CudaShard::SumParts() {
  Mirroring& under_way = *mirroring_;
  ThreadPool& pool = *under_way.pool;
  const size_t parts = memory_.mirror_plan()->parts().size();
  const size_t first = under_way.summed;
  const size_t count = std::min(parts - first, kPartsOfLane * static_cast<size_t>(pool.lanes()));
  pool.ParallelFor(count, [&](size_t i, int) { mirror_->Sum(under_way.half, first + i); });
  under_way.summed += count;
  memory_.beats().fetch_add(1, std::memory_order_relaxed);
  return under_way.summed == parts;
}

absl::Status CudaShard::VerifyMirror(uint32_t half, ThreadPool& pool) {
  ZS_RETURN_IF_ERROR(mirror_->CheckHeader(half));
  const std::span<const MirrorPart> parts = memory_.mirror_plan()->parts();
  std::vector<uint8_t> intact(parts.size());
  const size_t together = kPartsOfLane * static_cast<size_t>(pool.lanes());
  for (size_t first = 0; first < parts.size(); first += together) {
    pool.ParallelFor(std::min(together, parts.size() - first), [&](size_t i, int) {
      intact[first + i] = mirror_->IsIntact(half, first + i) ? 1 : 0;
    });
    memory_.beats().fetch_add(1, std::memory_order_relaxed);
  }
  const auto damaged = std::find(intact.begin(), intact.end(), 0);
  if (damaged == intact.end()) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(NameOf(parts[static_cast<size_t>(damaged - intact.begin())], plan()),
                   " is not what was written; of ", parts.size(), " parts ",
                   std::count(intact.begin(), intact.end(), 0), " are damaged"));
}

absl::Status CudaShard::CopyFromMirror(DeviceAddress to, const std::byte* from, uint64_t bytes) {
  while (bytes > 0) {
    const auto at = static_cast<uint64_t>(from - memory_.device_mirror().data());
    const uint64_t part = std::min(bytes, kPiece - at % kPiece);
    ZS_RETURN_IF_ERROR(Note(send_stream_->CopyToDevice(to, from, part)));
    if (registered_mirror_.empty()) memory_.beats().fetch_add(1, std::memory_order_relaxed);
    to += part;
    from += part;
    bytes -= part;
  }
  return absl::OkStatus();
}

absl::Status CudaShard::LoadImages(std::byte* half) {
  const uint64_t committed = memory_.board().committed_attempt();
  std::deque<Batch> coming;
  const auto name_oldest = [&]() -> absl::Status {
    ZS_RETURN_IF_ERROR(Wait(coming.front().event));
    ZS_FAULT_POINT("worker.device.mirror.before_name");
    const Launched loaded = coming.front().images.front();
    free_events_.push_back(std::move(coming.front().event));
    coming.pop_front();
    table_->Name(loaded.image, loaded.slot, committed);
    Punch(loaded.image);
    return absl::OkStatus();
  };
  const auto load = [&](uint32_t image) -> absl::Status {
    const std::byte* const from = half + memory_.mirror_plan()->image(image);
    ZS_RETURN_IF_ERROR(Discard({&image, 1}));
    std::optional<uint32_t> slot;
    if (AtHome(image)) slot = table_->Reserve(image, DeviceTable::Purpose::kMove);
    if (!slot.has_value()) {
      ZS_RETURN_IF_ERROR(pages_->Reserve(image));
      CopyArrays(image, const_cast<std::byte*>(from) - kImageHeaderBytes, /*to_partition=*/true);
      memory_.beats().fetch_add(1, std::memory_order_relaxed);
      return absl::OkStatus();
    }
    ZS_ASSIGN_OR_RETURN(CudaEvent event, TakeEvent());
    coming.push_back({{{image, *slot}}, std::move(event)});
    ZS_RETURN_IF_ERROR(CopyFromMirror(SlotAddress(*slot), from, plan().image_bytes(image)));
    ZS_RETURN_IF_ERROR(Note(send_stream_->Record(coming.back().event)));
    return coming.size() < kLoadedTogether ? absl::OkStatus() : name_oldest();
  };
  absl::Status status;
  for (uint32_t image = 0; image < plan().images().size() && status.ok(); ++image) {
    if (plan().images()[image].elements > 0) status = load(image);
  }
  while (status.ok() && !coming.empty()) status = name_oldest();
  for (const Batch& batch : coming) table_->Release(batch.images.front().slot);
  return status;
}

absl::Status CudaShard::LoadParameters(std::byte* half) {
  const MirrorPlan& places = *memory_.mirror_plan();
  for (uint32_t unit = 0; host_parameters_.has_value() && unit < memory_.layout().units().size();
       ++unit) {
    ZS_RETURN_IF_ERROR(
        WriteParameters(unit, memory_.plan().unit(unit).shard, half + places.parameters(unit)));
    memory_.beats().fetch_add(1, std::memory_order_relaxed);
  }
  if (host_parameters_.has_value()) return absl::OkStatus();
  std::deque<CudaEvent> coming;
  const auto wait_oldest = [&]() -> absl::Status {
    ZS_RETURN_IF_ERROR(Wait(coming.front()));
    free_events_.push_back(std::move(coming.front()));
    coming.pop_front();
    return absl::OkStatus();
  };
  for (const MirrorPart& part : places.parts()) {
    if (part.image != MirrorPart::kNone) continue;
    const uint64_t within = part.offset - places.parameters(part.unit);
    ZS_RETURN_IF_ERROR(
        CopyFromMirror(shared_.address() + plan().unit(part.unit).parameters + within,
                       half + part.offset, part.bytes));
    ZS_ASSIGN_OR_RETURN(CudaEvent event, TakeEvent());
    ZS_RETURN_IF_ERROR(Note(send_stream_->Record(event)));
    coming.push_back(std::move(event));
    if (coming.size() == kLoadedTogether) ZS_RETURN_IF_ERROR(wait_oldest());
  }
  while (!coming.empty()) ZS_RETURN_IF_ERROR(wait_oldest());
  return absl::OkStatus();
}

absl::StatusOr<std::string> CudaShard::LoadMirror(uint64_t attempt, ThreadPool& pool) {
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
  if (absl::Status status = VerifyMirror(*found, pool); !status.ok()) {
    status.SetPayload(kMemoryLostPayload, absl::Cord());
    ++damaged_mirrors_;
    mirror_->Forget(*found);
    return Annotate(status, absl::StrCat("the mirror of attempt ", attempt, " of worker ",
                                         memory_.worker(), " is damaged"));
  }
  ZS_RETURN_IF_ERROR(LoadImages(half));
  ZS_FAULT_POINT("worker.device.mirror.before_parameters");
  ZS_RETURN_IF_ERROR(LoadParameters(half));
  mirror_->ForgetAfter(attempt);
  blank_ = false;
  return std::string(mirror_->numbers(*found));
}

}  // namespace zeroshard
