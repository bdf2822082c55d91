// B4: what a control message costs, against a bare gRPC echo of the same kind and size.
//
//   control call     Admin.GetStatus of a running daemon, against a unary echo of the bytes of its
//                    reply (there and back: the echo sends no less, and builds no message)
//   request          a gather of a unit that is in the window, from the call until Wait returns,
//   against one
//                    message there and back over a bidirectional stream
//   prefetched wait  Wait for a gather that was issued ahead and has completed, against the same
//
// Client, echo server, daemon and worker are processes of their own; all sockets are Unix sockets.
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/session.h"
#include "proto/admin.grpc.pb.h"
#include "tests/bench/daemon_process.h"
#include "tests/bench/echo.grpc.pb.h"
#include "tests/bench/paired.h"

namespace zeroshard {
namespace {

using bench::v1::Ping;

class EchoService final : public bench::v1::Echo::Service {
  grpc::Status Unary(grpc::ServerContext*, const Ping* request, Ping* reply) override {
    *reply = *request;
    return grpc::Status::OK;
  }
  grpc::Status Stream(grpc::ServerContext*, grpc::ServerReaderWriter<Ping, Ping>* stream) override {
    Ping ping;
    while (stream->Read(&ping)) stream->Write(ping);
    return grpc::Status::OK;
  }
};

// The echo's process: ends with its parent.
[[noreturn]] void ServeEcho(const std::string& socket) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  EchoService echo;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(absl::StrCat("unix:", socket), grpc::InsecureServerCredentials());
  builder.RegisterService(&echo);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  server->Wait();
  _exit(0);
}

std::shared_ptr<grpc::Channel> Connect(const std::string& socket) {
  auto channel =
      grpc::CreateChannel(absl::StrCat("unix:", socket), grpc::InsecureChannelCredentials());
  channel->WaitForConnected(std::chrono::system_clock::now() + std::chrono::seconds(20));
  return channel;
}

// Times `messages` calls of `once`, which says whether it went well: p50 and p99 in microseconds.
// `after` follows each call, untimed.
template <typename Once, typename After>
std::vector<double> Measure(int messages, bool& good, const Once& once, const After& after) {
  std::vector<double> samples;
  for (int i = 0; i < messages; ++i) {
    const absl::Time start = absl::Now();
    good = once() && good;
    samples.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
    good = after() && good;
  }
  return {bench::Percentile(samples, 0.50), bench::Percentile(samples, 0.99)};
}

template <typename Once>
std::vector<double> Measure(int messages, bool& good, const Once& once) {
  return Measure(messages, good, once, [] { return true; });
}

class Rpc {
 public:
  Rpc(Session* session, const std::string& daemon_socket, const std::string& echo_socket,
      int messages)
      : messages_(messages),
        session_(session),
        admin_(admin::v1::Admin::NewStub(Connect(daemon_socket))),
        echo_(bench::v1::Echo::NewStub(Connect(echo_socket))),
        stream_(echo_->Stream(&stream_context_)) {
    small_.set_payload(std::string(8, 'x'));
    admin::v1::GetStatusReply reply;
    Require(GetStatus(&reply));
    status_.set_payload(reply.SerializeAsString());
  }

  ~Rpc() {
    stream_->WritesDone();
    stream_->Finish();
  }

  std::vector<double> ControlCalls() {
    admin::v1::GetStatusReply reply;
    return Measure(messages_, good_, [&] { return GetStatus(&reply); });
  }

  std::vector<double> UnaryEchoes() {
    Ping pong;
    return Measure(messages_, good_, [&] {
      grpc::ClientContext context;
      return echo_->Unary(&context, status_, &pong).ok();
    });
  }

  std::vector<double> Gathers() {
    return Measure(
        messages_, good_,
        [&] {
          const auto gather = session_->Gather(kUnits);
          return gather.ok() && session_->Wait(*gather).ok();
        },
        [&] {
          const auto release = session_->Release(kUnits);
          return release.ok() && session_->Wait(*release).ok();
        });
  }

  // The gathers of a step are issued ahead; by the time each is needed it has long completed.
  std::vector<double> PrefetchedWaits() {
    std::vector<RequestId> ids;
    for (int i = 0; i < messages_; ++i) {
      const auto gather = session_->Gather(kUnits, {.prefetch = true});
      Require(gather.ok());
      ids.push_back(gather.value_or(0));
    }
    Require(session_->Wait(ids.back()).ok());
    size_t next = 0;
    auto figures = Measure(messages_, good_, [&] { return session_->Wait(ids[next++]).ok(); });
    for (int i = 0; i < messages_; ++i) Require(session_->Release(kUnits).ok());
    return figures;
  }

