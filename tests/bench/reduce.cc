// B5: reduce-scatter of a gradient of 64 MiB of bf16 from 2 and 4 local ranks, summed in fp32.
//
//   ours         scatters of written windows over a running daemon with one worker, from the first
//                rank's call until every rank's Wait has returned; squared norm, finite check,
//                messages and wake-ups included
//   bound        the same memory traffic, read R x bf16 and write fp32 once, by two threads that do
//                nothing else, over as many buffers; stored past the caches or not, whichever is
//                faster each time
//   native Gloo  Debian's, R threads over loopback: halving-doubling reduce-scatter or allreduce,
//   of
//                bf16 (rounded after every addition) or fp32, whichever is fastest here
//   torch Gloo   PyTorch 2.x of tests/bench/peers, R processes: the fastest of the same four
//
// Speeds count the bytes of the gradients, R x 64 MiB. All sides are checked: the parameters after
// a step of ours, and its norm after each; the others' sums of small whole numbers.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/dtype.h"
#include "client/session.h"
#include "tests/bench/daemon_process.h"
#include "tests/bench/paired.h"
#include "tests/bench/rank_threads.h"
#include "tests/bench/reduce_stream.h"
#include "tests/bench/torch_ranks.h"
#include "tests/transport/gloo_ranks.h"

namespace zeroshard {
namespace {

using bench::RankThreads;

// Each of them one reduce-scatter. They are followed by a step, which is not measured.
constexpr uint32_t kUnits = 4;

template <typename T>
T Must(absl::StatusOr<T> value) {
  ZS_CHECK(value.ok(), std::string(value.status().message()));
  return *std::move(value);
}
void Must(const absl::Status& status) { ZS_CHECK(status.ok(), std::string(status.message())); }

// Whole numbers whose sums bf16 holds.
float Gradient(uint32_t rank, uint64_t element) {
  return static_cast<float>((element * 5 + rank * 3) % 16) - 8.0f;
}

float Mean(uint32_t ranks, uint64_t element) {
  float sum = 0;
  for (uint32_t rank = 0; rank < ranks; ++rank) sum += Gradient(rank, element);
  return sum / static_cast<float>(ranks);
}

// --- Ours ---------------------------------------------------------------------------------------

class OurRanks {
 public:
  OurRanks(const std::string& socket, uint32_t ranks, uint64_t elements)
      : ranks_(ranks), elements_(elements), threads_(ranks), sessions_(ranks), slots_(ranks) {
    threads_.Run(
        [&](uint32_t rank) { sessions_[rank] = Must(Session::Attach(Options(socket, rank))); });
    for (uint32_t unit = 0; unit < kUnits; ++unit) PutZeros(unit);
    for (uint64_t i = 0; i < elements; ++i) norm_ += std::pow(Mean(ranks, i), 2);
    norm_ = std::sqrt(norm_ * kUnits);
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      std::vector<uint16_t>& values = gradients_.emplace_back(elements);
      for (uint64_t i = 0; i < elements; ++i) values[i] = FloatToBf16(Gradient(rank, i));
    }
  }
  ~OurRanks() {
    threads_.Run([&](uint32_t rank) { Must(sessions_[rank]->Detach()); });
  }

  // Seconds of kUnits reduce-scatters, one after the other; then a step.
  std::vector<double> Run(double lr) {
    threads_.Run([&](uint32_t rank) { AcquireSlots(rank); });
    std::vector<double> seconds;
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      seconds.push_back(threads_.Run([&](uint32_t rank) {
        Session& session = *sessions_[rank];
        Must(session.Wait(
            Must(session.Scatter({.unit = unit, .window_offset = slots_[rank][unit]}))));
      }));
    }
    threads_.Run([&](uint32_t rank) {
      GroupHyperparameters group;
      group.lr = lr;
      Must(sessions_[rank]->Wait(Must(sessions_[rank]->Step({.groups = {group}}))));
    });
    const StepResult result = sessions_[0]->step_result();
    ZS_CHECK(result.norm_valid == 1 && std::abs(result.grad_norm / norm_ - 1) < 1e-6,
             absl::StrCat("norm ", result.grad_norm, ", should be ", norm_));
    return seconds;
  }

