#include "tests/fakes/fake_daemon.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/fd_passing.h"
#include "base/status.h"
#include "proto/trainer.grpc.pb.h"
#include "storage/layout.h"

namespace zeroshard {
namespace {

using trainer::v1::Region;

constexpr uint64_t kPage = 4096;
constexpr uint64_t kGradientWindowBytes = 64 * 1024;

uint64_t WholePages(uint64_t bytes) { return std::max(kPage, (bytes + kPage - 1) / kPage * kPage); }

Layout LayoutOf(const model::v1::Manifest& manifest) {
  std::vector<ParameterSpec> specs;
  for (const auto& parameter : manifest.parameters()) {
    ParameterSpec spec;
    spec.name = parameter.name();
    spec.aliases = {parameter.aliases().begin(), parameter.aliases().end()};
    spec.shape = {parameter.shape().begin(), parameter.shape().end()};
    spec.dtype = static_cast<DType>(parameter.dtype() - 1);
    spec.trainable = parameter.trainable();
    spec.group = parameter.group();
    spec.module = parameter.module();
    specs.push_back(std::move(spec));
  }
  auto layout = Layout::Create(std::move(specs), /*workers=*/2);
  ZS_CHECK(layout.ok(), "the client sent a manifest that has no layout");
  return *std::move(layout);
}

struct Memory {
  UniqueFd fd;
  MappedRegion mapped;

  explicit Memory(uint64_t bytes) {
    auto created = CreateSealedMemfd("fake", bytes);
    ZS_CHECK(created.ok(), "no memory for a region");
    fd = *std::move(created);
    auto region = MappedRegion::Map(fd.get(), bytes, Access::kReadWrite);
    ZS_CHECK(region.ok(), "cannot map a region");
    mapped = *std::move(region);
  }
};

}  // namespace

struct FakeDaemon::Impl final : public trainer::v1::Trainer::Service {
  explicit Impl(const std::string& folder)
      : socket(absl::StrCat(folder, "/daemon")),
        descriptor_socket(absl::StrCat(folder, "/fds")),
        worker(absl::StrCat(folder, "/worker")) {}

  grpc::Status Attach(grpc::ServerContext* context, const trainer::v1::AttachRequest* request,
                      trainer::v1::AttachReply* reply) override {
    absl::MutexLock lock(&mu);
    attaches.push_back(*request);
    if (grpc::Status early = Early(context); !early.ok()) return early;
    const Layout layout = LayoutOf(request->manifest());
    parameters = std::make_unique<Memory>(WholePages(layout.window_bytes()));
    gradients = std::make_unique<Memory>(kGradientWindowBytes);
    reply->set_token("0123456789abcdef0123456789abcdef");
    reply->set_generation(1);
    reply->set_worker_socket(worker.socket());
    reply->set_descriptor_socket(descriptor_socket);
    AddRegion(reply, Region::KIND_PARAMETER_WINDOW, parameters->mapped.size());
    AddRegion(reply, Region::KIND_GRADIENT_WINDOW, gradients->mapped.size());
    AddRegion(reply, Region::KIND_RANK_PAGE, WholePages(sizeof(RankPage)));
    reply->set_layout_fingerprint(layout.fingerprint());
    reply->mutable_config()->set_stage(3);
    reply->mutable_config()->set_world_size(request->world_size());
    reply->mutable_config()->set_user_state_bytes(1024);
    reply->mutable_config()->set_collective_timeout_ms(30000);
    reply->mutable_config()->set_compute_dtype(model::v1::DTYPE_BFLOAT16);
    reply->add_warnings("a key has no effect");
    if (edit) edit(*reply);
    return grpc::Status::OK;
  }

  grpc::Status Detach(grpc::ServerContext* context, const trainer::v1::DetachRequest* request,
                      trainer::v1::DetachReply*) override {
    absl::MutexLock lock(&mu);
    detaches.push_back(*request);
    return Early(context);
  }

  grpc::Status Save(grpc::ServerContext* context, const trainer::v1::SaveRequest* request,
                    trainer::v1::SaveReply* reply) override {
    absl::MutexLock lock(&mu);
    reply->set_step(4);
    reply->set_bytes(99);
    reply->set_directory(absl::StrCat("/checkpoints/", request->name()));
    return Early(context);
  }

  static void AddRegion(trainer::v1::AttachReply* reply, Region::Kind kind, uint64_t bytes) {
    Region* region = reply->add_regions();
    region->set_kind(kind);
    region->set_bytes(bytes);
  }

