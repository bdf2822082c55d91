// CheckpointOps: Save, Restore and Export of a job, run on the calling (gRPC) thread.
//
// Workers write and read the shards; this makes the directory, verifies, and commits. A call that
// every rank makes runs once: ranks that ask for the same while it runs, or after it ended and
// before the job went on to another step, share its result. Thread-safe.

#ifndef ZEROSHARD_SERVER_CHECKPOINT_OPS_H_
#define ZEROSHARD_SERVER_CHECKPOINT_OPS_H_

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "proto/records.pb.h"
#include "proto/trainer.pb.h"
#include "server/daemon_config.h"
#include "server/event_loop.h"
#include "server/job_metrics.h"
#include "server/job_table.h"

namespace zeroshard {

class CheckpointOps {
 public:
  struct Environment {
    EventLoop* loop = nullptr;
    JobTable* table = nullptr;
    const DaemonConfig* config = nullptr;
    JobMetrics* metrics = nullptr;
    std::function<void(records::v1::JournalRecord)> journal;
  };
  explicit CheckpointOps(const Environment& environment) : environment_(environment) {}

  absl::StatusOr<trainer::v1::SaveReply> Save(const trainer::v1::SaveRequest& request);
  absl::StatusOr<trainer::v1::RestoreReply> Restore(const trainer::v1::RestoreRequest& request);
  // An empty token is an operator's call.
  absl::StatusOr<trainer::v1::ExportReply> Export(const trainer::v1::ExportRequest& request);

 private:
  // What an operation needs to know of its job, copied on the decision thread.
  struct JobFacts {
    uint64_t job_id = 0;
    uint32_t rank = 0;
    uint64_t attempt = 0;  // of the step in flight
    uint32_t workers = 0;
    std::shared_ptr<const JobPlan> plan;
  };
  struct Result {
    uint64_t step = 0;
    uint64_t bytes = 0;
    std::string path;
    std::vector<std::string> user_states;
  };
  struct Shared {
    std::string arguments;
    uint64_t job_id = 0;
    std::set<uint32_t> ranks;  // who has had, or waits for, the result
    bool done = false;
    uint64_t attempt = 0;  // of the job when it was done
    absl::StatusOr<Result> result = absl::UnknownError("not done");
  };
  using Work = std::function<absl::StatusOr<Result>(const JobFacts&)>;

  absl::StatusOr<JobFacts> Facts(const std::string& job, const std::string& token);
  // Runs `work`, or shares what another rank ran with the same arguments.
  absl::StatusOr<Result> Once(const std::string& job, const std::string& token,
                              const std::string& kind, const std::string& arguments,
                              const Work& work);
  absl::StatusOr<std::vector<internal::v1::ShardDone>> RunOnShards(const std::string& job,
                                                                   JobHost::ShardCommand command);
  absl::StatusOr<Result> DoSave(const trainer::v1::SaveRequest& request, const JobFacts& facts);
  absl::StatusOr<Result> DoRestore(const trainer::v1::RestoreRequest& request,
                                   const JobFacts& facts);
  absl::StatusOr<Result> DoExport(const trainer::v1::ExportRequest& request);

  const Environment environment_;
  absl::Mutex mu_;
  std::map<std::string, std::shared_ptr<Shared>> shared_ ABSL_GUARDED_BY(mu_);  // by job and kind
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_CHECKPOINT_OPS_H_