  std::vector<double> StreamEchoes() {
    Ping pong;
    return Measure(messages_, good_, [&] {
      small_.set_id(small_.id() + 1);
      return stream_->Write(small_) && stream_->Read(&pong) && pong.id() == small_.id();
    });
  }

  bool good() const { return good_; }

 private:
  static constexpr uint32_t kUnits[] = {0};

  bool GetStatus(admin::v1::GetStatusReply* reply) {
    grpc::ClientContext context;
    return admin_->GetStatus(&context, {}, reply).ok();
  }
  void Require(bool holds) { good_ = holds && good_; }

  const int messages_;
  Session* const session_;
  const std::unique_ptr<admin::v1::Admin::Stub> admin_;
  const std::unique_ptr<bench::v1::Echo::Stub> echo_;
  grpc::ClientContext stream_context_;
  const std::unique_ptr<grpc::ClientReaderWriter<Ping, Ping>> stream_;
  Ping small_;
  Ping status_;
  bool good_ = true;
};

// One rank with one unit whose values are there.
absl::StatusOr<std::unique_ptr<Session>> AttachAlone(const std::string& socket) {
  AttachOptions options{.socket = socket, .job = "rpc"};
  options.parameters.resize(1);
  options.parameters[0].name = "weight";
  options.parameters[0].shape = {256, 256};
  options.groups.resize(1);
  options.ds_config =
      R"({"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},)"
      R"( "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})";
  auto session = Session::Attach(std::move(options));
  if (!session.ok()) return session;
  const Unit& unit = (*session)->layout().units()[0];
  const auto slot = (*session)->AcquireSlot(unit.bytes());
  if (!slot.ok()) return slot.status();
  const auto put = (*session)->Put(
      {.unit = 0, .elements = unit.elements(), .window_offset = *slot, .last = true});
  if (!put.ok()) return put.status();
  const absl::Status done = (*session)->Wait(*put);
  if (!done.ok()) return done;
  return session;
}

void Run(bench::Bench& bench, Rpc& rpc) {
  bench.Compare(
      {{"control call p50", "unary echo p50", "us", bench::AtMost(1.12)},
       {"control call p99", "unary echo p99", "us", bench::AtMost(1.25)}},
      [&] { return rpc.ControlCalls(); }, [&] { return rpc.UnaryEchoes(); });
  bench.Compare(
      {{"request p50", "stream echo p50", "us", bench::AtMost(1.12)},
       {"request p99", "stream echo p99", "us", bench::AtMost(1.25)}},
      [&] { return rpc.Gathers(); }, [&] { return rpc.StreamEchoes(); });
  bench.Compare(
      {{"prefetched wait p50", "stream echo p50", "us", bench::AtMost(0.15)},
       {"prefetched wait p99", "stream echo p99", "us", bench::AtMost(0.15)}},
      [&] { return rpc.PrefetchedWaits(); }, [&] { return rpc.StreamEchoes(); });
  bench.Require(rpc.good(), "a call, a request or an echo went wrong");
}

int Main(int argc, char** argv) {
  bench::Bench bench("rpc", argc, argv);
  auto daemon = bench::DaemonProcess::Start(argv[0], {"cpu:0"});
  if (!daemon.ok()) {
    std::cerr << "rpc: " << daemon.status() << std::endl;
    return 2;
  }
  const std::string echo_socket = absl::StrCat("/tmp/zs-bench-echo-", getpid());
  const pid_t echo = fork();  // before this process has used gRPC
  if (echo == 0) ServeEcho(echo_socket);
  if (auto session = AttachAlone((*daemon)->socket()); session.ok()) {
    Rpc rpc(session->get(), (*daemon)->socket(), echo_socket, bench.Size(1000, 20));
    Run(bench, rpc);
    bench.Require((*session)->Detach().ok(), "the rank could not leave");
  } else {
    bench.Require(false, absl::StrCat("no session: ", session.status().ToString()));
  }
  kill(echo, SIGKILL);
  waitpid(echo, nullptr, 0);
  unlink(echo_socket.c_str());
  return bench.Finish();
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) { return zeroshard::Main(argc, argv); }
