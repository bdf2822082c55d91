// BudgetGate: the tier's transfers take their turns in the node's I/O budget (docs/io_budget.md).
// Loop thread only.
#ifndef ZEROSHARD_WORKER_BUDGET_GATE_H_
#define ZEROSHARD_WORKER_BUDGET_GATE_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "storage/io_budget.h"
#include "storage/io_queue.h"
#include "worker/tier_types.h"

namespace zeroshard {

class BudgetGate final : public IoGate {
 public:
  // `devices`: the budget's number for each path of the tier.
  BudgetGate(IoShare share, std::vector<uint32_t> devices)
      : share_(std::move(share)), devices_(std::move(devices)) {}

  absl::Duration TryStart(uint32_t path, IoOperation operation, uint64_t bytes) override {
    const IoTurn turn =
        share_.budget.TryTake(devices_[path], share_.holder, bytes, DirectionOf(operation));
    if (turn.granted) return absl::ZeroDuration();
    return turn.wait > kSoonest ? turn.wait : kSoonest;
  }
  void Done(uint32_t path) override { share_.budget.Give(devices_[path], share_.holder); }
  void Withdraw(uint32_t path, IoOperation operation) override {
    share_.budget.Withdraw(devices_[path], share_.holder, DirectionOf(operation));
  }

 private:
  // A refusal without a wait: an own completion may do.
  static constexpr absl::Duration kSoonest = absl::Microseconds(50);

  static IoDirection DirectionOf(IoOperation operation) {
    return operation == IoOperation::kRead ? IoDirection::kRead : IoDirection::kWrite;
  }

  const IoShare share_;
  const std::vector<uint32_t> devices_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_BUDGET_GATE_H_
