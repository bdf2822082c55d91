// B12: what it costs to watch a job, and how fast trouble is noticed.
//
//   metrics on   training steps a second of a job on a daemon that serves metrics, scraped once a
//                second, against the same job on a daemon with metrics off
//   mismatch     from a gather in another order than the other ranks' until all four ranks hold the
//                error in their hands; the others were waiting for the step
//   death        from SIGKILL of a trainer until the daemon tells its watchers
//
// Every trainer that dies is a process of its own (this program with --trainer); the ranks of a
// mismatch are threads.
#include <arpa/inet.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "base/unique_fd.h"
#include "client/session.h"
#include "proto/admin.grpc.pb.h"
#include "proto/trainer.grpc.pb.h"
#include "tests/bench/daemon_process.h"
#include "tests/bench/paired.h"

namespace zeroshard {
namespace {

constexpr uint32_t kUnits = 4;
constexpr uint32_t kMismatchRanks = 4;

// Four units of 256 Ki bf16 elements at stage 3.
AttachOptions Options(const std::string& socket, const std::string& job, uint32_t rank,
                      uint32_t world_size) {
  AttachOptions options;
  options.socket = socket;
  options.job = job;
  options.rank = rank;
  options.world_size = world_size;
  for (uint32_t i = 0; i < kUnits; ++i) {
    ParameterSpec& parameter = options.parameters.emplace_back();
    parameter.name = parameter.module = absl::StrCat("w", i);
    parameter.shape = {512, 512};
    parameter.dtype = DType::kBfloat16;
  }
  options.groups.resize(1);
  options.ds_config =
      R"({"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": true},)"
      R"( "optimizer": {"type": "AdamW", "params": {"lr": 0.001}},)"
      R"( "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}})";
  return options;
}

// Gives every unit zeros.
absl::Status PutAll(Session& session) {
  for (uint32_t u = 0; u < kUnits; ++u) {
    const Unit& unit = session.layout().units()[u];
    const auto slot = session.AcquireSlot(unit.bytes());
    if (!slot.ok()) return slot.status();
    std::memset(session.gradient_window().data() + *slot, 0, unit.bytes());
    const auto put =
        session.Put({.unit = u, .elements = unit.elements(), .window_offset = *slot, .last = true});
    if (!put.ok()) return put.status();
    if (absl::Status done = session.Wait(*put); !done.ok()) return done;
  }
  return absl::OkStatus();
}

// --- Metrics ------------------------------------------------------------------------------------

absl::Status TrainStep(Session& session) {
  for (uint32_t u = 0; u < kUnits; ++u) {
    const uint32_t units[] = {u};
    const auto gather = session.Gather(units);
    if (!gather.ok()) return gather.status();
    if (absl::Status status = session.Wait(*gather); !status.ok()) return status;
    const uint64_t bytes = session.layout().units()[u].bytes();
    const auto slot = session.AcquireSlot(bytes);
    if (!slot.ok()) return slot.status();
    std::memset(session.gradient_window().data() + *slot, 0x3c, bytes);
    if (const auto id = session.Scatter({.unit = u, .window_offset = *slot}); !id.ok()) {
      return id.status();
    }
    if (const auto id = session.Release(units); !id.ok()) return id.status();
  }
  const auto step = session.Step({});
  return step.ok() ? session.Wait(*step) : step.status();
}

// Bytes of the answer to GET /metrics, 0 when there was none.
size_t Scrape(const std::string& address) {
  const UniqueFd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in server = {};
  server.sin_family = AF_INET;
  server.sin_port = htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
  server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd.get(), reinterpret_cast<sockaddr*>(&server), sizeof(server)) != 0) return 0;
  constexpr char kRequest[] =
      "GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
  if (send(fd.get(), kRequest, sizeof(kRequest) - 1, MSG_NOSIGNAL) < 0) return 0;
  size_t bytes = 0;
  std::array<char, 65536> buffer;
  for (ssize_t got; (got = recv(fd.get(), buffer.data(), buffer.size(), 0)) > 0;) {
    bytes += static_cast<size_t>(got);
  }
  return bytes;
}

std::string MetricsAddress(const std::string& socket) {
  const auto stub = admin::v1::Admin::NewStub(
      grpc::CreateChannel(absl::StrCat("unix:", socket), grpc::InsecureChannelCredentials()));
  admin::v1::GetStatusReply reply;
  grpc::ClientContext context;
  context.set_wait_for_ready(true);
  return stub->GetStatus(&context, {}, &reply).ok() ? reply.metrics_address() : "";
}

