#include "tests/transport/nccl/rank.h"

#include <thread>

#include "base/check.h"
#include "base/status.h"

namespace zeroshard {

Bytes PatternOf(uint32_t from, uint32_t number, uint64_t bytes) {
  Bytes pattern(bytes);
  uint32_t state = from * 2654435761U + number * 40503U + 1;
  for (uint8_t& byte : pattern) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<uint8_t>(state >> 24);
  }
  return pattern;
}

absl::StatusOr<std::unique_ptr<Rank>> Rank::Create(uint32_t rank) {
  ZS_ASSIGN_OR_RETURN(auto device, CudaDevice::Open(static_cast<int>(rank)));
  ZS_RETURN_IF_ERROR(device->MakeCurrent());
  ZS_ASSIGN_OR_RETURN(auto stream, CudaStream::Create(*device, StreamPriority::kNormal));
  ZS_ASSIGN_OR_RETURN(auto copies, CudaStream::Create(*device, StreamPriority::kNormal));
  ZS_ASSIGN_OR_RETURN(auto memory, DeviceMemory::Create(*device, kMemory));
  return std::unique_ptr<Rank>(
      new Rank(std::move(device), std::move(stream), std::move(copies), std::move(memory)));
}

Rank::~Rank() = default;

NcclBuffer Rank::Place(uint64_t bytes) {
  const uint64_t taken = (bytes + 255) / 256 * 256;
  const uint64_t offset = used_.fetch_add(taken);
  ZS_CHECK(offset + taken <= kMemory, "the memory of a test's rank is too small");
  return {memory_.address() + offset, bytes};
}

NcclBuffer Rank::PlaceOf(const Bytes& content) {
  const NcclBuffer place = Place(content.size());
  Write(place, content);
  return place;
}

void Rank::Write(const NcclBuffer& place, const Bytes& content) {
  const absl::Status status =
      content.empty() ? absl::OkStatus()
                      : copies_.CopyToDevice(place.address, content.data(), content.size());
  ZS_CHECK(status.ok() && copies_.Synchronize(absl::Seconds(10)).ok(), status.ToString());
}

Bytes Rank::Read(const NcclBuffer& buffer) {
  Bytes content(buffer.bytes);
  const absl::Status status =
      content.empty() ? absl::OkStatus()
                      : copies_.CopyToHost(content.data(), buffer.address, content.size());
  ZS_CHECK(status.ok() && copies_.Synchronize(absl::Seconds(10)).ok(), status.ToString());
  return content;
}

void RunRanks(uint32_t ranks, const std::function<void(uint32_t rank)>& body) {
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank) threads.emplace_back(body, rank);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace zeroshard
