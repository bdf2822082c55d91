// Attach: how a rank joins a job, up to the memory that it shares with its worker.
//
//   Attach call -> reply with token and list of regions
//   descriptor socket: token -> "ok" and the descriptors
//   each descriptor: sealed? long enough? -> mapped
//   own Layout: same fingerprint as the daemon's?
//
// Blocking; called once a session, before it has any other thread.
#ifndef ZEROSHARD_CLIENT_ATTACH_H_
#define ZEROSHARD_CLIENT_ATTACH_H_

#include "absl/status/statusor.h"
#include "base/shared_memory.h"
#include "base/unique_fd.h"
#include "client/daemon_client.h"
#include "client/session.h"
#include "proto/trainer.pb.h"
#include "storage/layout.h"

namespace zeroshard {

// What a rank holds of its job. A region that the daemon did not hand out is empty.
struct Attachment {
  trainer::v1::AttachReply reply;
  Layout layout;
  MappedRegion parameter_window;
  std::shared_ptr<const MappedRegion> gradient_window;  // to be written; never null
  MappedRegion rank_page;
  // Of jobs on GPUs: device memory of the rank's worker, and the counters shared with it.
  UniqueFd device_shared;
  uint64_t device_shared_bytes = 0;
  MappedRegion device_counters;
};

// InvalidArgument before any call for a manifest that has no Layout; DataLoss or FailedPrecondition
// for descriptors or a fingerprint that are not as promised; else errors as Session::Attach.
absl::StatusOr<Attachment> AttachRank(const DaemonClient& daemon, const AttachOptions& options);

// The groups of a manifest or a step request.
template <typename Repeated>
void ToProto(const std::vector<GroupHyperparameters>& groups, Repeated* proto) {
  for (const GroupHyperparameters& group : groups) {
    auto* entry = proto->Add();
    entry->set_lr(group.lr);
    entry->set_weight_decay(group.weight_decay);
    entry->set_beta1(group.beta1);
    entry->set_beta2(group.beta2);
    entry->set_eps(group.eps);
    entry->set_momentum(group.momentum);
    entry->set_dampening(group.dampening);
    entry->set_nesterov(group.nesterov);
    entry->set_bias_correction(group.bias_correction);
  }
}

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_ATTACH_H_
