// The trainer API (proto/trainer.proto, service Trainer).
#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <atomic>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/status.h"
#include "proto/trainer.grpc.pb.h"
#include "server/attach_request.h"
#include "server/grpc_status.h"
#include "server/services.h"

namespace zeroshard {
namespace {

using namespace trainer::v1;  // NOLINT(google-build-using-namespace): the messages of this API

// How often a waiting call looks whether its caller is still there.
constexpr absl::Duration kCancelPoll = absl::Milliseconds(20);

// The answer of the decision thread to one call that may have to wait.
template <typename Reply>
class Answered {
 public:
  void Set(absl::StatusOr<Reply> result) {
    absl::MutexLock lock(&mu_);
    result_ = std::move(result);
    set_ = true;
  }

  // The answer, or nothing when there was none within `timeout`.
  std::optional<absl::StatusOr<Reply>> Take(absl::Duration timeout) {
    absl::MutexLock lock(&mu_);
    if (!mu_.AwaitWithTimeout(absl::Condition(&set_), timeout)) return std::nullopt;
    return std::move(result_);
  }

 private:
  absl::Mutex mu_;
  bool set_ ABSL_GUARDED_BY(mu_) = false;
  absl::StatusOr<Reply> result_ ABSL_GUARDED_BY(mu_) = absl::UnknownError("no answer");
};

class TrainerService final : public Trainer::Service {
 public:
  explicit TrainerService(const ServiceContext* context) : context_(*context) {}

  grpc::Status Attach(grpc::ServerContext* call, const AttachRequest* request,
                      AttachReply* reply) override;
  grpc::Status Detach(grpc::ServerContext*, const DetachRequest* request, DetachReply*) override;
  grpc::Status Save(grpc::ServerContext*, const SaveRequest* request, SaveReply* reply) override {
    return Answer(context_.checkpoints->Save(*request), reply);
  }
  grpc::Status Restore(grpc::ServerContext*, const RestoreRequest* request,
                       RestoreReply* reply) override {
    return Answer(context_.checkpoints->Restore(*request), reply);
  }
  grpc::Status Export(grpc::ServerContext*, const ExportRequest* request,
                      ExportReply* reply) override {
    return Answer(context_.checkpoints->Export(*request), reply);
  }
  grpc::Status Watch(grpc::ServerContext* call, const WatchRequest* request,
                     grpc::ServerWriter<WatchEvent>* writer) override;
  grpc::Status Rendezvous(grpc::ServerContext* call, const RendezvousRequest* request,
                          RendezvousReply* reply) override;

 private:
  template <typename Reply>
  static grpc::Status Answer(absl::StatusOr<Reply> result, Reply* reply) {
    if (!result.ok()) return ToGrpc(result.status());
    *reply = *std::move(result);
    return grpc::Status::OK;
  }

  absl::StatusOr<std::shared_ptr<const NvmeAdmission>> AdmitPaths(const std::string& job,
                                                                  bool trusted, JobPlan& plan);
  absl::StatusOr<AttachReply> DoAttach(grpc::ServerContext& call, const AttachRequest& request);

