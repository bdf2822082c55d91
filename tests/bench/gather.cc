// B3: gathers of a stage-3 parameter, against copying the same bytes.
//
//   fill      eight workers' slices copied into a window (Shard::FillWindow, what a worker runs for
//             a gather of a released unit), on two threads, against a memcpy of the unit on two
//   in place  a gather of a unit whose slices are on this node, from the call until Wait returns,
//             over a running daemon: the shards are the window, so its size does not matter
//   copied    the same with a copied window, which includes the page faults of pages given back
//             before; reported only
//
// Both sides of a fill copy between memory files (4 KiB pages) that were touched before, and what
// was filled is compared with the slices afterwards.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/shared_memory.h"
#include "client/session.h"
#include "device/cpu/thread_pool.h"
#include "tests/bench/daemon_process.h"
#include "tests/bench/paired.h"
#include "tests/fakes/local_job.h"
#include "worker/shard.h"
#include "worker/tier_set.h"

namespace zeroshard {
namespace {

constexpr uint32_t kSlices = 8;
constexpr uint64_t kMiB = uint64_t{1} << 20;

template <typename T>
T Must(absl::StatusOr<T> value) {
  ZS_CHECK(value.ok(), std::string(value.status().message()));
  return *std::move(value);
}

LocalJobOptions CopiedJob(uint64_t bytes) {
  LocalJobOptions options;
  options.manifest = MakeManifest({bytes / 2}, model::v1::DTYPE_BFLOAT16);
  options.manifest.mutable_parameters(0)->set_trainable(false);
  options.config = MakeConfig(3, 1, model::v1::DTYPE_BFLOAT16);
  options.config.set_optimizer(model::v1::OPTIMIZER_NONE);
  options.config.clear_state_slots();
  options.config.set_window(model::v1::WINDOW_COPY);
  options.workers = kSlices;
  return options;
}

// The calling thread and one more, which spins between two works: both sides are started alike, and
// a worker's own pool may run inside. Destroyed by the thread that made it.
class TwoThreads {
 public:
  TwoThreads() : other_([this] { Serve(); }) {}
  ~TwoThreads() {
    stopping_ = true;
    other_.join();
  }
  // Calls part(0) and part(1) at the same time.
  void Run(const std::function<void(int)>& part) {
    part_ = &part;
    const uint64_t round = wanted_.fetch_add(1) + 1;
    part(0);
    while (done_.load() != round) {
    }
  }

 private:
  void Serve() {
    for (uint64_t round = 1; !stopping_;) {
      if (wanted_.load() < round) continue;
      (*part_)(1);
      done_.store(round++);
    }
  }
  const std::function<void(int)>* part_ = nullptr;
  std::atomic<uint64_t> wanted_{0};
  std::atomic<uint64_t> done_{0};
  std::atomic<bool> stopping_{false};
  std::thread other_;
};

// Eight workers of one job, each with one lane, that hold a unit of `bytes` in their partitions;
// and a pair of buffers of the same size.
class Fill {
 public:
  explicit Fill(uint64_t bytes)
      : bytes_(bytes), job_(CopiedJob(bytes)), source_(Buffer()), target_(Buffer()) {
    for (uint32_t w = 0; w < kSlices; ++w) {
      lanes_.push_back(Must(ThreadPool::Create({.threads = 1})));
      tiers_.push_back(std::make_unique<TierSet>(job_.memory(w), nullptr, nullptr));
      shards_.push_back(Must(Shard::Open(job_.memory(w), *lanes_.back(), *tiers_.back())));
      const auto [at, size] = SliceOf(w);
      std::memset(job_.memory(w).parameters_at_rest(0) + at, static_cast<int>(w) + 1, size);
    }
    std::memset(source_.data(), 9, bytes_);
    std::memset(target_.data(), 0, bytes_);
    std::memset(job_.memory(0).unit_window(0), 0, bytes_);
  }

