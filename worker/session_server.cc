#include "worker/session_server.h"

#include <grpcpp/grpcpp.h>
#include <grpcpp/server_posix.h>

#include <atomic>
#include <deque>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/fd_passing.h"
#include "base/log.h"
#include "base/status.h"
#include "proto/trainer.grpc.pb.h"

namespace zeroshard {
namespace {

// Replies that a rank has not read; past that it is taken for stuck and its stream ends.
constexpr size_t kMaxUnreadReplies = 2 * 4096;
constexpr absl::Duration kAcceptSlice = absl::Milliseconds(200);
// A rank learns its token from the server and may be here before the server's word of it is.
constexpr absl::Duration kCredentialsGrace = absl::Seconds(2);

bool SameToken(const std::string& a, const std::string& b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace

class SessionServer::Impl final : public trainer::v1::Session::CallbackService {
 public:
  Impl(UniqueFd listener, uint32_t ranks, EventQueue& events)
      : listener_(std::move(listener)), events_(events), ranks_(ranks) {}

  absl::Status Start();
  void Stop();
  void SetCredentials(uint32_t rank, RankCredentials credentials);
  void EndStream(uint32_t rank);
  void Send(uint32_t rank, trainer::v1::SessionReply reply);

  grpc::ServerBidiReactor<trainer::v1::SessionRequest, trainer::v1::SessionReply>* Open(
      grpc::CallbackServerContext* context) override;

 private:
  class Stream;
  struct RankState {
    RankCredentials credentials;
    Stream* stream = nullptr;
  };

  void AcceptLoop();
  // Whether the Hello may open the rank's stream; then `stream` is the rank's.
  bool Admit(const trainer::v1::Hello& hello, Stream* stream);
  void Forget(uint32_t rank, Stream* stream);
  // Queues a request, unless another stream has become the rank's: what a dead process wrote last
  // may be read after its successor's Hello.
  void Deliver(uint32_t rank, Stream* stream, trainer::v1::SessionRequest request);

  const UniqueFd listener_;
  EventQueue& events_;
  std::unique_ptr<grpc::Server> server_;
  std::thread acceptor_;
  std::atomic<bool> stopping_{false};
  absl::Mutex mu_;
  std::vector<RankState> ranks_ ABSL_GUARDED_BY(mu_);
};

// One stream. Deletes itself when gRPC is done with it. Until then it is in the rank's state, under
// mu_, at least as long as anyone may call Send or End.
class SessionServer::Impl::Stream final
    : public grpc::ServerBidiReactor<trainer::v1::SessionRequest, trainer::v1::SessionReply> {
 public:
  explicit Stream(Impl& server) : server_(server) { StartRead(&request_); }

  void Send(trainer::v1::SessionReply reply) {
    absl::MutexLock lock(&mu_);
    if (finished_) return;
    if (replies_.size() >= kMaxUnreadReplies) {
      FinishLocked(grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "replies are not read"));
      return;
    }
    replies_.push_back(std::move(reply));
    if (replies_.size() == 1) StartWrite(&replies_.front());
  }

  void End(const grpc::Status& status) {
    absl::MutexLock lock(&mu_);
    FinishLocked(status);
  }

  void OnReadDone(bool ok) override {
    if (!ok) {
      End(grpc::Status::OK);
      return;
    }
    if (!admitted_) {
      if (!request_.has_hello() || !server_.Admit(request_.hello(), this)) {
        End(grpc::Status(grpc::StatusCode::UNAUTHENTICATED,
                         "the first message must be a Hello with a valid token"));
        return;
      }
      rank_ = request_.hello().rank();
      admitted_ = true;
    } else if (request_.has_hello()) {
      End(grpc::Status(grpc::StatusCode::INVALID_ARGUMENT, "a second Hello on one stream"));
      return;
    }
    server_.Deliver(rank_, this, std::move(request_));
    request_ = {};
    StartRead(&request_);
  }

  void OnWriteDone(bool ok) override {
    absl::MutexLock lock(&mu_);
    replies_.pop_front();
    if (!ok || finished_) return;
    if (!replies_.empty()) StartWrite(&replies_.front());
  }

  void OnCancel() override { End(grpc::Status::CANCELLED); }

  void OnDone() override {
    if (admitted_) server_.Forget(rank_, this);
    delete this;
  }

 private:
  void FinishLocked(const grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (std::exchange(finished_, true)) return;
    Finish(status);
  }

  Impl& server_;
  trainer::v1::SessionRequest request_;  // read callbacks only
  bool admitted_ = false;                // read callbacks only
  uint32_t rank_ = 0;                    // read callbacks only
  absl::Mutex mu_;
  std::deque<trainer::v1::SessionReply> replies_ ABSL_GUARDED_BY(mu_);
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
};

absl::Status SessionServer::Impl::Start() {
  grpc::ServerBuilder builder;
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) return absl::InternalError("gRPC server did not start");
  acceptor_ = std::thread([this] { AcceptLoop(); });
  return absl::OkStatus();
}

void SessionServer::Impl::Stop() {
  stopping_.store(true);
  if (acceptor_.joinable()) acceptor_.join();
  if (server_ != nullptr) server_->Shutdown(std::chrono::system_clock::now());
}

void SessionServer::Impl::AcceptLoop() {
  while (!stopping_.load()) {
    absl::StatusOr<UniqueFd> connection = AcceptUnix(listener_.get(), kAcceptSlice);
    if (!connection.ok()) {
      if (connection.status().code() == absl::StatusCode::kDeadlineExceeded) continue;
      LogWarn(absl::StrCat("accept failed error=\"", connection.status().message(), "\""));
      std::this_thread::sleep_for(absl::ToChronoMilliseconds(kAcceptSlice));
      continue;
    }
    const absl::StatusOr<PeerCredentials> peer = GetPeerCredentials(connection->get());
    bool known = false;
    if (peer.ok()) {
      const auto is_known = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
        for (const RankState& rank : ranks_) {
          if (!rank.credentials.token.empty() && rank.credentials.uid == peer->uid) return true;
        }
        return stopping_.load();
      };
      absl::MutexLock lock(&mu_);
      known = mu_.AwaitWithTimeout(absl::Condition(&is_known), kCredentialsGrace);
    }
    if (!known) continue;  // closes it: a user to whom no rank belongs
    grpc::AddInsecureChannelFromFd(server_.get(), connection->release());
  }
}

