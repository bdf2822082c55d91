// NodeIo: this node's I/O budget (storage/io_budget.h), shared out among the workers of all jobs.
//
// Owns the budget's memory. Made at start-up; decision thread, but for the budget itself. Workers
// keep their mappings when the server goes; a new one makes a new budget for new workers.
#ifndef ZEROSHARD_SERVER_NODE_IO_H_
#define ZEROSHARD_SERVER_NODE_IO_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/shared_memory.h"
#include "base/unique_fd.h"
#include "proto/internal.pb.h"
#include "storage/io_budget.h"

namespace zeroshard {

// A worker's number in the budget over all its processes, until the last one that could use it has
// been reaped. The budget outlives it.
class IoHolder {
 public:
  IoHolder(const IoBudget& budget, uint32_t number) : budget_(budget), number_(number) {}
  IoHolder(const IoHolder&) = delete;
  IoHolder& operator=(const IoHolder&) = delete;
  ~IoHolder() { budget_.RemoveHolder(number_); }

  uint32_t number() const { return number_; }
  // A process of the worker was reaped.
  void Release() const { budget_.Release(number_); }

 private:
  const IoBudget budget_;
  const uint32_t number_;
};

class NodeIo {
 public:
  // `limits` hold for each path. `clock` outlives all workers' holders.
  static absl::StatusOr<std::unique_ptr<NodeIo>> Create(const Clock* clock, const IoLimits& limits);

  absl::StatusOr<std::shared_ptr<const IoHolder>> Add(const std::string& job,
                                                      uint32_t worker) const;
  // A path that a job uses. ResourceExhausted when there are too many.
  absl::Status AddPath(const std::string& path) const {
    return budget_.AddDevice(path, limits_).status();
  }
  // What that worker gets with its Start, beside descriptor().
  internal::v1::WorkerRegion Describe(const IoHolder& holder) const;
  int descriptor() const { return fd_.get(); }

  const IoBudget& budget() const { return budget_; }

 private:
  NodeIo(UniqueFd fd, MappedRegion memory, IoBudget budget, const IoLimits& limits)
      : fd_(std::move(fd)),
        memory_(std::move(memory)),
        budget_(std::move(budget)),
        limits_(limits) {}

  const UniqueFd fd_;
  const MappedRegion memory_;
  const IoBudget budget_;
  const IoLimits limits_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_NODE_IO_H_