  // Both return GB/s.
  double FillWindow(int rounds) {
    return Time(rounds, [&] {
      threads_.Run([&](int thread) {
        constexpr uint32_t kUnit = 0;
        for (uint32_t w = 0; w < kSlices / 2; ++w) {
          static_cast<void>(shards_[thread * kSlices / 2 + w].FillWindows({&kUnit, 1}));
        }
      });
    });
  }
  double Memcpy(int rounds) {
    return Time(rounds, [&] {
      threads_.Run([&](int thread) {
        const uint64_t half = bytes_ / 2;
        std::memcpy(target_.data() + thread * half, source_.data() + thread * half, half);
      });
    });
  }

  bool Correct() {
    for (uint32_t w = 0; w < kSlices; ++w) {
      const auto [at, size] = SliceOf(w);
      const std::byte* filled = job_.memory(0).unit_window(0) + at;
      if (std::memcmp(filled, job_.memory(w).parameters_at_rest(0) + at, size) != 0) return false;
      if (filled[0] != std::byte{static_cast<uint8_t>(w + 1)}) return false;
    }
    return true;
  }

 private:
  MappedRegion Buffer() const {
    const UniqueFd fd = Must(CreateSealedMemfd("zeroshard-bench", bytes_));
    return Must(MappedRegion::Map(fd.get(), bytes_, Access::kReadWrite));
  }
  std::pair<uint64_t, uint64_t> SliceOf(uint32_t worker) {
    const GrainRange slice = job_.layout().slice(0, worker);
    return {slice.first_element() * 2, slice.elements() * 2};
  }
  // Of the median round: one that was preempted says nothing about the copy.
  template <typename Work>
  double Time(int rounds, const Work& work) {
    std::vector<double> nanoseconds;
    for (int i = 0; i < rounds; ++i) {
      const absl::Time start = absl::Now();
      work();
      nanoseconds.push_back(absl::ToDoubleNanoseconds(absl::Now() - start));
    }
    return static_cast<double>(bytes_) / bench::Median(std::move(nanoseconds));
  }

  const uint64_t bytes_;
  LocalJob job_;
  TwoThreads threads_;
  MappedRegion source_;
  MappedRegion target_;
  std::vector<std::unique_ptr<ThreadPool>> lanes_;
  std::vector<std::unique_ptr<TierSet>> tiers_;
  std::vector<Shard> shards_;
};

void RunFill(bench::Bench& bench, uint64_t mib, double target) {
  Fill fill(mib * kMiB);
  // About 1 GiB a side and block.
  const int rounds = bench.Size(static_cast<int>(std::max<uint64_t>(4, 1024 / mib)), 1);
  bench.Compare(
      {{absl::StrCat("fill ", mib, " MiB"), "memcpy", "GB/s", bench::AtLeast(target)}},
      [&] { return std::vector<double>{fill.FillWindow(rounds)}; },
      [&] { return std::vector<double>{fill.Memcpy(rounds)}; });
  bench.Require(fill.Correct(), absl::StrCat("a window of ", mib, " MiB was filled wrongly"));
}

// A frozen bf16 parameter of `mib` MiB, held by all of a daemon's workers.
absl::StatusOr<std::unique_ptr<Session>> AttachFrozen(const std::string& socket, uint64_t mib,
                                                      const std::string& window) {
  AttachOptions options;
  options.socket = socket;
  options.job = absl::StrCat("bench-gather-", window, "-", mib);
  ParameterSpec& parameter = options.parameters.emplace_back();
  parameter.name = "weight";
  parameter.shape = {mib * kMiB / 2};
  parameter.dtype = DType::kBfloat16;
  parameter.trainable = false;
  options.groups.resize(1);
  options.ds_config =
      absl::StrCat(R"({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3,)",
                   R"( "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0},)",
                   R"( "zeroshard": {"window": ")", window, R"("}})");
  options.forward_only = true;
  auto session = Session::Attach(std::move(options));
  if (!session.ok()) return session;
  const Unit& unit = (*session)->layout().units()[0];
  const uint64_t piece = std::min<uint64_t>(unit.elements(), kMiB / 2);
  for (uint64_t at = 0; at < unit.elements(); at += piece) {
    const auto slot = (*session)->AcquireSlot(piece * 2);
    if (!slot.ok()) return slot.status();
    std::memset((*session)->gradient_window().data() + *slot, 7, piece * 2);
    const auto put = (*session)->Put({.unit = 0,
                                      .element_offset = at,
                                      .elements = piece,
                                      .window_offset = *slot,
                                      .last = at + piece == unit.elements()});
    if (!put.ok()) return put.status();
    const absl::Status done = (*session)->Wait(*put);
    if (!done.ok()) return done;
  }
  return session;
}

