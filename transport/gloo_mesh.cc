#include "transport/gloo_mesh.h"

#include <arpa/inet.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/store.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <exception>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "base/log.h"
#include "base/status.h"
#include "base/unique_fd.h"

namespace zeroshard {
namespace {

constexpr uint64_t kHeaderSlot = 1;
constexpr uint64_t kPayloadSlot = 2;
// Channels wait for the next frame for as long as it takes; deadlines are the users'.
constexpr std::chrono::milliseconds kForever = std::chrono::hours(24 * 365);
// Once all have joined, connecting is a matter of moments; whoever died since keeps the others for
// this long, five times, because Gloo tries again.
constexpr std::chrono::milliseconds kPairTimeout = std::chrono::seconds(1);
constexpr absl::Duration kRetryDelay = absl::Milliseconds(50);

struct Header {
  uint32_t kind;
  uint32_t index;
  uint64_t tag;
  uint64_t value;
  uint64_t payload_bytes;
};

// Gloo's view of one epoch's keys; errors become exceptions, as Gloo expects.
class StoreAdapter final : public gloo::rendezvous::Store {
 public:
  StoreAdapter(RendezvousStore& store, MeshRendezvous& rendezvous, uint64_t epoch)
      : store_(store), rendezvous_(rendezvous), epoch_(epoch) {}

  void set(const std::string& key, const std::vector<char>& data) override {
    const absl::Status status = store_.Set(Name(key), std::string(data.begin(), data.end()));
    if (!status.ok()) throw std::runtime_error(std::string(status.message()));
  }
  std::vector<char> get(const std::string& key) override {
    const absl::StatusOr<std::string> value = rendezvous_.Await(epoch_, Name(key));
    if (!value.ok()) throw std::runtime_error(std::string(value.status().message()));
    return {value->begin(), value->end()};
  }
  void wait(const std::vector<std::string>& keys) override {
    for (const std::string& key : keys) get(key);
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds&) override {
    wait(keys);
  }

 private:
  std::string Name(const std::string& key) const { return absl::StrCat("mesh/", epoch_, "/", key); }

  RendezvousStore& store_;
  MeshRendezvous& rendezvous_;
  const uint64_t epoch_;
};

// The channels of one epoch. Threads end when a channel fails or Close is called.
class Connection {
 public:
  Connection(std::shared_ptr<gloo::rendezvous::Context> context, const GlooMeshOptions& options,
             MeshObserver& observer, absl::Mutex& observer_mu)
      : context_(std::move(context)),
        options_(options),
        observer_(observer),
        observer_mu_(observer_mu) {
    for (uint32_t peer = 0; peer < options.rendezvous.workers; ++peer) {
      channels_.push_back(peer == options.rendezvous.worker ? nullptr
                                                            : std::make_unique<Channel>());
    }
  }
  ~Connection() { Close(); }

  void Start() {
    for (uint32_t peer = 0; peer < channels_.size(); ++peer) {
      if (channels_[peer] == nullptr) continue;
      channels_[peer]->sender = std::thread([this, peer] { Guard(peer, [&] { SendLoop(peer); }); });
      channels_[peer]->receiver =
          std::thread([this, peer] { Guard(peer, [&] { ReceiveLoop(peer); }); });
    }
  }

  void Send(uint32_t peer, Frame frame) {
    Channel& channel = *channels_[peer];
    absl::MutexLock lock(&channel.mu);
    channel.queue.push_back(std::move(frame));
  }

  absl::Status AwaitFailure() {
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(
        +[](absl::Status* failure) { return !failure->ok(); }, &failure_));
    return failure_;
  }

  void Fail(const absl::Status& status) {
    absl::MutexLock lock(&mu_);
    KeepFirstError(failure_, status);
  }

  void Close() {
    if (closed_.exchange(true)) return;
    for (auto& channel : channels_) {
      if (channel == nullptr) continue;
      absl::MutexLock lock(&channel->mu);
      channel->closing = true;
      if (channel->sending != nullptr) channel->sending->abortWaitSend();
      if (channel->receiving != nullptr) channel->receiving->abortWaitRecv();
    }
    for (auto& channel : channels_) {
      if (channel == nullptr) continue;
      channel->sender.join();
      channel->receiver.join();
    }
    context_->closeConnections();
  }

 private:
  struct Channel {
    absl::Mutex mu;
    std::deque<Frame> queue ABSL_GUARDED_BY(mu);
    bool closing ABSL_GUARDED_BY(mu) = false;
    // What the threads wait for; Close aborts it.
    gloo::transport::UnboundBuffer* sending ABSL_GUARDED_BY(mu) = nullptr;
    gloo::transport::UnboundBuffer* receiving ABSL_GUARDED_BY(mu) = nullptr;
    std::thread sender;
    std::thread receiver;

