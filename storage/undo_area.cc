#include "storage/undo_area.h"

#include <cstring>
#include <limits>
#include <new>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status.h"
#include "base/strings.h"

namespace zeroshard {
namespace {

constexpr uint64_t kMagic = 0x31444e5552485a53;  // "SZHRUND1" in memory
constexpr uint32_t kVersion = 2;
constexpr size_t kAlignment = 64;

absl::Status Damaged(uint32_t lane, std::string_view what, uint64_t found, uint64_t expected) {
  return absl::DataLossError(absl::StrCat("undo record of lane ", lane, ": ", Abs(what), " is ",
                                          found, ", expected ", expected));
}

// Checks the live record against the arrays it is about to be written to.
absl::Status CheckRecord(uint32_t lane, const LaneRecord& record, const UndoChunk& chunk) {
  ZS_RETURN_IF_ERROR(ValidateUndoChunk(chunk));
  if (record.array_count != chunk.array_count) {
    return Damaged(lane, "array count", record.array_count, chunk.array_count);
  }
  for (uint32_t i = 0; i < chunk.array_count; ++i) {
    if (record.element_bytes[i] != chunk.arrays[i].element_bytes) {
      return Damaged(lane, "element size", record.element_bytes[i], chunk.arrays[i].element_bytes);
    }
  }
  if (record.elements == 0 || record.elements > chunk.group_elements) {
    return Damaged(lane, "group size", record.elements, chunk.group_elements);
  }
  if (record.begin % chunk.group_elements != 0) {
    return Damaged(lane, "first element", record.begin, chunk.group_elements);
  }
  if (record.begin > chunk.elements || record.elements > chunk.elements - record.begin) {
    return Damaged(lane, "first element", record.begin, chunk.elements - record.elements);
  }
  return absl::OkStatus();
}

void Restore(const LaneRecord& record, const UndoChunk& chunk) {
  const std::byte* payload = record.payload;
  for (uint32_t i = 0; i < chunk.array_count; ++i) {
    const std::span<std::byte> bytes = UndoBytes(chunk, i, record.begin, record.elements);
    std::memcpy(bytes.data(), payload, bytes.size());
    payload += bytes.size();
  }
}

}  // namespace

absl::Status ValidateUndoChunk(const UndoChunk& chunk) {
  if (chunk.array_count == 0 || chunk.array_count > kMaxUndoArrays || chunk.group_elements == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("cannot protect ", chunk.array_count, " arrays in groups of ",
                     chunk.group_elements, " elements; arrays must be 1 to ", kMaxUndoArrays));
  }
  uint64_t bytes = 0;
  for (uint32_t i = 0; i < chunk.array_count; ++i) {
    const bool slotted = chunk.arrays[i].slots != nullptr;
    bytes += uint64_t{chunk.arrays[i].element_bytes} *
             (slotted ? chunk.max_slots : chunk.group_elements);
  }
  if (bytes == 0 || bytes > kUndoPayloadBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a group of ", bytes, " bytes does not fit in an undo record of ", kUndoPayloadBytes));
  }
  return absl::OkStatus();
}