  // After one step with lr 1 from zero: every parameter is minus the mean gradient.
  bool Correct() const {
    const Session& session = *sessions_[0];
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      const std::byte* window =
          session.parameter_window().data() + session.layout().units()[unit].window_offset;
      for (uint64_t i = 0; i < elements_; ++i) {
        uint16_t bits;
        std::memcpy(&bits, window + i * sizeof(bits), sizeof(bits));
        if (Bf16ToFloat(bits) != -Mean(ranks_, i)) return false;
      }
    }
    return true;
  }

 private:
  AttachOptions Options(const std::string& socket, uint32_t rank) const {
    AttachOptions options;
    options.socket = socket;
    options.job = absl::StrCat("bench-reduce-", ranks_);
    options.rank = rank;
    options.world_size = ranks_;
    for (uint32_t i = 0; i < kUnits; ++i) {
      ParameterSpec& parameter = options.parameters.emplace_back();
      parameter.name = parameter.module = absl::StrCat("w", i);
      parameter.shape = {elements_};
      parameter.dtype = DType::kBfloat16;
    }
    options.groups.resize(1);
    options.ds_config =
        R"({"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0, "bf16": {"enabled": true},)"
        R"( "optimizer": {"type": "SGD", "params": {"lr": 1.0}},)"
        R"( "zero_optimization": {"stage": 2}})";
    return options;
  }

  void PutZeros(uint32_t unit) {
    Session& session = *sessions_[0];
    const uint64_t bytes = session.layout().units()[unit].bytes();
    const uint64_t slot = Must(session.AcquireSlot(bytes));
    std::memset(session.gradient_window().data() + slot, 0, bytes);
    Must(session.Wait(Must(session.Put({.unit = unit,
                                        .elements = session.layout().units()[unit].elements(),
                                        .window_offset = slot,
                                        .last = true}))));
  }

  // All units have the same gradient, so what was written to a slot serves whichever comes next.
  void AcquireSlots(uint32_t rank) {
    Session& session = *sessions_[rank];
    std::vector<uint64_t> slots;
    for (uint32_t unit = 0; unit < kUnits; ++unit) {
      slots.push_back(Must(session.AcquireSlot(session.layout().units()[unit].bytes())));
      std::vector<uint64_t>& known = slots_[rank];
      if (std::find(known.begin(), known.end(), slots.back()) == known.end()) {
        std::memcpy(session.gradient_window().data() + slots.back(), gradients_[rank].data(),
                    elements_ * sizeof(uint16_t));
      }
    }
    slots_[rank] = slots;
  }

  const uint32_t ranks_;
  const uint64_t elements_;
  RankThreads threads_;
  std::vector<std::unique_ptr<Session>> sessions_;
  std::vector<std::vector<uint64_t>> slots_;  // by rank: of the last run, by unit
  std::vector<std::vector<uint16_t>> gradients_;
  double norm_ = 0;
};

// --- The comparisons ----------------------------------------------------------------------------

struct Shape {
  uint32_t ranks;
  uint64_t elements;
  int rounds;  // sums of a peer in one run of a side
};

double Speed(const Shape& shape, std::vector<double> seconds) {
  return static_cast<double>(shape.ranks * shape.elements * sizeof(uint16_t)) /
         bench::Median(std::move(seconds)) / 1e9;
}

std::string Name(const Shape& shape) {
  return absl::StrCat("reduce-scatter, ", shape.ranks, " ranks");
}

// Reads memory that nobody else uses, so that what was written before, by a step for example,
// leaves the caches at nobody's expense.
void EmptyCaches() {
  static const std::vector<uint64_t> memory(uint64_t{32} << 20, 1);
  uint64_t sum = 0;
  for (const uint64_t word : memory) sum += word;
  ZS_CHECK(sum == memory.size(), "memory does not hold what was written");
}

// `peer` returns the seconds of some sums.
void Compare(bench::Bench& bench, const Shape& shape, OurRanks& ours, const std::string& vs,
             bench::Target target, const std::function<std::vector<double>()>& peer) {
  bench.Compare(
      {{Name(shape), vs, "GB/s", target}},
      [&] {
        EmptyCaches();
        return std::vector<double>{Speed(shape, ours.Run(0.0))};
      },
      [&] {
        EmptyCaches();
        return std::vector<double>{Speed(shape, peer())};
      });
}

