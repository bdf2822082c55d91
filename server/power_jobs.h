// PowerJobs: jobs with `zeroshard.durability: power` by name, and what it takes to go on with one
// whose memory ended with an earlier daemon.
//
// The table knows running jobs, too, from their first worker on, so that it is right whenever the
// daemon dies: the journal holds the same (docs/journal.md). Decision thread. The functions are
// pure; any thread. What lies in the files, and why the state that is chosen is whole:
// docs/nvme.md, "Power loss".
#ifndef ZEROSHARD_SERVER_POWER_JOBS_H_
#define ZEROSHARD_SERVER_POWER_JOBS_H_

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/internal.pb.h"
#include "proto/records.pb.h"
#include "server/planner.h"

namespace zeroshard {

struct PowerJob {
  uint64_t job_id = 0;
  records::v1::PowerFacts facts;
  // False for files that the journal says nothing of: nobody knows the job's name.
  bool known = true;
};

class PowerJobs {
 public:
  void Put(const std::string& name, PowerJob job) { jobs_[name] = std::move(job); }
  void Erase(const std::string& name) { jobs_.erase(name); }
  // Null when there is none.
  PowerJob* Find(const std::string& name);
  const std::map<std::string, PowerJob>& all() const { return jobs_; }
  bool HasId(uint64_t job_id) const;

 private:
  std::map<std::string, PowerJob> jobs_;
};

bool IsPowerJob(const JobPlan& plan);

// FailedPrecondition or InvalidArgument, naming key or parameter, for a job that has something
// which would be lost with the power.
absl::Status CheckPowerPlan(const JobPlan& plan);

// What must be the same for the files of one job to serve another.
absl::StatusOr<records::v1::PowerFacts> PowerFactsOf(const JobPlan& plan);

// FailedPrecondition, saying what differs and what to do, unless the job of that plan may go on
// with the files.
absl::Status CheckResumable(const std::string& name, const PowerJob& job, const JobPlan& plan);

// Where all workers go on. FailedPrecondition or DataLoss, naming file or worker, when the job was
// there and is not now.
absl::StatusOr<internal::v1::ResumeJob> ChooseResume(
    const std::string& name, bool begun, std::span<const internal::v1::PowerStates> workers);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_POWER_JOBS_H_