// Median and 99th percentile of `gathers`, in microseconds; nothing when one fails.
absl::StatusOr<std::pair<double, double>> TimeGathers(Session& session, int gathers) {
  constexpr uint32_t kUnits[] = {0};
  std::vector<double> samples;
  for (int i = 0; i < gathers; ++i) {
    const absl::Time start = absl::Now();
    const auto gather = session.Gather(kUnits);
    if (!gather.ok()) return gather.status();
    if (absl::Status status = session.Wait(*gather); !status.ok()) return status;
    samples.push_back(absl::ToDoubleMicroseconds(absl::Now() - start));
    const auto window = session.parameter_window();
    if (window.front() != std::byte{7} || window.back() != std::byte{7}) {
      return absl::DataLossError("a gather gave other bytes than were put");
    }
    const auto release = session.Release(kUnits);
    if (!release.ok()) return release.status();
    if (absl::Status status = session.Wait(*release); !status.ok()) return status;
  }
  return std::pair{bench::Percentile(samples, 0.50), bench::Percentile(samples, 0.99)};
}

void RunDaemon(bench::Bench& bench, const std::string& socket, const std::string& window,
               uint64_t mib) {
  auto session = AttachFrozen(socket, mib, window);
  absl::StatusOr<std::pair<double, double>> times = absl::UnknownError("not attached");
  const bool copied = window == "copy";
  if (!session.ok()) {
    times = session.status();
  } else {
    times = TimeGathers(**session, bench.Size(copied ? static_cast<int>(1024 / mib) : 2000, 4));
    bench.Require((*session)->Detach().ok(), "the rank could not leave");
  }
  bench.Require(times.ok(), absl::StrCat(window, ", ", mib, " MiB: ", times.status().ToString()));
  if (!times.ok()) return;
  const std::string name =
      absl::StrCat("gather ", mib, " MiB ", copied ? "into a copied window" : "on this node");
  bench.Absolute({name + " p50", "", "us", copied ? bench::Target{} : bench::AtMost(100)},
                 times->first);
  bench.Absolute({name + " p99", "", "us"}, times->second);
}

int Main(int argc, char** argv) {
  bench::Bench bench("gather", argc, argv);
  std::vector<std::string> devices;
  for (uint32_t i = 0; i < kSlices; ++i) devices.push_back(absl::StrCat("cpu:", i));
  auto daemon = bench::DaemonProcess::Start(argv[0], devices);
  if (!daemon.ok()) {
    std::cerr << "gather: " << daemon.status() << std::endl;
    return 2;
  }
  for (const auto& [mib, target] :
       std::vector<std::pair<uint64_t, double>>{{1, 0.80}, {16, 0.92}, {256, 0.95}}) {
    RunFill(bench, mib, target);
  }
  for (const char* window : {"in_place", "copy"}) {
    for (const uint64_t mib : {1, 16, 256}) RunDaemon(bench, (*daemon)->socket(), window, mib);
  }
  return bench.Finish();
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) { return zeroshard::Main(argc, argv); }