void AgainstStream(bench::Bench& bench, const Shape& shape, OurRanks& ours) {
  bench::ReduceStream stream(shape.ranks, shape.elements, kUnits);
  Compare(bench, shape, ours, "memory stream", bench::AtLeast(0.70), [&] { return stream.Run(); });
}

// The seconds of one sum of all ranks.
double RunGloo(RankThreads& threads, GlooRanks& gloo) {
  return threads.Run([&](uint32_t rank) { Must(gloo.Run(rank)); });
}

bool IsCorrect(const Shape& shape, const GlooRanks& gloo) {
  const uint64_t part = shape.elements / shape.ranks;
  for (uint32_t rank = 0; rank < shape.ranks; ++rank) {
    for (uint64_t i = 0; i < part; ++i) {
      const float sum = Mean(shape.ranks, rank * part + i) * static_cast<float>(shape.ranks);
      if (gloo.Result(rank, i) != sum) return false;
    }
  }
  return true;
}

void AgainstGloo(bench::Bench& bench, const Shape& shape, OurRanks& ours) {
  RankThreads threads(shape.ranks);
  std::unique_ptr<GlooRanks> best;
  GlooSum best_sum = kGlooSums[0];
  double best_seconds = 0;
  for (const GlooSum sum : kGlooSums) {
    std::unique_ptr<GlooRanks> gloo = Must(GlooRanks::Create(shape.ranks, shape.elements, sum));
    gloo->Fill(Gradient);
    RunGloo(threads, *gloo);
    if (!IsCorrect(shape, *gloo)) {
      // Its reduce-scatter sends from buffers that it is already overwriting, now and then.
      std::cerr << "reduce: left out: " << GlooSumName(sum) << " of native Gloo was wrong\n";
      continue;
    }
    double seconds = RunGloo(threads, *gloo);
    for (int i = 0; i < 2; ++i) seconds = std::min(seconds, RunGloo(threads, *gloo));
    if (best != nullptr && best_seconds <= seconds) continue;
    best = std::move(gloo);
    best_sum = sum;
    best_seconds = seconds;
  }
  bench.Require(best != nullptr, "native Gloo sums wrongly");
  if (best == nullptr) return;
  Compare(bench, shape, ours, "native Gloo, " + GlooSumName(best_sum), bench::AtLeast(1.5), [&] {
    std::vector<double> seconds;
    for (int i = 0; i < shape.rounds; ++i) seconds.push_back(RunGloo(threads, *best));
    return seconds;
  });
}

void AgainstTorch(bench::Bench& bench, const Shape& shape, OurRanks& ours,
                  const std::string& python) {
  auto torch = bench::TorchRanks::Start(python, shape.ranks, shape.elements);
  bench.Require(torch.ok(), std::string(torch.status().message()));
  if (!torch.ok()) return;
  Compare(bench, shape, ours, "torch Gloo, " + (*torch)->way(), bench::AtLeast(3.0), [&] {
    std::vector<double> seconds = (*torch)->Run(shape.rounds);
    ZS_CHECK(!seconds.empty(), "PyTorch's ranks are gone");
    return seconds;
  });
}

int Main(int argc, char** argv) {
  bench::Bench bench("reduce", argc, argv);
  auto daemon = bench::DaemonProcess::Start(argv[0], {"cpu:0"});
  if (!daemon.ok()) {
    std::cerr << "reduce: " << daemon.status() << std::endl;
    return 2;
  }
  const auto python = bench::TorchRanks::Python();
  if (!python.ok()) std::cerr << "reduce: torch Gloo skipped: " << python.status() << std::endl;
  for (const uint32_t ranks : {2, 4}) {
    const Shape shape{ranks, bench.Size(uint64_t{32} << 20, uint64_t{256} << 10), bench.Size(2, 1)};
    OurRanks ours((*daemon)->socket(), ranks, shape.elements);
    ours.Run(1.0);
    bench.Require(ours.Correct(), absl::StrCat("the sum of ", ranks, " ranks is wrong"));
    AgainstStream(bench, shape, ours);
    AgainstGloo(bench, shape, ours);
    if (python.ok()) AgainstTorch(bench, shape, ours, *python);
  }
  return bench.Finish();
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) { return zeroshard::Main(argc, argv); }
