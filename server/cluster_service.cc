// The API between daemons (proto/cluster.proto), as node 0 answers it. Waits for keys hold no
// thread: they lie with the job's store.
#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <utility>

#include "proto/cluster.grpc.pb.h"
#include "server/grpc_status.h"
#include "server/services.h"

namespace zeroshard {
namespace {

using namespace cluster::v1;  // NOLINT(google-build-using-namespace): the messages of this API

class ClusterService final : public Cluster::CallbackService {
 public:
  explicit ClusterService(const ServiceContext* context) : context_(*context) {}

  grpc::ServerUnaryReactor* Join(grpc::CallbackServerContext* call, const JoinRequest* request,
                                 JoinReply* reply) override {
    return Decided(call, request->member(), [request, reply](JobHost& job, const auto& finish) {
      absl::StatusOr<JoinReply> joined = job.OnJoin(*request);
      if (joined.ok()) *reply = *std::move(joined);
      finish(joined.status());
    });
  }

  grpc::ServerUnaryReactor* SetKey(grpc::CallbackServerContext* call, const SetKeyRequest* request,
                                   SetKeyReply*) override {
    return Decided(call, request->member(),
                   [request](JobHost& job, const auto& finish) { finish(job.OnSetKey(*request)); });
  }

  grpc::ServerUnaryReactor* GetKey(grpc::CallbackServerContext* call, const GetKeyRequest* request,
                                   GetKeyReply* reply) override {
    return Decided(call, request->member(), [request, reply](JobHost& job, const auto& finish) {
      job.OnGetKey(*request, [reply, finish](const absl::StatusOr<std::string>& value) {
        if (value.ok()) reply->set_value(*value);
        finish(value.status());
      });
    });
  }

 private:
  using Finish = std::function<void(const absl::Status&)>;

  // Ends the call once: with what it is told, or when nobody is left to tell it.
  class Ending {
   public:
    explicit Ending(grpc::ServerUnaryReactor* reactor) : reactor_(reactor) {}
    ~Ending() { End(absl::UnavailableError("the daemon is shutting down")); }
    Ending(const Ending&) = delete;
    Ending& operator=(const Ending&) = delete;
    void End(const absl::Status& status) {
      if (auto* reactor = std::exchange(reactor_, nullptr)) reactor->Finish(ToGrpc(status));
    }

   private:
    grpc::ServerUnaryReactor* reactor_;
  };

  // Runs `fn` on the decision thread, for the job; it must call its Finish once, there.
  template <typename Fn>
  grpc::ServerUnaryReactor* Decided(grpc::CallbackServerContext* call, const Member& member,
                                    Fn fn) {
    grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
    auto ending = std::make_shared<Ending>(reactor);
    JobTable* const table = context_.table;
    context_.loop->Post([table, ending, name = member.job(), fn] {
      const Finish finish = [ending](const absl::Status& status) { ending->End(status); };
      const absl::StatusOr<JobHost*> job = table->Find(name);
      if (!job.ok()) return finish(job.status());
      fn(**job, finish);
      table->Sweep();
    });
    return reactor;
  }

  const ServiceContext context_;
};

}  // namespace

std::unique_ptr<grpc::Service> MakeClusterService(const ServiceContext* context) {
  return std::make_unique<ClusterService>(context);
}

}  // namespace zeroshard