void RunMetrics(bench::Bench& bench, const std::string& socket_on, const std::string& socket_off) {
  auto on = Session::Attach(Options(socket_on, "metrics-on", 0, 1));
  auto off = Session::Attach(Options(socket_off, "metrics-off", 0, 1));
  const std::string address = MetricsAddress(socket_on);
  bool good = on.ok() && off.ok() && !address.empty() && PutAll(**on).ok() && PutAll(**off).ok();
  bench.Require(good, "no session to measure metrics with");
  if (!good) return;
  const absl::Duration span = absl::Milliseconds(bench.Size(1000, 20));
  // Steps a second over about a second.
  const auto train = [&](Session& session) {
    const absl::Time start = absl::Now();
    int steps = 0;
    for (; absl::Now() - start < span; ++steps) good = TrainStep(session).ok() && good;
    return std::vector<double>{steps / absl::ToDoubleSeconds(absl::Now() - start)};
  };
  bench.Compare(
      {{"steps with metrics", "steps without", "1/s", bench::AtLeast(0.99)}},
      [&] {
        std::thread scraper([&] { good = Scrape(address) > 1000 && good; });
        auto rate = train(**on);
        scraper.join();
        return rate;
      },
      [&] { return train(**off); });
  bench.Require(good, "a step or a scrape went wrong");
  bench.Require((*on)->Detach().ok() && (*off)->Detach().ok(), "a rank could not leave");
}

// --- Mismatch -----------------------------------------------------------------------------------

using Sessions = std::array<std::unique_ptr<Session>, kMismatchRanks>;

absl::StatusOr<Sessions> AttachAll(const std::string& socket, const std::string& job) {
  Sessions sessions;
  std::array<absl::Status, kMismatchRanks> statuses;
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < kMismatchRanks; ++rank) {
    threads.emplace_back([&, rank] {
      auto session = Session::Attach(Options(socket, job, rank, kMismatchRanks));
      statuses[rank] = session.status();
      if (session.ok()) sessions[rank] = *std::move(session);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return sessions;
}

// Ranks 1 to 3 gather unit 0 and arrive at the step; then rank 0 gathers unit 1. Milliseconds until
// the last of the four calls has failed.
absl::StatusOr<double> Mismatch(const Sessions& sessions) {
  const uint32_t mine[] = {1}, theirs[] = {0};
  std::array<absl::Time, kMismatchRanks> failed;
  std::array<absl::Status, kMismatchRanks> errors;
  std::vector<std::thread> threads;
  for (uint32_t rank = 1; rank < kMismatchRanks; ++rank) {
    const auto gather = sessions[rank]->Gather(theirs);
    if (!gather.ok()) return gather.status();
    if (absl::Status status = sessions[rank]->Wait(*gather); !status.ok()) return status;
    const auto step = sessions[rank]->Step({});
    if (!step.ok()) return step.status();
    threads.emplace_back([&, rank, id = *step] {
      errors[rank] = sessions[rank]->Wait(id);
      failed[rank] = absl::Now();
    });
  }
  absl::SleepFor(absl::Milliseconds(2));  // all of them sleep in their Wait
  const absl::Time start = absl::Now();
  const auto gather = sessions[0]->Gather(mine);
  errors[0] = gather.ok() ? sessions[0]->Wait(*gather) : gather.status();
  failed[0] = absl::Now();
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& error : errors) {
    if (!absl::IsFailedPrecondition(error)) {
      return absl::InternalError(absl::StrCat("not the error of a mismatch: ", error.ToString()));
    }
  }
  return absl::ToDoubleMilliseconds(*std::max_element(failed.begin(), failed.end()) - start);
}

void RunMismatches(bench::Bench& bench, const std::string& socket) {
  std::vector<double> samples;
  const int rounds = bench.Size(100, 2);
  for (int i = 0; i < rounds; ++i) {
    auto sessions = AttachAll(socket, absl::StrCat("mismatch-", i));
    absl::Status status = sessions.status();
    if (status.ok()) status = PutAll(*sessions->front());
    if (status.ok()) {
      const auto sample = Mismatch(*sessions);
      status = sample.status();
      if (sample.ok()) samples.push_back(*sample);
    }
    if (sessions.ok()) {
      for (const auto& session : *sessions) static_cast<void>(session->Detach());
    }
    bench.Require(status.ok(), status.ToString());
    if (!status.ok()) return;
  }
  bench.Absolute({"mismatch to error on all ranks p50", "", "ms"}, bench::Median(samples));
  bench.Absolute({"mismatch to error on all ranks p99", "", "ms", bench::AtMost(50)},
                 bench::Percentile(samples, 0.99));
}

// --- Death --------------------------------------------------------------------------------------

constexpr char kDeathJob[] = "death";

// Rank 1 as a process of its own: attaches, says so on standard output, and waits to be killed.
int RunTrainer(const std::string& socket) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const auto session = Session::Attach(Options(socket, kDeathJob, 1, 2));
  if (!session.ok()) return 1;
  if (write(STDOUT_FILENO, "a", 1) != 1) return 1;
  while (true) pause();
}

