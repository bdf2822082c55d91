// Calls of a session to the daemon: checkpoints, and the end.
#include <string>

#include "absl/status/status.h"
#include "base/fault_point.h"
#include "base/status.h"
#include "client/session.h"
#include "client/session_impl.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kDetachTimeout = absl::Minutes(2);
// A checkpoint is as slow as the disk it goes to.
constexpr absl::Duration kStorageTimeout = absl::Hours(2);

}  // namespace

absl::StatusOr<SaveResult> Session::Save(const std::string& name, bool exclude_frozen) {
  ZS_RETURN_IF_ERROR(impl_->CheckHere());
  ZS_FAULT_POINT("client.save.before");
  trainer::v1::SaveRequest request;
  request.set_job(impl_->job);
  request.set_token(impl_->attachment.reply.token());
  request.set_name(name);
  request.set_exclude_frozen(exclude_frozen);
  ZS_ASSIGN_OR_RETURN(auto reply, impl_->daemon.Save(request, kStorageTimeout));
  return SaveResult{reply.step(), reply.bytes(), reply.directory()};
}

absl::StatusOr<RestoreResult> Session::Restore(const std::string& name, bool parameters_only) {
  ZS_RETURN_IF_ERROR(impl_->CheckHere());
  trainer::v1::RestoreRequest request;
  request.set_job(impl_->job);
  request.set_token(impl_->attachment.reply.token());
  request.set_name(name);
  request.set_parameters_only(parameters_only);
  if (impl_->device != nullptr) ZS_RETURN_IF_ERROR(impl_->Settle());
  ZS_ASSIGN_OR_RETURN(auto reply, impl_->daemon.Restore(request, kStorageTimeout));
  if (impl_->device != nullptr) {
    ZS_RETURN_IF_ERROR(impl_->Explain(impl_->device->Restored()));
  }
  return RestoreResult{reply.step(), reply.bytes(), reply.user_state()};
}

absl::StatusOr<ExportResult> Session::Export(const std::string& name, bool overwrite) {
  ZS_RETURN_IF_ERROR(impl_->CheckHere());
  ZS_FAULT_POINT("client.export.before");
  trainer::v1::ExportRequest request;
  request.set_job(impl_->job);
  request.set_token(impl_->attachment.reply.token());
  request.set_name(name);
  request.set_overwrite(overwrite);
  ZS_ASSIGN_OR_RETURN(auto reply, impl_->daemon.Export(request, kStorageTimeout));
  return ExportResult{reply.step(), reply.bytes(), reply.path()};
}

absl::Status Session::Detach(JobState job_state) {
  ZS_RETURN_IF_ERROR(impl_->CheckHere());
  ZS_FAULT_POINT("client.detach.before");
  trainer::v1::DetachRequest request;
  request.set_job(impl_->job);
  request.set_rank(impl_->rank);
  request.set_token(impl_->attachment.reply.token());
  request.set_keep(job_state == JobState::kKeep);
  absl::Status status = impl_->daemon.Detach(request, kDetachTimeout).status();
  ZS_FAULT_POINT("client.detach.after");
  if (status.ok()) {
    impl_->CloseDevice();
    impl_->channel->Close(absl::FailedPreconditionError("this rank has left the job"));
  }
  return status;
}

void Session::Close() {
  if (!impl_->CheckHere().ok()) return;
  impl_->CloseDevice();
  impl_->channel->Close(absl::FailedPreconditionError("this session is closed"));
}

}  // namespace zeroshard
