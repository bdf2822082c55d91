// Reducer: gradients of all ranks summed into this rank's accumulators, in the canonical order.
//
//   Scatter(unit) ... EndMicroStep     units are exchanged from the last to the first, each when it
//                                      and all before it are there, the rest at the end
//   exchange: slices and headers all-to-all -> sum by the tree -> presence of the accumulator
//   Boundary: `summed` = attempt, behind it all
//
// So the order of exchanges is the same on all ranks whatever order gradients appear in, and one
// that a rank does not have does not stop the others. Stage 1 with several micro-steps (local_sums)
// adds each gradient to a sum of its own when it comes and exchanges those sums at the boundary.
// One caller at a time. Only for client/dataplane.
#ifndef ZEROSHARD_CLIENT_DATAPLANE_REDUCER_H_
#define ZEROSHARD_CLIENT_DATAPLANE_REDUCER_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/dataplane/data_plane.h"
#include "client/dataplane/exchange_memory.h"
#include "client/dataplane/gradient_exchange.h"
#include "client/dataplane/plane_core.h"
#include "client/dataplane/rank_links.h"
#include "client/dataplane/slots.h"
#include "client/dataplane/stream_log.h"
#include "device/cuda/memory.h"
#include "transport/nccl/communicator.h"
#include "worker/cuda/kernels.h"
#include "worker/reduction_tree.h"

namespace zeroshard {

class Reducer {
 public:
  // `shared`: where DEVICE_SHARED is mapped. `links`: null where there is one rank. All must
  // outlive this.
  static absl::StatusOr<std::unique_ptr<Reducer>> Create(PlaneCore& core, OwnMemory& memory,
                                                         DeviceAddress shared, RankLinks* links);

  DeviceSlots& slots() { return slots_; }
  // As in DataPlane.
  void Begin(uint64_t attempt);
  absl::Status Scatter(const DeviceScatter& scatter);
  absl::Status EndMicroStep(uint32_t micro_step);
  absl::Status Boundary();

  absl::Status CheckProgress() { return log_.CheckProgress(core_.options().timeout); }
  absl::StatusOr<bool> Idle() { return log_.Done(log_.last()); }
  uint64_t scattered_bytes() const { return exchange_->sent_bytes(); }
  uint64_t scattered_between_nodes() const { return exchange_->between_nodes(); }

 private:
  // What this rank gives to one sum.
  struct Source {
    DeviceAddress data = 0;  // of the unit's element 0; 0: nothing
    DType dtype = DType::kFloat32;
    float weight = 1.0F;
    Presence presence = {};
    uint64_t scatter = 0;  // whose slot it is; 0: none
  };

  Reducer(PlaneCore& core, OwnMemory& memory, DeviceAddress shared, NcclCommunicator* communicator,
          StreamLog log);
  absl::Status Open(std::vector<uint32_t> node_of_rank);

  // With NCCL, before it is used: all that is exchanged is, so ranks need not agree on more.
  absl::Status Register(const DeviceMemory& memory);

  absl::StatusOr<Source> SourceOf(const DeviceScatter& scatter);
  absl::Status SumHere(uint32_t index, const Source& source);
  // Exchanges what can be.
  absl::Status Advance();
  absl::Status Exchange(uint32_t index, const Source& source);
  absl::StatusOr<DeviceAddress> WriteHeader(uint32_t index, const Source& source,
                                            const Presence& before);
  absl::Status Finish(uint32_t index, const Source& source, const char* kind);
  absl::Status CheckHeaders();
  absl::StatusOr<bool> IsRead(uint64_t scatter);
  // Which of a unit's outgoing headers is written now.
  uint32_t Turn() const { return at_boundary_ ? 2 : micro_step_ % 2; }

  PlaneCore& core_;
  OwnMemory& memory_;
  const DeviceAddress shared_;
  NcclCommunicator* const communicator_;
  StreamLog log_;
  const ReductionProgram single_;  // of one input
  DeviceSlots slots_;
  std::unique_ptr<CudaKernels> kernels_;
  std::unique_ptr<ExchangeMemory> buffers_;
  std::optional<GradientExchange> exchange_;  // on log_'s stream
  RegisteredHost counters_;
  std::optional<CudaEvent> ready_;  // of a gradient, on its stream

  uint64_t attempt_ = 0;
  uint32_t micro_step_ = 0;
  bool at_boundary_ = false;            // sums over micro-steps are exchanged
  uint32_t next_ = 0;                   // index of the unit that is exchanged next
  std::map<uint32_t, Source> waiting_;  // by index
  std::vector<Presence> local_;         // by index: what the sums of this rank hold
  std::vector<std::array<uint64_t, ExchangeMemory::kTurns>>
      sent_;  // by index and turn: mark after which it is free
  uint64_t scatters_ = 0;
  std::unordered_map<uint64_t, uint64_t> marks_;  // of scatters whose slot was enqueued to be read
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_DATAPLANE_REDUCER_H_
