#include "tests/fakes/fake_session_service.h"

#include <grpcpp/grpcpp.h>
#include <unistd.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/check.h"
#include "base/futex.h"
#include "proto/trainer.grpc.pb.h"

namespace zeroshard {

using trainer::v1::SessionReply;
using trainer::v1::SessionRequest;
using Wire = grpc::ServerReaderWriter<SessionReply, SessionRequest>;

class FakeSessionService::Service final : public trainer::v1::Session::Service {
 public:
  explicit Service(FakeSessionService* fake) : fake_(fake) {}

  grpc::Status Open(grpc::ServerContext* context, Wire* wire) override {
    SessionRequest request;
    if (!wire->Read(&request) || !request.has_hello()) {
      return {grpc::StatusCode::INVALID_ARGUMENT, "the first message is not a Hello"};
    }
    SessionReply reply;
    {
      absl::MutexLock lock(&mu_);
      requests_.push_back(request);
      if (refusals_ > 0) {
        --refusals_;
        return {static_cast<grpc::StatusCode>(refusal_.code()), std::string(refusal_.message())};
      }
      *reply.mutable_hello() = hello_;
      end_ = absl::OkStatus();
      contexts_.insert(context);
      wires_.insert(wire);
      wire->Write(reply);
    }
    while (wire->Read(&request)) Take(request);
    absl::MutexLock lock(&mu_);
    contexts_.erase(context);
    wires_.erase(wire);
    return {static_cast<grpc::StatusCode>(end_.code()), std::string(end_.message())};
  }

  void Take(const SessionRequest& request) {
    std::function<void(const SessionRequest&)> before;
    bool complete;
    {
      absl::MutexLock lock(&mu_);
      requests_.push_back(request);
      before = before_;
      complete = auto_complete_;
    }
    if (before) before(request);
    if (complete) fake_->Complete(request.id());
  }

  void SendFailure(uint64_t id, const absl::Status& reason) {
    SessionReply reply;
    reply.mutable_failure()->set_id(id);
    reply.mutable_failure()->set_code(static_cast<uint32_t>(reason.code()));
    reply.mutable_failure()->set_message(std::string(reason.message()));
    absl::MutexLock lock(&mu_);
    for (Wire* wire : wires_) wire->Write(reply);
  }

  void End(absl::Status status) {
    absl::MutexLock lock(&mu_);
    end_ = std::move(status);
    for (grpc::ServerContext* context : contexts_) context->TryCancel();
  }

  FakeSessionService* const fake_;
  mutable absl::Mutex mu_;
  std::vector<SessionRequest> requests_ ABSL_GUARDED_BY(mu_);
  trainer::v1::HelloReply hello_ ABSL_GUARDED_BY(mu_);
  int refusals_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status refusal_ ABSL_GUARDED_BY(mu_);
  bool auto_complete_ ABSL_GUARDED_BY(mu_) = false;
  std::function<void(const SessionRequest&)> before_ ABSL_GUARDED_BY(mu_);
  absl::Status end_ ABSL_GUARDED_BY(mu_);
  std::set<grpc::ServerContext*> contexts_ ABSL_GUARDED_BY(mu_);
  std::set<Wire*> wires_ ABSL_GUARDED_BY(mu_);
};

struct FakeSessionService::Server {
  std::unique_ptr<grpc::Server> grpc;
};

FakeSessionService::FakeSessionService(std::string socket)
    : socket_(std::move(socket)), service_(std::make_unique<Service>(this)) {
  const size_t bytes = (sizeof(RankPage) + 4095) / 4096 * 4096;
  auto fd = CreateSealedMemfd("rank-page", bytes);
  ZS_CHECK(fd.ok(), "no memory for a completion page");
  page_fd_ = *std::move(fd);
  auto mapped = MappedRegion::Map(page_fd_.get(), bytes, Access::kReadWrite);
  ZS_CHECK(mapped.ok(), "cannot map a completion page");
  page_ = *std::move(mapped);
  page().magic = kRankPageMagic;
}

FakeSessionService::~FakeSessionService() { Stop(); }

void FakeSessionService::Start() {
  unlink(socket_.c_str());
  grpc::ServerBuilder builder;
  builder.AddListeningPort(absl::StrCat("unix:", socket_), grpc::InsecureServerCredentials());
  builder.RegisterService(service_.get());
  server_ = std::make_unique<Server>(Server{builder.BuildAndStart()});
  ZS_CHECK(server_->grpc != nullptr, "the fake worker cannot listen");
}

void FakeSessionService::Stop() {
  if (server_ == nullptr) return;
  service_->End(absl::UnavailableError("the worker died"));
  server_->grpc->Shutdown(std::chrono::system_clock::now());
  server_->grpc->Wait();
  server_.reset();
  unlink(socket_.c_str());
}

std::vector<SessionRequest> FakeSessionService::requests() const {
  absl::MutexLock lock(&service_->mu_);
  return service_->requests_;
}

bool FakeSessionService::AwaitRequests(size_t count) const {
  absl::MutexLock lock(&service_->mu_);
  const auto enough = [&] {
    service_->mu_.AssertHeld();
    return service_->requests_.size() >= count;
  };
  return service_->mu_.AwaitWithTimeout(absl::Condition(&enough), absl::Seconds(10));
}

std::vector<uint64_t> FakeSessionService::ids() const {
  std::vector<uint64_t> ids;
  for (const SessionRequest& request : requests()) {
    if (!request.has_hello()) ids.push_back(request.id());
  }
  return ids;
}

void FakeSessionService::SetHello(trainer::v1::HelloReply reply) {
  absl::MutexLock lock(&service_->mu_);
  service_->hello_ = std::move(reply);
}

void FakeSessionService::RefuseHellos(int count, absl::Status status) {
  absl::MutexLock lock(&service_->mu_);
  service_->refusals_ = count;
  service_->refusal_ = std::move(status);
}

void FakeSessionService::AutoComplete(std::function<void(const SessionRequest&)> before) {
  absl::MutexLock lock(&service_->mu_);
  service_->auto_complete_ = true;
  service_->before_ = std::move(before);
}

void FakeSessionService::Wake() {
  page().wake.fetch_add(1, std::memory_order_release);
  FutexWakeAll(page().wake);
}

void FakeSessionService::Complete(uint64_t id, RankPage::Outcome outcome) {
  page().slots[id % kMaxPendingRequests].store(id * 4 + outcome, std::memory_order_release);
  Wake();
}

void FakeSessionService::SendFailure(uint64_t id, absl::Status reason) {
  service_->SendFailure(id, reason);
}

void FakeSessionService::Fail(uint64_t id, absl::Status reason) {
  Complete(id, RankPage::kFailed);
  SendFailure(id, std::move(reason));
}

void FakeSessionService::PoisonPage(const absl::Status& reason) {
  page().reason[reason.message().copy(page().reason, kReasonBytes - 1)] = 0;
  page().reason_code.store(static_cast<uint32_t>(reason.raw_code()), std::memory_order_release);
  page().poisoned.store(1, std::memory_order_release);
  Wake();
}

void FakeSessionService::PublishStep(const StepResult& result) {
  page().result_version.fetch_add(1, std::memory_order_acq_rel);
  page().result = result;
  page().result_version.fetch_add(1, std::memory_order_release);
}

void FakeSessionService::EndStreams(absl::Status status) { service_->End(std::move(status)); }

}  // namespace zeroshard
