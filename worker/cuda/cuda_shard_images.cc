// What comes to the device and leaves it: images and parameters.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "base/log.h"
#include "base/shared_memory.h"
#include "base/status.h"
#include "storage/bytes.h"
#include "worker/cuda/cuda_shard.h"

namespace zeroshard {
namespace {

constexpr uint64_t kPage = 4096;
constexpr size_t kStagingBuffers = 4;
// A copy from or to memory that is not registered holds the caller: it says that it is alive
// between two of these.
constexpr uint64_t kCopyBytes = uint64_t{64} << 20;

}  // namespace

bool CudaShard::Holds(uint32_t image) const {
  return image < plan().images().size() && table_->Holds(image);
}

bool CudaShard::AtHome(uint32_t image) const {
  if (image >= plan().images().size()) return false;
  const DeviceTarget target = table_->target(image);
  return target == DeviceTarget::kGpu ||
         (target == DeviceTarget::kAsPlanned && plan().images()[image].home);
}

bool CudaShard::IsPlanned(uint32_t image) const {
  return image >= plan().images().size() || table_->target(image) == DeviceTarget::kAsPlanned;
}

bool CudaShard::RestsOnNvme(uint32_t image) const {
  return image < plan().images().size() && table_->target(image) == DeviceTarget::kNvme;
}

void CudaShard::SetTarget(uint32_t image, model::v1::Tier target) {
  if (image >= plan().images().size()) return;
  table_->SetTarget(image, target == model::v1::TIER_GPU    ? DeviceTarget::kGpu
                           : target == model::v1::TIER_NVME ? DeviceTarget::kNvme
                                                            : DeviceTarget::kHost);
}

absl::Status CudaShard::MakeStaging() {
  if (staging_.has_value()) return absl::OkStatus();
  for (uint32_t image = 0; image < plan().images().size(); ++image) {
    if (plan().images()[image].elements == 0) continue;
    staging_bytes_ = std::max(staging_bytes_, plan().shape(image).image_bytes());
  }
  if (staging_bytes_ == 0) return absl::OkStatus();
  ZS_ASSIGN_OR_RETURN(AlignedBuffer buffer, AlignedBuffer::Make(staging_bytes_ * kStagingBuffers));
  ZS_ASSIGN_OR_RETURN(registered_staging_, RegisteredHost::Register(*device_, buffer.bytes()));
  staging_.emplace(std::move(buffer));
  for (size_t i = 0; i < kStagingBuffers; ++i) {
    ZS_ASSIGN_OR_RETURN(CudaEvent event, CudaEvent::Create(*device_));
    staging_events_.push_back(std::move(event));
  }
  return absl::OkStatus();
}

template <typename Enqueue, typename Finish>
absl::Status CudaShard::Stage(std::span<const uint32_t> images, const Enqueue& enqueue,
                              const Finish& finish) {
  if (images.empty()) return absl::OkStatus();
  ZS_RETURN_IF_ERROR(MakeStaging());
  absl::Status status;
  size_t begun = 0;
  for (size_t done = 0; done < images.size(); ++done) {
    for (; status.ok() && begun < images.size() && begun < done + kStagingBuffers; ++begun) {
      const size_t buffer = begun % kStagingBuffers;
      status = enqueue(images[begun], staging_->data() + buffer * staging_bytes_);
      if (status.ok()) status = fetch_stream_->Record(staging_events_[buffer]);
      if (!status.ok()) break;
    }
    // What was begun is finished also after an error.
    if (done >= begun) break;
    const size_t buffer = done % kStagingBuffers;
    ZS_RETURN_IF_ERROR(Wait(staging_events_[buffer]));
    const absl::Status finished = finish(images[done], staging_->data() + buffer * staging_bytes_);
    if (status.ok()) status = finished;
  }
  return Note(status);
}

void CudaShard::CopyArrays(uint32_t image, std::byte* buffer, bool to_partition) const {
  const ChunkShape& shape = plan().shape(image);
  const std::vector<PartitionArray>& arrays = plan().images()[image].arrays;
  for (size_t i = 0; i < arrays.size(); ++i) {
    std::byte* const in_partition = memory_.partition() + arrays[i].offset;
    std::byte* const in_buffer = buffer + shape.offset(i);
    std::memcpy(to_partition ? in_partition : in_buffer, to_partition ? in_buffer : in_partition,
                arrays[i].array.bytes);
  }
}

void CudaShard::Punch(uint32_t image) const {
  pages_->Punch(image, [&](uint32_t other) { return Holds(other); });
}

absl::Status CudaShard::Read(std::span<const uint32_t> images, Reader reader) {
  return Stage(
      images,
      [&](uint32_t image, std::byte* buffer) {
        return fetch_stream_->CopyToHost(buffer + kImageHeaderBytes,
                                         SlotAddress(table_->place(image)->slot),
                                         plan().image_bytes(image));
      },
      [&](uint32_t image, std::byte* buffer) { return reader(image, buffer); });
}

absl::Status CudaShard::Promote(std::span<const uint32_t> images) {
  std::vector<uint32_t> held;
  for (const uint32_t image : images) {
    if (!Holds(image)) continue;
    ZS_RETURN_IF_ERROR(pages_->Reserve(image));
    held.push_back(image);
  }
  const absl::Status read = Read(held, [&](uint32_t image, std::byte* buffer) {
    CopyArrays(image, buffer, /*to_partition=*/true);
    return absl::OkStatus();
  });
  if (!read.ok()) {
    for (const uint32_t image : held) Punch(image);
    return read;
  }
  ZS_FAULT_POINT("worker.device.promote.before_forget");
  return Discard(held);
}

absl::Status CudaShard::Discard(std::span<const uint32_t> images) {
  for (const uint32_t image : images) {
    if (Holds(image)) table_->Forget(image);
  }
  return absl::OkStatus();
}

absl::Status CudaShard::Demote(std::span<const uint32_t> images) {
  const uint64_t committed = memory_.board().committed_attempt();
  std::vector<uint32_t> coming;
  std::deque<uint32_t> slots;
  for (const uint32_t image : images) {
    if (Holds(image)) continue;
    const std::optional<uint32_t> slot = table_->Reserve(image, DeviceTable::Purpose::kMove);
    if (!slot.has_value()) continue;
    coming.push_back(image);
    slots.push_back(*slot);
  }
  size_t sent = 0;
  const absl::Status status = Stage(
      coming,
      [&](uint32_t image, std::byte* buffer) {
        std::memset(buffer + kImageHeaderBytes, 0, plan().image_bytes(image));
        CopyArrays(image, buffer, /*to_partition=*/false);
        return fetch_stream_->CopyToDevice(SlotAddress(slots[sent++]), buffer + kImageHeaderBytes,
                                           plan().image_bytes(image));
      },
      [&](uint32_t image, std::byte*) {
        ZS_FAULT_POINT("worker.device.demote.before_name");
        table_->Name(image, slots.front(), committed);
        slots.pop_front();
        --sent;
        ZS_FAULT_POINT("worker.device.demote.before_punch");
        Punch(image);
        return absl::OkStatus();
      });
  for (const uint32_t slot : slots) table_->Release(slot);
  return status;
}

absl::Status CudaShard::ReadParameters(uint32_t unit, GrainRange grains, std::byte* values) {
  const uint64_t bytes = grains.elements() * SizeOf(memory_.layout().units()[unit].dtype);
  if (host_parameters_.has_value()) {
    std::memcpy(values, memory_.window() + WindowOffset(unit, grains.first_element()), bytes);
    return absl::OkStatus();
  }
  const DeviceAddress from = ParameterAddress(unit, grains.first_element());
  for (uint64_t at = 0; at < bytes; at += kCopyBytes) {
    ZS_RETURN_IF_ERROR(
        Note(fetch_stream_->CopyToHost(values + at, from + at, std::min(kCopyBytes, bytes - at))));
    ZS_RETURN_IF_ERROR(Note(fetch_stream_->Record(*sent_)));
    ZS_RETURN_IF_ERROR(Wait(*sent_));
  }
  return absl::OkStatus();
}

absl::Status CudaShard::WriteParameters(uint32_t unit, GrainRange grains, const std::byte* values) {
  const uint64_t bytes = grains.elements() * SizeOf(memory_.layout().units()[unit].dtype);
  if (host_parameters_.has_value()) {
    std::memcpy(memory_.window() + WindowOffset(unit, grains.first_element()), values, bytes);
    return absl::OkStatus();
  }
  const DeviceAddress to = ParameterAddress(unit, grains.first_element());
  for (uint64_t at = 0; at < bytes; at += kCopyBytes) {
    ZS_RETURN_IF_ERROR(
        Note(send_stream_->CopyToDevice(to + at, values + at, std::min(kCopyBytes, bytes - at))));
    ZS_RETURN_IF_ERROR(Note(send_stream_->Record(*sent_)));
    ZS_RETURN_IF_ERROR(Wait(*sent_));
  }
  return absl::OkStatus();
}

// All of the partition's shards are copies, so that no neighbour of the part minds.
void CudaShard::GiveBackParameters(uint32_t unit, GrainRange grains) {
  const uint64_t begin = ParameterOffset(unit, grains.first_element()) / kPage * kPage;
  const uint64_t end = RoundUpTo(ParameterOffset(unit, grains.end * kGrainElements), kPage);
  const absl::Status status = PunchHole(memory_.partition_fd(), begin, end - begin);
  if (!status.ok()) {
    LogWarn(absl::StrCat("pages of parameters not given back unit=", unit, " error=\"",
                         status.message(), "\""));
  }
}

}  // namespace zeroshard
