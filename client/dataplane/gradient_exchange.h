// GradientExchange: the gradient of one unit from all ranks into the accumulators of their owners,
// by client/dataplane/exchange_plan.h, on one stream.
//
// Headers go to all ranks, each before the sums that read it. As the communicator: by one thread at
// a time with the device current, in the same order on all ranks. Only for client/dataplane.
#ifndef ZEROSHARD_CLIENT_DATAPLANE_GRADIENT_EXCHANGE_H_
#define ZEROSHARD_CLIENT_DATAPLANE_GRADIENT_EXCHANGE_H_

#include <cstdint>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/dataplane/exchange_memory.h"
#include "client/dataplane/exchange_plan.h"
#include "client/dataplane/plane_core.h"
#include "device/cuda/stream.h"
#include "transport/nccl/communicator.h"
#include "worker/cuda/kernels.h"

namespace zeroshard {

// By the bytes of a gradient's element, for what is exchanged in this job.
using ExchangePlans = std::map<uint64_t, ExchangePlan>;
absl::StatusOr<ExchangePlans> MakeExchangePlans(const PlaneCore& core,
                                                std::span<const uint32_t> node_of_rank);
ExchangeRoom RoomOf(const ExchangePlans& plans);

class GradientExchange {
 public:
  // `shared`: where DEVICE_SHARED is mapped. `communicator`: null where there is one rank. All must
  // outlive this.
  struct Parts {
    PlaneCore& core;
    CudaStream& stream;
    CudaKernels& kernels;
    ExchangeMemory& memory;
    DeviceAddress shared = 0;
    NcclCommunicator* communicator = nullptr;
  };
  GradientExchange(const Parts& parts, ExchangePlans plans, std::vector<uint32_t> node_of_rank)
      : parts_(parts), plans_(std::move(plans)), node_of_rank_(std::move(node_of_rank)) {}

  // This rank's gradient, whose header is in its place. `data` is of the unit's element 0; 0: there
  // is none. `first`: the accumulator holds nothing yet.
  struct Own {
    DeviceAddress data = 0;
    DType dtype = DType::kFloat32;
  };
  absl::Status Run(uint32_t index, const Own& own, bool first);

  uint64_t sent_bytes() const { return sent_bytes_; }
  // Of these, to ranks of other nodes.
  uint64_t between_nodes() const { return between_nodes_; }

 private:
  struct Messages {
    std::vector<NcclMessage> sends;
    std::vector<NcclMessage> receives;
  };
  Messages MessagesOf(const ExchangePlan::Step& step, uint32_t index, const Own& own) const;
  void AddParts(const ExchangePlan& plan, uint32_t index, Messages& messages) const;
  absl::Status Exchange(const Messages& messages);

  std::vector<SumInput> InputsOf(const ExchangeSum& sum, uint32_t index, const Own& own) const;
  absl::Status MakePart(const ExchangeSum& part, uint32_t index, const Own& own);
  absl::Status MergeParts(const ExchangePlan& plan, uint32_t index);
  absl::Status Accumulate(const ExchangePlan& plan, uint32_t index, const Own& own, bool first);

  const Parts parts_;
  const ExchangePlans plans_;
  const std::vector<uint32_t> node_of_rank_;
  uint64_t sent_bytes_ = 0;
  uint64_t between_nodes_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_DATAPLANE_GRADIENT_EXCHANGE_H_