  grpc::Status Early(grpc::ServerContext* context) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
    while (hang && !context->IsCancelled()) {
      const auto never = [] { return false; };
      mu.AwaitWithTimeout(absl::Condition(&never), absl::Milliseconds(5));
    }
    return {static_cast<grpc::StatusCode>(failure.code()), std::string(failure.message())};
  }

  // One thread that hands descriptors to whoever connects.
  void ServeDescriptors(const UniqueFd& listener) {
    while (true) {
      auto connection = AcceptUnix(listener.get(), absl::Milliseconds(50));
      absl::MutexLock lock(&mu);
      if (stopping) return;
      if (!connection.ok()) continue;
      auto token = ReceiveMessage(connection->get(), absl::Seconds(10));
      if (!token.ok()) continue;
      if (!refusal.empty()) {
        SendMessage(connection->get(), refusal, {}, absl::Seconds(10)).IgnoreError();
        continue;
      }
      const int fds[] = {parameters->fd.get(), gradients->fd.get(), worker.page_fd()};
      SendMessage(connection->get(), "ok", fds, absl::Seconds(10)).IgnoreError();
    }
  }

  const std::string socket;
  const std::string descriptor_socket;
  FakeSessionService worker;
  std::unique_ptr<grpc::Server> server;
  std::thread descriptor_thread;

  absl::Mutex mu;
  std::vector<trainer::v1::AttachRequest> attaches ABSL_GUARDED_BY(mu);
  std::vector<trainer::v1::DetachRequest> detaches ABSL_GUARDED_BY(mu);
  std::function<void(trainer::v1::AttachReply&)> edit ABSL_GUARDED_BY(mu);
  absl::Status failure ABSL_GUARDED_BY(mu);
  std::string refusal ABSL_GUARDED_BY(mu);
  bool hang ABSL_GUARDED_BY(mu) = false;
  bool stopping ABSL_GUARDED_BY(mu) = false;
  std::unique_ptr<Memory> parameters ABSL_GUARDED_BY(mu);
  std::unique_ptr<Memory> gradients ABSL_GUARDED_BY(mu);
};

FakeDaemon::FakeDaemon(const std::string& folder) : impl_(std::make_unique<Impl>(folder)) {
  impl_->worker.Start();
  auto listener = ListenUnix(impl_->descriptor_socket, 0600);
  ZS_CHECK(listener.ok(), "the fake descriptor socket cannot listen");
  impl_->descriptor_thread = std::thread(
      [impl = impl_.get(), held = *std::move(listener)] { impl->ServeDescriptors(held); });
  grpc::ServerBuilder builder;
  builder.AddListeningPort(absl::StrCat("unix:", impl_->socket), grpc::InsecureServerCredentials());
  builder.RegisterService(impl_.get());
  impl_->server = builder.BuildAndStart();
  ZS_CHECK(impl_->server != nullptr, "the fake daemon cannot listen");
}

FakeDaemon::~FakeDaemon() {
  {
    absl::MutexLock lock(&impl_->mu);
    impl_->stopping = true;
    impl_->hang = false;
  }
  impl_->descriptor_thread.join();
  impl_->server->Shutdown(std::chrono::system_clock::now());
  impl_->server->Wait();
}

const std::string& FakeDaemon::socket() const { return impl_->socket; }
FakeSessionService& FakeDaemon::worker() { return impl_->worker; }

void FakeDaemon::EditReply(std::function<void(trainer::v1::AttachReply&)> edit) {
  absl::MutexLock lock(&impl_->mu);
  impl_->edit = std::move(edit);
}

void FakeDaemon::FailCalls(absl::Status status) {
  absl::MutexLock lock(&impl_->mu);
  impl_->failure = std::move(status);
}

void FakeDaemon::RefuseDescriptors(std::string reason) {
  absl::MutexLock lock(&impl_->mu);
  impl_->refusal = std::move(reason);
}

void FakeDaemon::HangCalls() {
  absl::MutexLock lock(&impl_->mu);
  impl_->hang = true;
}

std::vector<trainer::v1::AttachRequest> FakeDaemon::attaches() const {
  absl::MutexLock lock(&impl_->mu);
  return impl_->attaches;
}

std::vector<trainer::v1::DetachRequest> FakeDaemon::detaches() const {
  absl::MutexLock lock(&impl_->mu);
  return impl_->detaches;
}

MappedRegion& FakeDaemon::parameter_window() {
  absl::MutexLock lock(&impl_->mu);
  return impl_->parameters->mapped;
}

MappedRegion& FakeDaemon::gradient_window() {
  absl::MutexLock lock(&impl_->mu);
  return impl_->gradients->mapped;
}

}  // namespace zeroshard
