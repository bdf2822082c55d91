#include "server/cluster_client.h"

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "proto/cluster.grpc.pb.h"

namespace zeroshard {
namespace {

using cluster::v1::Cluster;

constexpr absl::Duration kCallTimeout = absl::Seconds(5);

// One call under way.
template <typename Request, typename Reply>
struct Call {
  grpc::ClientContext context;
  Request request;
  Reply reply;
};

class GrpcClusterClient final : public ClusterClient {
 public:
  GrpcClusterClient(const ClusterConfig& cluster, EventLoop* loop)
      : keeper_(cluster.NodeName(0)), loop_(*loop) {
    grpc::ChannelArguments arguments;
    // A daemon that comes back is found soon.
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    stub_ = Cluster::NewStub(grpc::CreateCustomChannel(
        cluster.addresses[0], grpc::InsecureChannelCredentials(), arguments));
  }

  ~GrpcClusterClient() override {
    absl::MutexLock lock(&mu_);
    for (grpc::ClientContext* context : calls_) context->TryCancel();
    mu_.Await(absl::Condition(
        +[](std::set<grpc::ClientContext*>* calls) { return calls->empty(); }, &calls_));
  }

  void Join(const cluster::v1::JoinRequest& request, Done<cluster::v1::JoinReply> done) override {
    Start(&Cluster::Stub::async_interface::Join, request, kCallTimeout, std::move(done));
  }
  void SetKey(const cluster::v1::SetKeyRequest& request,
              Done<cluster::v1::SetKeyReply> done) override {
    Start(&Cluster::Stub::async_interface::SetKey, request, kCallTimeout, std::move(done));
  }
  void GetKey(const cluster::v1::GetKeyRequest& request,
              Done<cluster::v1::GetKeyReply> done) override {
    Start(&Cluster::Stub::async_interface::GetKey, request,
          absl::Milliseconds(request.timeout_ms()) + kCallTimeout, std::move(done));
  }

 private:
  template <typename Request, typename Reply>
  using Method = void (Cluster::Stub::async_interface::*)(grpc::ClientContext*, const Request*,
                                                          Reply*,
                                                          std::function<void(grpc::Status)>);

  template <typename Request, typename Reply>
  void Start(Method<Request, Reply> method, const Request& request, absl::Duration timeout,
             Done<Reply> done) {
    auto call = std::make_shared<Call<Request, Reply>>();
    call->request = request;
    call->context.set_deadline(std::chrono::system_clock::now() + absl::ToChronoSeconds(timeout));
    {
      absl::MutexLock lock(&mu_);
      calls_.insert(&call->context);
    }
    (stub_->async()->*method)(&call->context, &call->request, &call->reply,
                              [this, call, done = std::move(done)](const grpc::Status& status) {
                                loop_.Post([done, call, status, keeper = keeper_] {
                                  if (status.ok()) return done(std::move(call->reply));
                                  const auto code =
                                      static_cast<absl::StatusCode>(status.error_code());
                                  if (code != absl::StatusCode::kUnavailable) {
                                    return done(absl::Status(code, status.error_message()));
                                  }
                                  done(absl::UnavailableError(absl::StrCat(
                                      keeper, " does not answer: ", status.error_message())));
                                });
                                absl::MutexLock lock(&mu_);
                                calls_.erase(&call->context);
                              });
  }

  const std::string keeper_;
  EventLoop& loop_;
  std::unique_ptr<Cluster::Stub> stub_;
  absl::Mutex mu_;
  std::set<grpc::ClientContext*> calls_ ABSL_GUARDED_BY(mu_);
};

}  // namespace

std::unique_ptr<ClusterClient> MakeClusterClient(const ClusterConfig& cluster, EventLoop* loop) {
  return std::make_unique<GrpcClusterClient>(cluster, loop);
}

}  // namespace zeroshard
