// NodeCores: this node's cores, shared out among the workers of all jobs.
//
// Owns the core budget's memory (device/cpu/core_budget.h). Made at start-up; decision thread, but
// for the budget itself. Workers keep their mappings when the server goes; a new one makes a new
// budget for new workers.
#ifndef ZEROSHARD_SERVER_NODE_CORES_H_
#define ZEROSHARD_SERVER_NODE_CORES_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "base/shared_memory.h"
#include "base/unique_fd.h"
#include "device/cpu/core_budget.h"
#include "proto/internal.pb.h"

namespace zeroshard {

// A worker's number in the budget, from before its process starts until after it has ended. The
// budget outlives it.
class CoreHolder {
 public:
  CoreHolder() = default;
  explicit CoreHolder(const CoreShare& share) : share_(share) {}
  CoreHolder(CoreHolder&& other) noexcept : share_(std::exchange(other.share_, std::nullopt)) {}
  CoreHolder& operator=(CoreHolder&& other) noexcept {
    if (this != &other) {
      Return();
      share_ = std::exchange(other.share_, std::nullopt);
    }
    return *this;
  }
  ~CoreHolder() { Return(); }

  bool valid() const { return share_.has_value(); }
  uint32_t number() const { return share_->holder; }

 private:
  void Return() {
    if (share_.has_value()) share_->budget.RemoveHolder(share_->holder);
  }
  std::optional<CoreShare> share_;
};

class NodeCores {
 public:
  // The budget of the processors that this process may use.
  static absl::StatusOr<std::unique_ptr<NodeCores>> Create();

  // For a worker on `device` ("cpu:0"), on cores of its NUMA node.
  absl::StatusOr<CoreHolder> Add(std::string_view device) const;
  // What that worker gets with its Start, beside descriptor().
  internal::v1::WorkerRegion Describe(const CoreHolder& holder) const;
  int descriptor() const { return fd_.get(); }

  // Threads of one worker when all `devices` work: the cores of a NUMA node over its devices, at
  // least one.
  uint32_t LanesFor(const std::vector<std::string>& devices) const;

  const CoreBudget& budget() const { return budget_; }

 private:
  NodeCores(UniqueFd fd, MappedRegion memory, const CoreBudget& budget)
      : fd_(std::move(fd)), memory_(std::move(memory)), budget_(budget) {}

  const UniqueFd fd_;
  const MappedRegion memory_;
  const CoreBudget budget_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_NODE_CORES_H_
