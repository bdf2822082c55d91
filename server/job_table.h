// JobTable: the jobs of this daemon by name, and what they share.
//
// Lives on the decision thread; every method but count() is called there. Jobs are dropped as soon
// as they end. A worker that was told to stop is given kStopGrace, then killed.

#ifndef ZEROSHARD_SERVER_JOB_TABLE_H_
#define ZEROSHARD_SERVER_JOB_TABLE_H_

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/job_host.h"
#include "server/job_metrics.h"

namespace zeroshard {

class JobTable {
 public:
  // `environment` without memory_in_use, gpu_in_use and retire, which the table provides.
  explicit JobTable(HostEnvironment environment);

  // Attaches to the job of this name, making it when there is none.
  void Attach(const std::string& name, AttachCall call);
  void CancelAttach(const std::string& name, uint64_t attach_id);

  // NotFound with the names that there are.
  absl::StatusOr<JobHost*> Find(const std::string& name);
  // The descriptors behind a token of any job.
  std::optional<JobHost::Granted> Descriptors(const std::string& token) const;

  absl::StatusOr<uint64_t> Remove(const std::string& name, bool force);

  // Jobs that are not running and can be resumed, and files that nobody knows the job of.
  std::vector<admin::v1::JobSummary> Resumable() const;

  // Ends all jobs, some of them for now, and calls `done` once every worker has ended.
  void Shutdown(std::function<void()> done);

  std::vector<admin::v1::JobSummary> Summaries() const;
  // How many jobs there are; any thread, so that asking how the daemon does costs it nothing.
  uint32_t count() const { return count_.load(std::memory_order_relaxed); }
  // What jobs other than `except` hold.
  MemoryInUse InUse(const std::string& except) const;
  // The same of GPUs, by device.
  std::map<std::string, uint64_t> GpuInUse(const std::string& except) const;

  // Drops jobs that have ended, soon.
  void Sweep() { SweepLater(); }

  // Refreshes the node's own metrics, every second while the loop runs.
  void StartMetrics();

 private:
  // Drops jobs that have ended, once no callback of theirs is on the stack.
  void SweepLater();
  void Retire(WorkerProcess process);
  // What is left of a job that is not running.
  absl::StatusOr<uint64_t> RemoveLost(const std::string& name);

  HostEnvironment environment_;
  std::map<std::string, std::unique_ptr<JobHost>> jobs_;
  std::map<int, std::shared_ptr<WorkerProcess>> retired_;  // by pidfd
  std::function<void()> all_gone_;
  bool sweeping_ = false;
  uint32_t ticks_ = 0;  // of the metrics
  std::atomic<uint32_t> count_{0};
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_JOB_TABLE_H_
