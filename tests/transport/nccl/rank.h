// One rank of a test: a GPU of the fake driver, a stream and some of its memory.
#ifndef ZEROSHARD_TESTS_TRANSPORT_NCCL_RANK_H_
#define ZEROSHARD_TESTS_TRANSPORT_NCCL_RANK_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "device/cuda/device.h"
#include "device/cuda/memory.h"
#include "device/cuda/stream.h"
#include "transport/nccl/communicator.h"

namespace zeroshard {

using Bytes = std::vector<uint8_t>;

// What rank `from` sends in message `number`.
Bytes PatternOf(uint32_t from, uint32_t number, uint64_t bytes);

class Rank {
 public:
  static constexpr uint64_t kMemory = uint64_t{4} << 20;

  // On device `rank`, whose context becomes the calling thread's.
  static absl::StatusOr<std::unique_ptr<Rank>> Create(uint32_t rank);
  ~Rank();

  // The next free place of this rank's memory, 256-byte aligned.
  NcclBuffer Place(uint64_t bytes);
  NcclBuffer PlaceOf(const Bytes& content);
  void Write(const NcclBuffer& place, const Bytes& content);
  Bytes Read(const NcclBuffer& buffer);

  // All of it.
  NcclBuffer memory() const { return {memory_.address(), memory_.bytes()}; }
  CUstream_st* stream() { return stream_.handle(); }
  std::function<absl::StatusOr<bool>()> done() {
    return [this] { return stream_.Query(); };
  }
  // Whether the stream has come to its end in time.
  bool Passed(absl::Duration timeout) { return stream_.Synchronize(timeout).ok(); }

 private:
  Rank(std::unique_ptr<CudaDevice> device, CudaStream stream, CudaStream copies,
       DeviceMemory memory)
      : device_(std::move(device)),
        stream_(std::move(stream)),
        copies_(std::move(copies)),
        memory_(std::move(memory)) {}

  const std::unique_ptr<CudaDevice> device_;
  CudaStream stream_;
  CudaStream copies_;
  DeviceMemory memory_;
  std::atomic<uint64_t> used_ = 0;
};

// Runs `body` for each rank, on a thread each.
void RunRanks(uint32_t ranks, const std::function<void(uint32_t rank)>& body);

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_TRANSPORT_NCCL_RANK_H_