// The pid of a rank 1, which attaches meanwhile; `ready` becomes readable when it has.
pid_t StartTrainer(const std::string& program, const std::string& socket, UniqueFd& ready) {
  int ends[2];
  if (pipe(ends) != 0) return -1;
  const std::string path = program, flag = "--trainer=" + socket;
  const pid_t pid = fork();
  if (pid == 0) {
    dup2(ends[1], STDOUT_FILENO);
    close(ends[0]);
    close(ends[1]);
    execl(path.c_str(), path.c_str(), flag.c_str(), static_cast<char*>(nullptr));
    _exit(127);
  }
  close(ends[1]);
  ready = UniqueFd(ends[0]);
  return pid;
}

// When the daemon told of the latest death.
class Watcher {
 public:
  explicit Watcher(const std::string& socket)
      : stub_(trainer::v1::Trainer::NewStub(grpc::CreateChannel(
            absl::StrCat("unix:", socket), grpc::InsecureChannelCredentials()))) {
    trainer::v1::WatchRequest request;
    request.set_job(kDeathJob);
    stream_ = stub_->Watch(&context_, request);
    reader_ = std::thread([this] {
      trainer::v1::WatchEvent event;
      while (stream_->Read(&event)) {
        if (event.kind() != "rank-died") continue;
        absl::MutexLock lock(&mu_);
        died_at_ = absl::Now();
        ++deaths_;
      }
    });
  }
  ~Watcher() {
    context_.TryCancel();
    reader_.join();
  }

  // The time of death number `count`, from 1; InfiniteFuture when it is not told in ten seconds.
  absl::Time Await(int count) {
    absl::MutexLock lock(&mu_);
    const auto told = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return deaths_ >= count; };
    const bool in_time = mu_.AwaitWithTimeout(absl::Condition(&told), absl::Seconds(10));
    return in_time ? died_at_ : absl::InfiniteFuture();
  }

 private:
  const std::unique_ptr<trainer::v1::Trainer::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<trainer::v1::WatchEvent>> stream_;
  absl::Mutex mu_;
  absl::Time died_at_ ABSL_GUARDED_BY(mu_);
  int deaths_ ABSL_GUARDED_BY(mu_) = 0;
  std::thread reader_;
};

void RunDeaths(bench::Bench& bench, const std::string& program, const std::string& socket) {
  UniqueFd ready;
  pid_t pid = StartTrainer(program, socket, ready);
  auto survivor = Session::Attach(Options(socket, kDeathJob, 0, 2));
  bench.Require(survivor.ok(), survivor.status().ToString());
  std::vector<double> samples;
  const int rounds = survivor.ok() ? bench.Size(40, 2) : 0;
  Watcher watcher(socket);
  for (int i = 1; i <= rounds; ++i) {
    if (i > 1) pid = StartTrainer(program, socket, ready);
    char byte = 0;
    const bool attached = read(ready.get(), &byte, 1) == 1;
    const absl::Time start = absl::Now();
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    bench.Require(attached, "the trainer did not attach");
    if (!attached) return;
    samples.push_back(absl::ToDoubleMilliseconds(watcher.Await(i) - start));
  }
  if (rounds == 0) {
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    return;
  }
  bench.Absolute({"death of a trainer noticed p50", "", "ms"}, bench::Median(samples));
  bench.Absolute({"death of a trainer noticed, longest", "", "ms", bench::AtMost(100)},
                 bench::Percentile(samples, 1.0));
}

int Main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]).rfind("--trainer=", 0) == 0) {
    return RunTrainer(std::string(argv[1]).substr(10));
  }
  bench::Bench bench("liveness", argc, argv);
  auto on = bench::DaemonProcess::Start(argv[0], {"cpu:0", "cpu:1"}, "127.0.0.1:0");
  auto off = bench::DaemonProcess::Start(argv[0], {"cpu:0", "cpu:1"});
  if (!on.ok() || !off.ok()) {
    std::cerr << "liveness: " << (on.ok() ? off : on).status() << std::endl;
    return 2;
  }
  RunMetrics(bench, (*on)->socket(), (*off)->socket());
  RunMismatches(bench, (*off)->socket());
  RunDeaths(bench, argv[0], (*off)->socket());
  return bench.Finish();
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) { return zeroshard::Main(argc, argv); }