    bool HasWork() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) { return closing || !queue.empty(); }
  };

  // Makes `buffer` the one that Close aborts, for as long as it lives.
  class Waiting {
   public:
    Waiting(Channel& channel, gloo::transport::UnboundBuffer* Channel::*slot,
            gloo::transport::UnboundBuffer* buffer)
        : channel_(channel), slot_(slot) {
      absl::MutexLock lock(&channel_.mu);
      if (channel_.closing) throw std::runtime_error("the mesh ends");
      channel_.*slot_ = buffer;
    }
    ~Waiting() {
      absl::MutexLock lock(&channel_.mu);
      channel_.*slot_ = nullptr;
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;

   private:
    Channel& channel_;
    gloo::transport::UnboundBuffer* Channel::*const slot_;
  };

  template <typename Loop>
  void Guard(uint32_t peer, Loop&& loop) {
    try {
      loop();
    } catch (const std::exception& error) {
      Fail(absl::UnavailableError(
          absl::StrCat("channel to ", options_.rendezvous.NameOf(peer), ": ", error.what())));
    }
  }

  void SendLoop(uint32_t peer) {
    Channel& channel = *channels_[peer];
    while (true) {
      Frame frame;
      {
        absl::MutexLock lock(&channel.mu);
        channel.mu.Await(absl::Condition(&channel, &Channel::HasWork));
        if (channel.closing) return;
        frame = std::move(channel.queue.front());
        channel.queue.pop_front();
      }
      Header header{frame.kind, frame.index, frame.tag, frame.value, frame.payload.size()};
      SendBytes(peer, kHeaderSlot, &header, sizeof(header));
      if (!frame.payload.empty())
        SendBytes(peer, kPayloadSlot, frame.payload.data(), frame.payload.size());
    }
  }

  void SendBytes(uint32_t peer, uint64_t slot, void* data, size_t bytes) {
    auto buffer = context_->createUnboundBuffer(data, bytes);
    const Waiting waiting(*channels_[peer], &Channel::sending, buffer.get());
    buffer->send(static_cast<int>(peer), slot);
    if (!buffer->waitSend(kForever)) throw std::runtime_error("send aborted");
  }

  void ReceiveLoop(uint32_t peer) {
    while (true) {
      Header header;
      ReceiveBytes(peer, kHeaderSlot, &header, sizeof(header));
      if (header.payload_bytes > kMaxFramePayload)
        throw std::runtime_error("a frame of absurd length");
      Frame frame{header.kind, header.index, header.tag, header.value, {}};
      frame.payload.resize(header.payload_bytes);
      if (!frame.payload.empty())
        ReceiveBytes(peer, kPayloadSlot, frame.payload.data(), frame.payload.size());
      absl::MutexLock lock(&observer_mu_);
      observer_.OnFrame(peer, std::move(frame));
    }
  }

  void ReceiveBytes(uint32_t peer, uint64_t slot, void* data, size_t bytes) {
    auto buffer = context_->createUnboundBuffer(data, bytes);
    const Waiting waiting(*channels_[peer], &Channel::receiving, buffer.get());
    buffer->recv(static_cast<int>(peer), slot);
    if (!buffer->waitRecv(kForever)) throw std::runtime_error("receive aborted");
  }

  const std::shared_ptr<gloo::rendezvous::Context> context_;
  const GlooMeshOptions& options_;
  MeshObserver& observer_;
  absl::Mutex& observer_mu_;
  std::vector<std::unique_ptr<Channel>> channels_;  // by peer; null for this worker
  std::atomic<bool> closed_{false};
  absl::Mutex mu_;
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
};

class GlooMesh final : public Mesh {
 public:
  GlooMesh(const GlooMeshOptions& options, std::shared_ptr<gloo::transport::Device> device,
           RendezvousStore& store, MeshObserver& observer)
      : options_(options),
        device_(std::move(device)),
        store_(store),
        observer_(observer),
        rendezvous_(store, options_.rendezvous, stopping_,
                    [this](const absl::Status& reason) { Report(reason); }) {
    keeper_ = std::thread([this] { KeepConnected(); });
  }

  ~GlooMesh() override {
    stopping_.store(true);
    {
      absl::MutexLock lock(&mu_);
      if (connection_ != nullptr) connection_->Fail(absl::CancelledError("the mesh ends"));
    }
    keeper_.join();
  }

  void Send(uint32_t peer, Frame frame) override {
    absl::MutexLock lock(&mu_);
    if (connection_ != nullptr) connection_->Send(peer, std::move(frame));
  }

