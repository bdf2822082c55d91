// NodeIo: this node's I/O budget (storage/io_budget.h), shared out among the workers of all jobs.
//
// Owns the budget's memory. Made at start-up; decision thread, but for the budget itself. Workers
// keep their mappings when the server goes; a new one makes a new budget for new workers, which
// goes on with the day's count of bytes written: a thread of its own saves it now and then, and at
// the end.
#ifndef ZEROSHARD_SERVER_NODE_IO_H_
#define ZEROSHARD_SERVER_NODE_IO_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/shared_memory.h"
#include "base/unique_fd.h"
#include "proto/internal.pb.h"
#include "storage/io_budget.h"
#include "storage/io_write_counts.h"

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
  struct Options {
    IoLimits limits;        // of each path
    std::string state_dir;  // where the day's counts are kept
    absl::Duration save_interval = absl::Seconds(30);
  };
  // `clock` outlives all workers' holders. A file of counts that cannot be read is a warning.
  static absl::StatusOr<std::unique_ptr<NodeIo>> Create(const Clock* clock, const Options& options);
  ~NodeIo();

  absl::StatusOr<std::shared_ptr<const IoHolder>> Add(const std::string& job,
                                                      uint32_t worker) const;
  // A path that a job uses. Returns the path of its device in the budget: the path of the daemon or
  // of another job that it lies beneath, on the same file system, or its own. ResourceExhausted
  // when there are too many.
  absl::StatusOr<std::string> AddPath(const std::string& path) const;
  // What that worker gets with its Start, beside descriptor().
  internal::v1::WorkerRegion Describe(const IoHolder& holder) const;
  int descriptor() const { return fd_.get(); }

  const IoBudget& budget() const { return budget_; }

 private:
  NodeIo(UniqueFd fd, MappedRegion memory, IoBudget budget, const Options& options)
      : fd_(std::move(fd)),
        memory_(std::move(memory)),
        budget_(std::move(budget)),
        options_(options) {}
  void SaveNowAndThen();

  const UniqueFd fd_;
  const MappedRegion memory_;
  const IoBudget budget_;
  const Options options_;
  UniqueFd directory_;
  mutable absl::Mutex mu_;
  mutable std::optional<IoWriteCounts> counts_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread saver_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_NODE_IO_H_