  const ServiceContext context_;
  std::atomic<uint64_t> next_attach_{1};
};

// On this thread, because drives may be slow: whether the job's paths will do. Those of a job that
// has begun are not asked again: a rank may come back while a drive is full or broken. Warnings
// are added to `plan`.
absl::StatusOr<std::shared_ptr<const NvmeAdmission>> TrainerService::AdmitPaths(
    const std::string& job, bool trusted, JobPlan& plan) {
  if (plan.nvme_paths.empty()) return nullptr;
  ZS_ASSIGN_OR_RETURN(const bool begun, context_.loop->Call<bool>([this, &job] {
    const absl::StatusOr<JobHost*> host = context_.table->Find(job);
    // One that failed may go on from its files, as a new one.
    return host.ok() && (*host)->state().started && (*host)->state().phase != JobPhase::kFailed;
  }));
  if (begun) return nullptr;
  ZS_ASSIGN_OR_RETURN(std::shared_ptr<const NvmeAdmission> admission,
                      context_.nvme->Admit(plan.nvme_paths, trusted ? NvmeStore::Caller::kTrusted
                                                                    : NvmeStore::Caller::kOther));
  for (const std::string& warning : admission->warnings) plan.warnings.push_back(warning);
  return admission;
}

absl::StatusOr<AttachReply> TrainerService::DoAttach(grpc::ServerContext& call,
                                                     const AttachRequest& request) {
  ZS_ASSIGN_OR_RETURN(Peer peer, context_.peers->Find(call.peer()));
  const bool trusted = peer.uid == 0 || peer.uid == geteuid();
  ZS_ASSIGN_OR_RETURN(PreparedAttach prepared,
                      PrepareAttach(request, *context_.config, context_.lanes,
                                    trusted ? PathRight::kAny : PathRight::kListed));
  ZS_ASSIGN_OR_RETURN(const auto admission, AdmitPaths(request.job(), trusted, *prepared.plan));
  auto wait = std::make_shared<Answered<AttachReply>>();
  auto attach = std::make_shared<AttachCall>();
  attach->id = next_attach_.fetch_add(1);
  attach->rank = request.rank();
  attach->peer = std::move(peer);
  attach->spec = prepared.spec;
  attach->plan = prepared.plan;
  attach->nvme = admission;
  attach->device = request.device();
  attach->gave_up = request.gave_up();
  const absl::Duration timeout = request.timeout_ms() == 0
                                     ? context_.config->attach_timeout
                                     : absl::Milliseconds(request.timeout_ms());
  attach->deadline = context_.loop->Now() + timeout;
  attach->done = [wait](absl::StatusOr<AttachReply> result) { wait->Set(std::move(result)); };
  const uint64_t id = attach->id;
  const std::string job = request.job();
  JobTable* const table = context_.table;
  if (!context_.loop->Post([table, job, attach] { table->Attach(job, std::move(*attach)); })) {
    return absl::UnavailableError("the daemon is shutting down");
  }
  bool cancelled = false;
  while (true) {
    std::optional<absl::StatusOr<AttachReply>> result = wait->Take(kCancelPoll);
    // An answer that nobody takes is taken back: the rank must not stay attached to a call that is
    // over.
    if (!cancelled && call.IsCancelled()) {
      cancelled = true;
      context_.loop->Post([table, job, id] { table->CancelAttach(job, id); });
    }
    if (result) return *std::move(result);
    if (cancelled) return absl::CancelledError("the caller has gone");
  }
}

grpc::Status TrainerService::Attach(grpc::ServerContext* call, const AttachRequest* request,
                                    AttachReply* reply) {
  return Answer(DoAttach(*call, *request), reply);
}

grpc::Status TrainerService::Detach(grpc::ServerContext*, const DetachRequest* request,
                                    DetachReply*) {
  const absl::StatusOr<absl::Status> result =
      context_.loop->Call<absl::Status>([this, request]() -> absl::Status {
        ZS_ASSIGN_OR_RETURN(JobHost* const job, context_.table->Find(request->job()));
        const absl::Status detached =
            job->Detach(request->rank(), request->token(), request->keep());
        context_.table->Sweep();
        return detached;
      });
  return ToGrpc(result.ok() ? *result : result.status());
}

grpc::Status TrainerService::Watch(grpc::ServerContext* call, const WatchRequest* request,
                                   grpc::ServerWriter<WatchEvent>* writer) {
  auto queue = std::make_shared<EventQueue>();
  const absl::StatusOr<absl::Status> added =
      context_.loop->Call<absl::Status>([this, request, queue]() -> absl::Status {
        ZS_ASSIGN_OR_RETURN(JobHost* const job, context_.table->Find(request->job()));
        job->AddWatcher(queue);
        return absl::OkStatus();
      });
  if (!added.ok()) return ToGrpc(added.status());
  if (!added->ok()) return ToGrpc(*added);
  writer->SendInitialMetadata();  // from here on no event is missed
  while (!call->IsCancelled() && !queue->done()) {
    const std::optional<WatchEvent> event = queue->Next(absl::Milliseconds(100));
    if (event && !writer->Write(*event)) break;
  }
  return grpc::Status::OK;
}

grpc::Status TrainerService::Rendezvous(grpc::ServerContext* call, const RendezvousRequest* request,
                                        RendezvousReply* reply) {
  auto wait = std::make_shared<Answered<std::string>>();
  const auto done = [wait](const absl::StatusOr<std::string>& value) { wait->Set(value); };
  JobTable* const table = context_.table;
  const bool posted = context_.loop->Post([table, done, request = *request] {
    const absl::StatusOr<JobHost*> job = table->Find(request.job());
    job.ok() ? (*job)->Rendezvous(request, done) : done(job.status());
  });
  if (!posted) return ToGrpc(absl::UnavailableError("the daemon is shutting down"));
  while (!call->IsCancelled()) {
    std::optional<absl::StatusOr<std::string>> value = wait->Take(kCancelPoll);
    if (!value) continue;
    if (!value->ok()) return ToGrpc(value->status());
    reply->set_value(**value);
    return grpc::Status::OK;
  }
  return ToGrpc(absl::CancelledError("the caller has gone"));
}

}  // namespace

std::unique_ptr<grpc::Service> MakeTrainerService(const ServiceContext* context) {
  return std::make_unique<TrainerService>(context);
}

}  // namespace zeroshard