 private:
  void KeepConnected() {
    uint64_t epoch = rendezvous_.FirstUnusedEpoch();
    absl::Status last;
    while (!stopping_.load()) {
      absl::StatusOr<std::shared_ptr<gloo::rendezvous::Context>> context = Connect(epoch);
      if (stopping_.load()) return;
      if (context.ok()) {
        Serve(epoch++, *std::move(context));
        continue;
      }
      if (context.status() != last) {
        last = context.status();
        LogWarn(
            absl::StrCat("mesh not connected epoch=", epoch, " error=\"", last.message(), "\""));
      }
      Report(last);
      if (absl::IsFailedPrecondition(last)) return;
      if (!absl::IsUnavailable(last)) ++epoch;
      absl::SleepFor(kRetryDelay);
    }
  }

  void Serve(uint64_t epoch, std::shared_ptr<gloo::rendezvous::Context> context) {
    auto connection =
        std::make_shared<Connection>(std::move(context), options_, observer_, observer_mu_);
    {
      absl::MutexLock lock(&mu_);
      connection_ = connection;
    }
    {
      // Before any frame of this epoch.
      absl::MutexLock lock(&observer_mu_);
      observer_.OnConnected(epoch);
    }
    connection->Start();
    if (stopping_.load()) connection->Fail(absl::CancelledError("the mesh ends"));
    const absl::Status reason = connection->AwaitFailure();
    {
      absl::MutexLock lock(&mu_);
      connection_ = nullptr;
    }
    connection->Close();
    if (stopping_.load()) return;
    LogWarn(absl::StrCat("mesh lost epoch=", epoch, " error=\"", reason.message(), "\""));
    Report(reason);
  }

  void Report(const absl::Status& reason) {
    absl::MutexLock lock(&observer_mu_);
    observer_.OnDisconnected(reason);
  }

  absl::StatusOr<std::shared_ptr<gloo::rendezvous::Context>> Connect(uint64_t epoch) {
    ZS_RETURN_IF_ERROR(rendezvous_.Join(epoch));
    try {
      StoreAdapter store(store_, rendezvous_, epoch);
      auto context = std::make_shared<gloo::rendezvous::Context>(
          static_cast<int>(options_.rendezvous.worker),
          static_cast<int>(options_.rendezvous.workers));
      context->setTimeout(kPairTimeout);
      context->connectFullMesh(store, device_);
      return context;
    } catch (const std::exception& error) {
      return absl::AbortedError(error.what());
    }
  }

  const GlooMeshOptions options_;
  std::shared_ptr<gloo::transport::Device> device_;
  RendezvousStore& store_;
  MeshObserver& observer_;
  absl::Mutex observer_mu_;  // one call of the observer at a time
  std::atomic<bool> stopping_{false};
  MeshRendezvous rendezvous_;  // keeper thread
  absl::Mutex mu_;
  std::shared_ptr<Connection> connection_ ABSL_GUARDED_BY(mu_);
  std::thread keeper_;
};

// Gloo crashes on an address that it cannot bind to; so that is tried first.
absl::Status CheckAddress(const std::string& address) {
  sockaddr_storage storage = {};
  socklen_t length = 0;
  if (auto* v4 = reinterpret_cast<sockaddr_in*>(&storage);
      inet_pton(AF_INET, address.c_str(), &v4->sin_addr) == 1) {
    v4->sin_family = AF_INET;
    length = sizeof(sockaddr_in);
  } else if (auto* v6 = reinterpret_cast<sockaddr_in6*>(&storage);
             inet_pton(AF_INET6, address.c_str(), &v6->sin6_addr) == 1) {
    v6->sin6_family = AF_INET6;
    length = sizeof(sockaddr_in6);
  } else {
    return absl::InvalidArgumentError(
        absl::StrCat("gloo address \"", address, "\" is no IPv4 or IPv6 address"));
  }
  const UniqueFd probe(socket(storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!probe.valid()) return ErrnoError(errno, "socket", address);
  if (bind(probe.get(), reinterpret_cast<const sockaddr*>(&storage), length) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("gloo address ", address, " is none of this host's"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Mesh>> CreateGlooMesh(const GlooMeshOptions& options,
                                                     RendezvousStore& store,
                                                     MeshObserver& observer) {
  ZS_RETURN_IF_ERROR(CheckAddress(options.address));
  try {
    gloo::transport::tcp::attr attributes;
    attributes.hostname = options.address;
    auto device = gloo::transport::tcp::CreateDevice(attributes);
    return std::make_unique<GlooMesh>(options, std::move(device), store, observer);
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(
        absl::StrCat("Gloo cannot bind to ", options.address, ": ", error.what()));
  }
}

}  // namespace zeroshard
