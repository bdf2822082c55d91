// From an AttachRequest to what the decision thread needs: the plan, and what all ranks must agree
// on.
//
// Pure; any thread.

#ifndef ZEROSHARD_SERVER_ATTACH_REQUEST_H_
#define ZEROSHARD_SERVER_ATTACH_REQUEST_H_

#include <memory>

#include "absl/status/statusor.h"
#include "proto/trainer.pb.h"
#include "server/daemon_config.h"
#include "server/job.h"
#include "server/planner.h"

namespace zeroshard {

struct PreparedAttach {
  std::shared_ptr<const JobSpec> spec;
  std::shared_ptr<JobPlan> plan;
};

// Every mistake of the caller that can be seen without other ranks: InvalidArgument or
// FailedPrecondition naming the field, key or parameter, PermissionDenied for an nvme_path that
// `right` does not cover, and ResourceExhausted for a job above its own limits.
absl::StatusOr<PreparedAttach> PrepareAttach(const trainer::v1::AttachRequest& request,
                                             const DaemonConfig& config, uint32_t lanes,
                                             PathRight right);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_ATTACH_REQUEST_H_