bool SessionServer::Impl::Admit(const trainer::v1::Hello& hello, Stream* stream) {
  Stream* replaced = nullptr;
  absl::MutexLock lock(&mu_);
  if (hello.rank() >= ranks_.size()) return false;
  RankState& rank = ranks_[hello.rank()];
  const auto is_its_own = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return !rank.credentials.token.empty() && rank.credentials.generation == hello.generation() &&
           SameToken(rank.credentials.token, hello.token());
  };
  if (!mu_.AwaitWithTimeout(absl::Condition(&is_its_own), kCredentialsGrace)) return false;
  replaced = std::exchange(rank.stream, stream);
  if (replaced != nullptr)
    replaced->End(grpc::Status(grpc::StatusCode::ABORTED, "replaced by a newer stream"));
  return true;
}

void SessionServer::Impl::Deliver(uint32_t rank, Stream* stream,
                                  trainer::v1::SessionRequest request) {
  absl::MutexLock lock(&mu_);
  if (ranks_[rank].stream == stream) events_.Push(SessionEvent{rank, std::move(request)});
}

void SessionServer::Impl::Forget(uint32_t rank, Stream* stream) {
  absl::MutexLock lock(&mu_);
  if (ranks_[rank].stream == stream) ranks_[rank].stream = nullptr;
}

void SessionServer::Impl::SetCredentials(uint32_t rank, RankCredentials credentials) {
  absl::MutexLock lock(&mu_);
  if (rank >= ranks_.size()) return;
  Stream* old = std::exchange(ranks_[rank].stream, nullptr);
  ranks_[rank].credentials = std::move(credentials);
  if (old != nullptr) old->End(grpc::Status(grpc::StatusCode::ABORTED, "the rank attached anew"));
}

void SessionServer::Impl::EndStream(uint32_t rank) {
  absl::MutexLock lock(&mu_);
  if (rank >= ranks_.size()) return;
  ranks_[rank].credentials = {};
  Stream* old = std::exchange(ranks_[rank].stream, nullptr);
  if (old != nullptr) old->End(grpc::Status(grpc::StatusCode::ABORTED, "the rank has left"));
}

void SessionServer::Impl::Send(uint32_t rank, trainer::v1::SessionReply reply) {
  absl::MutexLock lock(&mu_);
  if (rank < ranks_.size() && ranks_[rank].stream != nullptr)
    ranks_[rank].stream->Send(std::move(reply));
}

grpc::ServerBidiReactor<trainer::v1::SessionRequest, trainer::v1::SessionReply>*
SessionServer::Impl::Open(grpc::CallbackServerContext*) {
  return new Stream(*this);  // owned by gRPC, see Stream
}

absl::StatusOr<std::unique_ptr<SessionServer>> SessionServer::Start(UniqueFd listener,
                                                                    uint32_t ranks,
                                                                    EventQueue& events) {
  auto impl = std::make_unique<Impl>(std::move(listener), ranks, events);
  ZS_RETURN_IF_ERROR(impl->Start());
  return std::unique_ptr<SessionServer>(new SessionServer(std::move(impl)));
}

SessionServer::SessionServer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
SessionServer::~SessionServer() { impl_->Stop(); }
void SessionServer::SetCredentials(uint32_t rank, RankCredentials credentials) {
  impl_->SetCredentials(rank, std::move(credentials));
}
void SessionServer::EndStream(uint32_t rank) { impl_->EndStream(rank); }
void SessionServer::Send(uint32_t rank, trainer::v1::SessionReply reply) {
  impl_->Send(rank, std::move(reply));
}

}  // namespace zeroshard
