// Gathers of parameters that rest on the NVMe tier, against fio reading as many bytes with the same
// block, depth and layout of the file.
//
//   tier    images of a unit read by a worker's tier, verified and copied to memory that was
//   touched
//           before, on two lanes
//   cold    a gather of a unit over a running daemon, from the call until Wait returns, into memory
//           that an earlier gather took and that holds nothing of use any more: as after each step,
//           for units that stage3_max_live_parameters leaves in the window
//   given back
//           the same when the window was given back before, so that its pages are taken from the
//           kernel again: as for all other units
//   warm    the same when the unit was gathered ahead of need
//
// Checksums are on; staging is empty at the start. What was gathered is compared with what was put.
#include <cstring>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/check.h"
#include "base/dtype.h"
#include "base/strings.h"
#include "client/session.h"
#include "device/cpu/stream_copy.h"
#include "tests/bench/daemon_process.h"
#include "tests/bench/fio.h"
#include "tests/bench/nvme_bed.h"
#include "tests/bench/paired.h"

namespace zeroshard::bench {
namespace {

constexpr double kGiB = 1 << 30;
constexpr uint32_t kUnits[] = {0};

void MustBeOk(const absl::Status& status) { ZS_CHECK(status.ok(), Std(status.message())); }

uint16_t Value(uint64_t element) {
  return static_cast<uint16_t>(element * 40503u + (element >> 16));
}

void FillValues(uint64_t begin, uint64_t elements, std::byte* out) {
  for (uint64_t i = 0; i < elements; ++i) {
    const uint16_t value = Value(begin + i);
    std::memcpy(out + 2 * i, &value, 2);
  }
}

bool HasValues(const std::byte* bytes, uint64_t elements) {
  for (uint64_t i = 0; i < elements; ++i) {
    const uint16_t value = Value(i);
    if (std::memcmp(bytes + 2 * i, &value, 2) != 0) return false;
  }
  return true;
}

std::vector<double> RunFio(const Fio& fio, NvmeBed& bed) {
  const absl::StatusOr<FioResult> result = fio.Run(bed.file(), {.offset = bed.NextSlots().read,
                                                                .block = bed.image_bytes(),
                                                                .count = bed.images(),
                                                                .depth = 2 * bed.depth()});
  MustBeOk(result.status());
  return {result->gb_per_second, result->cpu_seconds_gib};
}

std::string FioName(const Fio& fio, const NvmeBed& bed) {
  return absl::StrCat(fio.version(), ", reads, depth ", 2 * bed.depth());
}

// A worker's tier by itself.
class TierGather {
 public:
  TierGather(NvmeBed& bed, uint64_t elements) : bed_(bed), window_(2 * elements) {
    std::vector<TierItem> writes;
    for (uint32_t i = 0; i < bed_.images(); ++i) {
      writes.push_back({.write = bed_.first() + i});
      reads_.push_back({.read = bed_.first() + i});
    }
    MustBeOk(bed_.tier().Begin(0, 0));
    MustBeOk(bed_.tier().Run(writes, [&](const TierItem& item, const TierBuffers& buffers) {
      FillValues(bed_.plan().images()[item.write].begin, kBedChunk,
                 buffers.write + bed_.plan().shape(item.write).offset(0));
      return absl::OkStatus();
    }));
  }

  void Run() {
    MustBeOk(bed_.tier().Run(reads_, [&](const TierItem& item, const TierBuffers& buffers) {
      StreamCopy(window_.data() + 2 * bed_.plan().images()[item.read].begin,
                 buffers.read + bed_.plan().shape(item.read).offset(0), 2 * kBedChunk);
      return absl::OkStatus();
    }));
  }

  bool Correct() const { return HasValues(window_.data(), window_.size() / 2); }

 private:
  NvmeBed& bed_;
  std::vector<std::byte> window_;
  std::vector<TierItem> reads_;
};

void CompareTier(Bench& bench, NvmeBed& bed, const Fio* fio, uint64_t elements) {
  TierGather gather(bed, elements);
  const double bytes = static_cast<double>(bed.pass_bytes());
  const auto run = [&] {
    const Spent spent = Measure([&] { gather.Run(); });
    return std::vector<double>{bytes / spent.wall / 1e9, spent.cpu / (bytes / kGiB)};
  };
  if (fio == nullptr) {
    run();
  } else {
    const std::string vs = FioName(*fio, bed);
    bench.Compare({{"tier", vs, "GB/s", AtLeast(0.92)}, {"tier, processor time", vs, "s/GiB"}}, run,
                  [&] { return RunFio(*fio, bed); });
    bench.Compare(
        {{"its transfers alone", vs, "GB/s"}},
        [&] {
          const Spent spent = Measure([&] { bed.Transfer(/*write=*/false); });
          return std::vector<double>{bytes / spent.wall / 1e9};
        },
        [&] { return std::vector<double>{RunFio(*fio, bed)[0]}; });
  }
  bench.Require(gather.Correct(), "the tier gave other bytes than were written");
}

// A frozen bf16 parameter whose shard rests in `directory`.
absl::StatusOr<std::unique_ptr<Session>> Attach(const std::string& socket,
                                                const std::string& directory, uint64_t elements,
                                                bool kept) {
  AttachOptions options;
  options.socket = socket;
  options.job = absl::StrCat("bench-nvme-gather", kept ? "-kept" : "");
  options.parameters.resize(1);
  ParameterSpec& parameter = options.parameters[0];
  parameter.name = "weight";
  parameter.shape = {elements};
  parameter.dtype = DType::kBfloat16;
  parameter.trainable = false;
  options.groups.resize(1);
  options.ds_config =
      absl::StrCat(R"({"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3,)",
                   R"( "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": )",
                   kept ? elements : 0, R"(, "offload_param": {"device": "nvme", "nvme_path": ")",
                   directory, R"(", "max_in_cpu": 0}}})");
  options.forward_only = true;
  return Session::Attach(std::move(options));
}

