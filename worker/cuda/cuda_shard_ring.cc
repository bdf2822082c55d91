// Chunks that are computed on the host: their gradients come through a ring of registered memory,
// and their parameters go the same way; and parameters that do not rest on the device come from it.
#include <algorithm>
#include <utility>
#include <vector>

#include "base/fault_point.h"
#include "base/status.h"
#include "storage/layout_proto.h"
#include "worker/cuda/cuda_shard.h"

namespace zeroshard {
absl::StatusOr<uint32_t> CudaShard::OpenRing(uint32_t lanes) {
  // What a pass that failed has left on its way.
  for (size_t slot = 0; slot < ring_.size(); ++slot) {
    if (ring_[slot].chunk != kNoImage) ZS_RETURN_IF_ERROR(Wait(ring_[slot].event));
    FreeParcel(slot);
  }
  parcel_of_.assign(memory_.plan().chunks().size(), kNoParcel);
  const DeviceRing wanted = DeviceRingOf(memory_.layout(), memory_.plan(), memory_.config(), lanes);
  if (ring_.size() >= wanted.parcels) return static_cast<uint32_t>(ring_.size());
  ring_.clear();
  registered_ring_ = RegisteredHost();
  ring_memory_.reset();
  ring_plan_ = wanted;
  ZS_ASSIGN_OR_RETURN(AlignedBuffer buffer, AlignedBuffer::Make(wanted.bytes()));
  ZS_ASSIGN_OR_RETURN(registered_ring_, RegisteredHost::Register(*device_, buffer.bytes()));
  ring_memory_.emplace(std::move(buffer));
  for (uint64_t slot = 0; slot < wanted.parcels; ++slot) {
    ZS_ASSIGN_OR_RETURN(CudaEvent event, CudaEvent::Create(*device_));
    ring_.push_back({.event = std::move(event)});
  }
  return static_cast<uint32_t>(ring_.size());
}

void CudaShard::FreeParcel(size_t slot) {
  if (ring_[slot].chunk != kNoImage) parcel_of_[ring_[slot].chunk] = kNoParcel;
  ring_[slot].chunk = kNoImage;
  ring_[slot].going = false;
}

// The slots are used in turn: what left first is there first.
absl::StatusOr<bool> CudaShard::TakeParcel(uint32_t chunk) {
  size_t slot = 0;
  for (; slot < ring_.size() && ring_[slot].chunk != kNoImage; ++slot) {
    if (!ring_[slot].going) continue;
    const absl::StatusOr<bool> gone = ring_[slot].event.Query();
    if (!gone.ok()) return Note(gone.status());
    if (!*gone) continue;
    FreeParcel(slot);
    break;
  }
  if (slot == ring_.size()) return false;
  ring_[slot].chunk = chunk;
  parcel_of_[chunk] = static_cast<uint32_t>(slot);
  return true;
}

absl::StatusOr<bool> CudaShard::FetchGradients(uint32_t chunk) {
  ZS_ASSIGN_OR_RETURN(const DType dtype, DTypeFromProto(memory_.config().accumulator_dtype()));
  ZS_ASSIGN_OR_RETURN(const bool taken, TakeParcel(chunk));
  if (!taken) return false;
  const ChunkPlan& part = memory_.plan().chunks()[chunk];
  ZS_RETURN_IF_ERROR(Note(fetch_stream_->CopyToHost(parcel(chunk).gradients,
                                                    GradientAddress(part.unit, part.begin),
                                                    part.elements * SizeOf(dtype))));
  ZS_RETURN_IF_ERROR(Note(fetch_stream_->Record(ring_[parcel_of_[chunk]].event)));
  return true;
}

absl::StatusOr<bool> CudaShard::FetchParameters(uint32_t chunk) {
  const std::vector<PartitionArray>& arrays = plan().images()[chunk].arrays;
  const auto master = std::ranges::find_if(arrays, [](const PartitionArray& array) {
    return array.array.kind == ChunkArrayKind::kMaster;
  });
  if (master == arrays.end()) return absl::InternalError("a chunk without a master");
  ZS_ASSIGN_OR_RETURN(const bool taken, TakeParcel(chunk));
  if (!taken) return false;
  const ChunkPlan& part = memory_.plan().chunks()[chunk];
  const auto index = static_cast<size_t>(master - arrays.begin());
  const auto in_ring = static_cast<uint64_t>(parcel(chunk).parameters - ring_memory_->data());
  const DeviceAddress masters =
      SlotAddress(table_->place(chunk)->slot) + plan().array_offset(chunk, index);
  if (memory_.plan().unit(part.unit).master_form == MasterForm::kNone) {
    ZS_RETURN_IF_ERROR(
        Note(update_stream_->CopyToHost(parcel(chunk).parameters, masters, master->array.bytes)));
  } else {
    ZS_RETURN_IF_ERROR(Note(
        kernels_->Convert(*update_stream_, {.from = masters,
                                            .to = registered_ring_.address() + in_ring,
                                            .to_dtype = memory_.layout().units()[part.unit].dtype,
                                            .elements = part.elements})));
  }
  ZS_RETURN_IF_ERROR(Note(update_stream_->Record(ring_[parcel_of_[chunk]].event)));
  return true;
}

absl::StatusOr<bool> CudaShard::HasFetched(uint32_t chunk) {
  ZS_FAULT_POINT("worker.device.fetch.before_done");
  absl::StatusOr<bool> come = ring_[parcel_of_[chunk]].event.Query();
  if (!come.ok()) return Note(come.status());
  return come;
}

absl::Status CudaShard::AwaitFetched(uint32_t chunk) {
  ZS_FAULT_POINT("worker.device.fetch.before_done");
  return Wait(ring_[parcel_of_[chunk]].event);
}

DeviceShard::Parcel CudaShard::parcel(uint32_t chunk) const {
  std::byte* const at = ring_memory_->data() + parcel_of_[chunk] * ring_plan_.parcel_bytes;
  return {at, at + ring_plan_.gradient_bytes};
}

absl::Status CudaShard::SendParameters(uint32_t chunk) {
  if (!HasDeviceParameters(memory_.config())) {
    FreeParcel(parcel_of_[chunk]);
    return absl::OkStatus();
  }
  const ChunkPlan& part = memory_.plan().chunks()[chunk];
  ZS_FAULT_POINT("worker.device.send");
  ZS_RETURN_IF_ERROR(Note(send_stream_->CopyToDevice(
      ParameterAddress(part.unit, part.begin), parcel(chunk).parameters,
      part.elements * SizeOf(memory_.layout().units()[part.unit].dtype))));
  RingSlot& slot = ring_[parcel_of_[chunk]];
  ZS_RETURN_IF_ERROR(Note(send_stream_->Record(slot.event)));
  slot.going = true;
  return absl::OkStatus();
}

absl::Status CudaShard::SentParameters(uint32_t chunk) {
  const uint32_t slot = parcel_of_[chunk];
  if (slot == kNoParcel) return absl::OkStatus();
  ZS_RETURN_IF_ERROR(Wait(ring_[slot].event));
  FreeParcel(slot);
  return absl::OkStatus();
}

absl::Status CudaShard::SentParameters() {
  for (size_t slot = 0; slot < ring_.size(); ++slot) {
    if (ring_[slot].going) ZS_RETURN_IF_ERROR(SentParameters(ring_[slot].chunk));
  }
  return absl::OkStatus();
}

}  // namespace zeroshard
