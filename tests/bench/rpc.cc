// B4: what a control message costs, against a bare gRPC echo of the same kind on the same kind of
// socket.
//
//   request          Submit of a Release until its Wait returns, the worker answering at once
//   prefetched wait  Wait for a request that has completed before it is needed
//   echo             one message there and back over a bidirectional stream of gRPC's synchronous
//   API
//
// Client and server are two processes. The worker's place is taken by the tests' fake, which does
// nothing but publish the completion: measured is the way there and back, as in the echo.
#include <grpcpp/grpcpp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "client/request_channel.h"
#include "tests/bench/echo.grpc.pb.h"
#include "tests/bench/paired.h"
#include "tests/fakes/fake_session_service.h"

namespace zeroshard {
namespace {

using bench::v1::Ping;
using trainer::v1::SessionRequest;

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

// The server process: ends with its parent.
[[noreturn]] void Serve(FakeSessionService& worker, const std::string& echo_socket) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  worker.AutoComplete();
  worker.Start();
  EchoService echo;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(absl::StrCat("unix:", echo_socket), grpc::InsecureServerCredentials());
  builder.RegisterService(&echo);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  server->Wait();
  _exit(0);
}

double Microseconds(absl::Time from, absl::Time to) {
  return absl::ToDoubleMicroseconds(to - from);
}

std::vector<double> P50AndP99(std::vector<double> samples) {
  return {bench::Percentile(samples, 0.50), bench::Percentile(std::move(samples), 0.99)};
}

SessionRequest Release(uint32_t unit) {
  SessionRequest request;
  request.mutable_release()->add_units(unit);
  return request;
}

class Rpc {
 public:
  Rpc(const RankPage& page, const std::string& worker_socket, const std::string& echo_socket,
      int messages)
      : messages_(messages),
        channel_(Connect(page, worker_socket)),
        stub_(bench::v1::Echo::NewStub(grpc::CreateChannel(absl::StrCat("unix:", echo_socket),
                                                           grpc::InsecureChannelCredentials()))),
        stream_(stub_->Stream(&context_)) {}

  ~Rpc() {
    stream_->WritesDone();
    stream_->Finish();
  }

  std::vector<double> Requests() {
    std::vector<double> samples;
    for (int i = 0; i < messages_; ++i) {
      const absl::Time start = absl::Now();
      const uint64_t id = *channel_->Submit(Release(7));
      good_ = good_ && channel_->Wait(id, absl::Seconds(30)).ok();
      samples.push_back(Microseconds(start, absl::Now()));
    }
    return P50AndP99(std::move(samples));
  }

  // The gathers of a step are issued ahead; by the time each is needed it has long completed.
  std::vector<double> PrefetchedWaits() {
    std::vector<uint64_t> ids;
    for (int i = 0; i < messages_; ++i) ids.push_back(*channel_->Submit(Release(7)));
    good_ = good_ && channel_->Wait(ids.back(), absl::Seconds(30)).ok();
    std::vector<double> samples;
    for (const uint64_t id : ids) {
      const absl::Time start = absl::Now();
      good_ = good_ && channel_->Wait(id, absl::Seconds(30)).ok();
      samples.push_back(Microseconds(start, absl::Now()));
    }
    return P50AndP99(std::move(samples));
  }

  std::vector<double> Echoes() {
    std::vector<double> samples;
    Ping ping, pong;
    ping.set_payload(Release(7).SerializeAsString());
    for (int i = 0; i < messages_; ++i) {
      const absl::Time start = absl::Now();
      ping.set_id(static_cast<uint64_t>(i));
      good_ = good_ && stream_->Write(ping) && stream_->Read(&pong) && pong.id() == ping.id();
      samples.push_back(Microseconds(start, absl::Now()));
    }
    return P50AndP99(std::move(samples));
  }

  bool good() const { return good_; }

 private:
  static std::unique_ptr<RequestChannel> Connect(const RankPage& page, const std::string& socket) {
    for (int tries = 0; tries < 1000; ++tries) {  // until the server process listens
      auto channel = RequestChannel::Open(page, {.socket = socket}, absl::Seconds(30));
      if (channel.ok()) return *std::move(channel);
      absl::SleepFor(absl::Milliseconds(10));
    }
    ZS_CHECK(false, "the server process does not listen");
  }

  const int messages_;
  const std::unique_ptr<RequestChannel> channel_;
  const std::unique_ptr<bench::v1::Echo::Stub> stub_;
  grpc::ClientContext context_;
  const std::unique_ptr<grpc::ClientReaderWriter<Ping, Ping>> stream_;
  bool good_ = true;
};

int Main(int argc, char** argv) {
  bench::Bench bench("rpc", argc, argv);
  const std::string prefix = absl::StrCat("/tmp/zs-bench-rpc-", getpid());
  FakeSessionService worker(prefix + "-worker");
  const std::string echo_socket = prefix + "-echo";
  const pid_t server = fork();  // before this process has used gRPC
  if (server == 0) Serve(worker, echo_socket);
  {
    Rpc rpc(worker.page(), worker.socket(), echo_socket, bench.Size(1000, 20));
    bench.Compare(
        {{"request p50", "stream echo p50", "us", bench::AtMost(1.12)},
         {"request p99", "stream echo p99", "us", bench::AtMost(1.25)}},
        [&] { return rpc.Requests(); }, [&] { return rpc.Echoes(); });
    bench.Compare(
        {{"prefetched wait p50", "stream echo p50", "us", bench::AtMost(0.15)},
         {"prefetched wait p99", "stream echo p99", "us", bench::AtMost(0.15)}},
        [&] { return rpc.PrefetchedWaits(); }, [&] { return rpc.Echoes(); });
    bench.Require(rpc.good(), "a request or an echo went wrong");
  }
  kill(server, SIGKILL);
  waitpid(server, nullptr, 0);
  unlink(worker.socket().c_str());
  unlink(echo_socket.c_str());
  return bench.Finish();
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) { return zeroshard::Main(argc, argv); }