// The values of the elements before `end`.
absl::Status PutValues(Session& session, uint64_t end) {
  const uint64_t elements = session.layout().units()[0].elements();
  constexpr uint64_t kPiece = uint64_t{1} << 19;
  for (uint64_t at = 0; at < end; at += kPiece) {
    const uint64_t piece = std::min(kPiece, end - at);
    const auto slot = session.AcquireSlot(piece * 2);
    if (!slot.ok()) return slot.status();
    FillValues(at, piece, session.gradient_window().data() + *slot);
    const auto put = session.Put({.unit = 0,
                                  .element_offset = at,
                                  .elements = piece,
                                  .window_offset = *slot,
                                  .last = at + piece == elements});
    if (!put.ok()) return put.status();
    if (absl::Status done = session.Wait(*put); !done.ok()) return done;
  }
  return absl::OkStatus();
}

template <typename Request>
void Finish(Session& session, const Request& request) {
  MustBeOk(request.status());
  MustBeOk(session.Wait(*request));
}

// Seconds of a gather of the unit; it is given back afterwards.
double TimeGather(Session& session) {
  const absl::Time start = absl::Now();
  Finish(session, session.Gather(kUnits));
  const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
  Finish(session, session.Release(kUnits));
  return seconds;
}

// `kept`: the memory of the window stays when the unit is released.
void CompareDaemon(Bench& bench, NvmeBed& bed, const Fio* fio, Session& session, bool kept) {
  const Unit& unit = session.layout().units()[0];
  MustBeOk(PutValues(session, unit.elements()));
  Finish(session, session.Gather(kUnits));
  bench.Require(HasValues(session.parameter_window().data() + unit.window_offset, unit.elements()),
                "a gather gave other bytes than were put");
  Finish(session, session.Release(kUnits));
  const double bytes = static_cast<double>(bed.pass_bytes());
  if (fio != nullptr) {
    Figure figure{"cold gather", FioName(*fio, bed), "GB/s", AtLeast(0.92)};
    if (!kept) figure = {"cold gather, window given back", FioName(*fio, bed), "GB/s"};
    bench.Compare(
        {figure},
        [&] {
          // What the window holds is old from now on.
          if (kept) MustBeOk(PutValues(session, kGrainElements));
          return std::vector<double>{bytes / TimeGather(session) / 1e9};
        },
        [&] { return std::vector<double>{RunFio(*fio, bed)[0]}; });
  }
  if (kept) return;
  std::vector<double> warm;
  for (int i = 0; i < bench.Size(40, 2); ++i) {
    Finish(session, session.Gather(kUnits, {.prefetch = true}));
    warm.push_back(TimeGather(session) * 1e6);
  }
  bench.Absolute({"warm gather p50", "", "us", AtMost(100)}, Percentile(warm, 0.50));
  bench.Absolute({"warm gather p99", "", "us"}, Percentile(warm, 0.99));
}

int Main(int argc, char** argv) {
  Bench bench("nvme_gather", argc, argv);
  const auto directory = DriveDirectory::Make();
  const auto daemon = DaemonProcess::Start(argv[0], {"cpu:0"});
  if (!directory.ok() || !daemon.ok()) {
    std::cerr << "nvme_gather: " << directory.status() << " " << daemon.status() << std::endl;
    return 2;
  }
  const uint64_t elements = bench.Size<uint64_t>(4096, 64) * kBedChunk;
  NvmeBed bed(**directory, {.elements = elements, .parameters = true});
  const absl::StatusOr<Fio> fio = Fio::Find();
  if (!fio.ok()) {
    std::cout << R"({"bench": "nvme_gather", "skipped": ")" << fio.status().message() << "\"}"
              << std::endl;
  }
  CompareTier(bench, bed, fio.ok() ? &*fio : nullptr, elements);
  const std::string path = (*directory)->path() + "/daemon";
  std::filesystem::create_directory(path);
  for (const bool kept : {true, false}) {
    auto session = Attach((*daemon)->socket(), path, elements, kept);
    bench.Require(session.ok(), absl::StrCat("attach: ", session.status().ToString()));
    if (!session.ok()) continue;
    CompareDaemon(bench, bed, fio.ok() ? &*fio : nullptr, **session, kept);
    bench.Require((*session)->Detach().ok(), "the rank could not leave");
  }
  return std::max(bench.Finish(), fio.ok() || bench.smoke() ? 0 : 2);
}

}  // namespace
}  // namespace zeroshard::bench

int main(int argc, char** argv) { return zeroshard::bench::Main(argc, argv); }