size_t UndoArea::BytesNeeded(uint32_t lanes, uint32_t chunks) {
  const size_t bytes =
      sizeof(UndoAreaHeader) + size_t{lanes} * sizeof(LaneArea) + size_t{chunks} * sizeof(uint64_t);
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

UndoArea::UndoArea(std::byte* memory, uint32_t lanes, uint32_t chunks)
    : lane_areas_(reinterpret_cast<LaneArea*>(memory + sizeof(UndoAreaHeader))),
      done_(reinterpret_cast<std::atomic<uint64_t>*>(memory + sizeof(UndoAreaHeader) +
                                                     size_t{lanes} * sizeof(LaneArea))),
      lanes_(lanes),
      chunks_(chunks) {}

absl::StatusOr<UndoArea> UndoArea::Format(std::byte* memory, size_t bytes, uint32_t lanes,
                                          uint32_t chunks) {
  if (lanes == 0 || chunks == 0) {
    return absl::InvalidArgumentError(absl::StrCat("an undo area needs lanes and chunks, found ",
                                                   lanes, " lanes, ", chunks, " chunks"));
  }
  if (reinterpret_cast<uintptr_t>(memory) % kAlignment != 0 || bytes < BytesNeeded(lanes, chunks)) {
    return absl::InvalidArgumentError(absl::StrCat("an undo area of ", lanes, " lanes and ", chunks,
                                                   " chunks needs ", BytesNeeded(lanes, chunks),
                                                   " bytes at a multiple of ", kAlignment,
                                                   ", found ", bytes, " bytes"));
  }
  std::memset(memory, 0, BytesNeeded(lanes, chunks));
  UndoArea area(memory, lanes, chunks);
  for (uint32_t lane = 0; lane < lanes; ++lane) {
    new (&area.lane_areas_[lane].header.position) std::atomic<uint64_t>(0);
  }
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) {
    new (&area.done_[chunk]) std::atomic<uint64_t>(0);
  }
  UndoAreaHeader header = {};
  header.magic = kMagic;
  header.version = kVersion;
  header.lanes = lanes;
  header.chunks = chunks;
  header.payload_bytes = kUndoPayloadBytes;
  std::memcpy(memory, &header, sizeof(header));
  return area;
}

absl::StatusOr<UndoArea> UndoArea::Adopt(std::byte* memory, size_t bytes) {
  UndoAreaHeader header;
  if (reinterpret_cast<uintptr_t>(memory) % kAlignment != 0 || bytes < sizeof(header)) {
    return absl::DataLossError(absl::StrCat("no undo area in ", bytes, " bytes"));
  }
  std::memcpy(&header, memory, sizeof(header));
  if (header.magic != kMagic || header.version != kVersion ||
      header.payload_bytes != kUndoPayloadBytes) {
    return absl::DataLossError(absl::StrCat(
        "not an undo area of this version: magic ", absl::Hex(header.magic), ", version ",
        header.version, " (expected ", kVersion, "), records of ", header.payload_bytes));
  }
  if (header.lanes == 0 || header.chunks == 0 || bytes < BytesNeeded(header.lanes, header.chunks)) {
    return absl::DataLossError(absl::StrCat("undo area of ", header.lanes, " lanes and ",
                                            header.chunks, " chunks does not fit in ", bytes,
                                            " bytes"));
  }
  return UndoArea(memory, header.lanes, header.chunks);
}

std::optional<UndoResume> UndoArea::InFlight(uint32_t lane) const {
  const LaneArea& area = lane_areas_[lane];
  const uint64_t position = area.header.position.load(std::memory_order_acquire);
  if (position == 0) return std::nullopt;
  const LaneRecord& record = area.records[position % 2];
  return UndoResume{.lane = lane,
                    .key = {.tag = record.tag, .op = record.op},
                    .chunk = record.chunk,
                    .next_element = record.begin};
}

absl::StatusOr<std::vector<UndoResume>> UndoArea::Recover(Resolver resolver) const {
  std::vector<UndoResume> torn;
  for (uint32_t lane = 0; lane < lanes_; ++lane) {
    const std::optional<UndoResume> in_flight = InFlight(lane);
    if (!in_flight.has_value()) continue;
    std::atomic<uint64_t>& position = lane_areas_[lane].header.position;
    const uint64_t sequence = position.load(std::memory_order_relaxed);
    const LaneRecord& record = lane_areas_[lane].records[sequence % 2];
    if (record.sequence != sequence) return Damaged(lane, "sequence", record.sequence, sequence);
    if (record.chunk >= chunks_) return Damaged(lane, "chunk", record.chunk, chunks_ - 1);
    if (IsDone(record.chunk, record.tag)) {
      position.store(0, std::memory_order_release);
      continue;
    }
    ZS_ASSIGN_OR_RETURN(const UndoChunk chunk, resolver(in_flight->key, in_flight->chunk));
    ZS_RETURN_IF_ERROR(CheckRecord(lane, record, chunk));
    Restore(record, chunk);
    torn.push_back(*in_flight);
  }
  return torn;
}

void UndoArea::Abandon() const {
  for (uint32_t lane = 0; lane < lanes_; ++lane) {
    lane_areas_[lane].header.position.store(0, std::memory_order_release);
  }
}

}  // namespace zeroshard
