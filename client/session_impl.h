// What a Session holds. Only for client/session*.cc.
#ifndef ZEROSHARD_CLIENT_SESSION_IMPL_H_
#define ZEROSHARD_CLIENT_SESSION_IMPL_H_

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "client/attach.h"
#include "client/daemon_client.h"
#include "client/device_side.h"
#include "client/fork_guard.h"
#include "client/request_channel.h"
#include "client/session.h"
#include "client/slot_ring.h"
#include "proto/trainer.pb.h"
#include "storage/partition.h"

namespace zeroshard {

struct Session::Impl {
  Impl(const AttachOptions& attach_options, DaemonClient client, Attachment attached)
      : daemon(std::move(client)),
        rank(attach_options.rank),
        world_size(attach_options.world_size),
        job(attach_options.job),
        attachment(std::move(attached)),
        warnings(attachment.reply.warnings().begin(), attachment.reply.warnings().end()),
        slots(attachment.gradient_window->size() -
              ParameterRingBytes(attachment.layout, attachment.reply.config())),
        groups(attach_options.groups) {}

  absl::Status Open(std::function<bool()> interrupted);
  // The data plane of a job on GPUs.
  absl::Status OpenDevice(const AttachOptions& options);
  // Waits for a step that was sent, and brings the data plane to the next one. OK on hosts.
  absl::Status Settle();
  // `status` of the data plane, or why the generation died with it.
  absl::Status Explain(const absl::Status& status) const;
  absl::Status CheckOnDevice() const;
  // Ends the data plane, if there is one, before the session does.
  void CloseDevice();
  absl::Status ScatterOnDevice(const ScatterRequest& request);
  // What a completed request still needs before its Wait may return.
  absl::Status FinishOnDevice(RequestId id);
  absl::StatusOr<RequestId> GatherOnDevice(std::span<const uint32_t> units,
                                           const GatherOptions& options);
  StepResult Result();
  absl::Status CheckHere() const;
  absl::Status CheckUnit(uint32_t unit) const;
  absl::StatusOr<RequestId> SubmitUsingSlot(trainer::v1::SessionRequest request, uint64_t offset,
                                            uint64_t bytes);
  template <typename Units>
  absl::Status SetUnits(std::span<const uint32_t> units, Units* target) const;

  // Constant after Open.
  const DaemonClient daemon;
  const uint32_t rank;
  const uint32_t world_size;
  const std::string job;
  Attachment attachment;
  const std::vector<std::string> warnings;
  const uint64_t fork_generation = ForkGeneration();
  std::vector<LedgerEntry> ledger;
  SessionState state;

  mutable absl::Mutex mu;
  SlotRing slots ABSL_GUARDED_BY(mu);
  std::vector<GroupHyperparameters> groups ABSL_GUARDED_BY(mu);  // of the latest step
  StepResult last_result ABSL_GUARDED_BY(mu);

  std::unique_ptr<RequestChannel> channel;  // its threads end before what is above
  std::unique_ptr<DeviceSide> device;       // of jobs on GPUs; last: it uses the channel
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_SESSION_IMPL_H_
