// ExchangeMemory: what a rank needs on its device, and beside it on the host, to sum gradients:
// room for what other ranks send, headers, tables of parameters, and at stage 1 its own sums.
//
// Made for one generation. Constant after Create, but for what lies in the memory. Only for
// client/dataplane.
#ifndef ZEROSHARD_CLIENT_DATAPLANE_EXCHANGE_MEMORY_H_
#define ZEROSHARD_CLIENT_DATAPLANE_EXCHANGE_MEMORY_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/dataplane/exchange_header.h"
#include "client/dataplane/plane_core.h"
#include "device/cuda/memory.h"
#include "device/cuda/stream.h"

namespace zeroshard {

// Page-aligned host memory that the device copies from and to; zeroed.
class PinnedHost {
 public:
  static absl::StatusOr<std::unique_ptr<PinnedHost>> Create(const CudaDevice& device,
                                                            uint64_t bytes);
  std::byte* data() const { return memory_.get(); }

 private:
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  std::unique_ptr<std::byte, Free> memory_;
  RegisteredHost registered_;  // after memory_: unregistered first
};

// What arrives, and sums on their way (client/dataplane/exchange_plan.h): slots of a slice each.
struct ExchangeRoom {
  uint32_t pieces = 0;  // of the gradients' type
  uint32_t parts = 0;   // fp32
};

class ExchangeMemory {
 public:
  // `stream`: for what is copied to the device now.
  static absl::StatusOr<std::unique_ptr<ExchangeMemory>> Create(const PlaneCore& core,
                                                                CudaStream& stream,
                                                                const ExchangeRoom& room);

  // Trainable units with elements, in the order of exchanges: from the last to the first. What
  // follows is asked by the index in this list.
  const std::vector<uint32_t>& order() const { return order_; }
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t index_of(uint32_t unit) const { return index_of_[unit]; }

  // The header of `rank`, as it arrived; this rank's own is sent from there.
  DeviceAddress header(uint32_t index, uint32_t rank) const {
    return headers_.address() + (uint64_t{index} * ranks_ + rank) * sizeof(ExchangeHeader);
  }
  uint64_t headers_bytes() const {
    return uint64_t{ranks_} * order_.size() * sizeof(ExchangeHeader);
  }
  // The same on the host, after a copy of them all.
  const std::shared_ptr<PinnedHost>& arrived() const { return arrived_; }
  // Where a header is written by the host: three a unit, so that one need not be waited for.
  static constexpr uint32_t kTurns = 3;
  ExchangeHeader& outgoing(uint32_t index, uint32_t turn) const {
    return reinterpret_cast<ExchangeHeader*>(outgoing_->data())[index * kTurns + turn];
  }

  // What messages between ranks are sent from and received in.
  std::vector<const DeviceMemory*> exchanged() const { return {&headers_, &staging_, &local_}; }

  DeviceAddress piece(uint32_t slot) const {
    return staging_.address() + uint64_t{slot} * piece_stride_;
  }
  // As large as a piece; nobody writes it.
  DeviceAddress nothing() const { return piece(room_.pieces); }
  DeviceAddress part(uint32_t slot) const {
    return piece(room_.pieces + 1) + uint64_t{slot} * part_stride_;
  }
  // Room for the 16 words that say what a part holds.
  DeviceAddress presence(uint32_t slot) const {
    return presences_.address() + uint64_t{slot} * sizeof(Presence);
  }

  // DeviceParameter[] of the unit.
  DeviceAddress table(uint32_t index) const { return tables_.address() + table_offsets_[index]; }
  // Stage 1 with several micro-steps: this rank's sums (fp32) of element 0 of the unit, and the
  // header that tells what a gradient holds.
  DeviceAddress local(uint32_t index) const { return local_.address() + local_offsets_[index]; }

 private:
  ExchangeMemory() = default;
  absl::Status MakeTables(const PlaneCore& core, CudaStream& stream);
  absl::Status MakeBuffers(const PlaneCore& core);

  uint32_t ranks_ = 1;
  ExchangeRoom room_;
  std::vector<uint32_t> order_;
  std::vector<uint32_t> index_of_;  // by unit
  std::vector<uint64_t> table_offsets_;
  std::vector<uint64_t> local_offsets_;
  DeviceMemory tables_;
  DeviceMemory headers_;
  DeviceMemory staging_;
  DeviceMemory local_;
  DeviceMemory presences_;
  uint64_t piece_stride_ = 0;
  uint64_t part_stride_ = 0;
  std::shared_ptr<PinnedHost> arrived_;
  std::unique_ptr<PinnedHost> outgoing_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_DATAPLANE_EXCHANGE_MEMORY_H_
