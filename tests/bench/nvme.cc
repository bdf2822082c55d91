// B2: an AdamW step over states on the NVMe tier.
//
//   transfers   bytes a second of whole steps (begin, pass, seal, commit) against fio, which moves
//               as many bytes with the same block, depth and layout of the file
//   overlap     a step against the longer one of its transfers alone (the tier's own queue moving
//               the same images, without checksums or work) and its computation alone (checksums of
//               what was read, update, checksums of what is written, over staging buffers that are
//               in memory)
//
// fp32 master and states, 12 bytes read and written a parameter, fp32 gradients and bf16 parameters
// in memory, checksums and slot table on, two lanes. Sampled chunks are also updated in memory, and
// must have the same bits in the end. Option: --images=N, how many chunks there are.
#include <algorithm>
#include <cstring>
#include <iostream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/dtype.h"
#include "base/strings.h"
#include "storage/chunk_image.h"
#include "tests/bench/fio.h"
#include "tests/bench/nvme_bed.h"
#include "tests/bench/paired.h"
#include "worker/optim/kernels.h"

namespace zeroshard::bench {
namespace {

constexpr double kGiB = 1 << 30;
constexpr uint32_t kSamples = 16;
const Hyperparameters kHyperparameters = {.lr = 1e-3, .weight_decay = 0.1};

void MustBeOk(const absl::Status& status) { ZS_CHECK(status.ok(), Std(status.message())); }

class Job {
 public:
  Job(const DriveDirectory& directory, uint64_t elements)
      : bed_(directory, {.elements = elements}), gradients_(elements), parameters_(elements) {
    bed_.pool().ParallelFor(bed_.images(), [&](size_t chunk, int) { FillGradients(chunk); });
    FillStates();
    for (uint32_t i = 0; i < kSamples && i < bed_.images(); ++i) {
      const uint32_t image = i * bed_.images() / std::min(kSamples, bed_.images());
      samples_[image].resize(bed_.image_bytes());
      InitialStates(image, samples_[image].data());
    }
    FillStaging();
  }

  NvmeBed& bed() { return bed_; }

  // One step of the tier.
  void Step() {
    const UpdateArgs args = MakeUpdateArgs(kHyperparameters, static_cast<int64_t>(++step_));
    NvmeTier& tier = bed_.tier();
    MustBeOk(tier.Begin(step_, step_));
    MustBeOk(tier.Run(step_items_, [&](const TierItem& item, const TierBuffers& buffers) {
      Update(item.read, buffers.read, args);
      return absl::OkStatus();
    }));
    MustBeOk(tier.Seal(""));
    MustBeOk(tier.Commit(step_));
  }

  // What a step computes, over staging buffers in memory.
  void Compute() {
    const UpdateArgs args = MakeUpdateArgs(kHyperparameters, 100);
    const ChunkShape& shape = bed_.plan().shape(0);
    for (uint32_t begin = 0; begin < bed_.images(); begin += staged_.size()) {
      const size_t count = std::min<size_t>(staged_.size(), bed_.images() - begin);
      bed_.pool().ParallelFor(count, [&](size_t i, int) {
        Staged& staged = staged_[i];
        MustBeOk(VerifyChunkImage(staged.memory->bytes(), shape, {{}, staged.checksum}, "memory"));
        Update(static_cast<uint32_t>(begin + i), staged.memory->data(), args);
        staged.checksum = EncodeChunkImage(staged.memory->bytes(), shape, {});
      });
    }
  }

  // Compares the sampled chunks with an update in memory: an empty string, or what is wrong.
  std::string Check() {
    std::vector<TierItem> items;
    for (auto& [image, states] : samples_) {
      for (uint64_t step = 1; step <= step_; ++step) {
        Update(image, states.data(), MakeUpdateArgs(kHyperparameters, static_cast<int64_t>(step)));
      }
      items.push_back({.read = image});
    }
    std::vector<std::string> wrong(bed_.images());
    MustBeOk(bed_.tier().Run(items, [&](const TierItem& item, const TierBuffers& buffers) {
      const ChunkShape& shape = bed_.plan().shape(item.read);
      const std::byte* expected = samples_.at(item.read).data() + kImageHeaderBytes;
      if (std::memcmp(buffers.read + kImageHeaderBytes, expected, shape.payload_bytes()) != 0) {
        wrong[item.read] = absl::StrCat("chunk ", item.read, " differs from an update in memory");
      }
      return absl::OkStatus();
    }));
    for (const std::string& what : wrong) {
      if (!what.empty()) return what;
    }
    return step_ > 0 ? "" : "no step was made";
  }

 private:
  struct Staged {
    std::optional<AlignedBuffer> memory;
    uint64_t checksum = 0;
  };

  float* Array(std::byte* image, size_t index) const {
    return reinterpret_cast<float*>(image + bed_.plan().shape(0).offset(index));
  }

  void FillGradients(size_t chunk) {
    uint32_t bits = static_cast<uint32_t>(chunk) * 747796405u + 1;
    for (uint64_t i = chunk * kBedChunk; i < (chunk + 1) * kBedChunk; ++i) {
      bits = bits * 1664525u + 1013904223u;
      gradients_[i] = (static_cast<float>(bits >> 8) * 0x1p-23f - 1.0f) * 0.01f;
    }
  }

  void InitialStates(uint32_t chunk, std::byte* image) const {
    std::memset(image, 0, bed_.image_bytes());
    float* master = Array(image, 0);
    for (uint64_t i = 0; i < kBedChunk; ++i) {
      master[i] = Bf16ToFloat(FloatToBf16(gradients_[chunk * kBedChunk + i] * 7.0f));
    }
  }

  void FillStates() {
    std::vector<TierItem> items;
    for (uint32_t image = 0; image < bed_.images(); ++image) {
      items.push_back({.write = image});
      step_items_.push_back({.read = image, .rewrite = true});
    }
    MustBeOk(bed_.tier().Begin(0, 0));
    MustBeOk(bed_.tier().Run(items, [&](const TierItem& item, const TierBuffers& buffers) {
      InitialStates(item.write, buffers.write);
      return absl::OkStatus();
    }));
  }

  void FillStaging() {
    staged_.resize(std::min(bed_.staging_buffers(), bed_.images()));
    for (uint32_t i = 0; i < staged_.size(); ++i) {
      auto memory = AlignedBuffer::Make(bed_.image_bytes());
      MustBeOk(memory.status());
      staged_[i].memory.emplace(*std::move(memory));
      InitialStates(i, staged_[i].memory->data());
      staged_[i].checksum = EncodeChunkImage(staged_[i].memory->bytes(), bed_.plan().shape(0), {});
    }
  }

  void Update(uint32_t chunk, std::byte* image, const UpdateArgs& args) {
    const UpdateSegment segment = {.begin = 0, .end = kBedChunk};
    UpdatePass pass;
    pass.arrays.grad = gradients_.data() + chunk * kBedChunk;
    pass.arrays.master = MasterKind::kFloat32Canonical;
    pass.arrays.param = Array(image, 0);
    pass.arrays.state[0] = Array(image, 1);
    pass.arrays.state[1] = Array(image, 2);
    pass.arrays.out = parameters_.data() + chunk * kBedChunk;
    pass.arrays.out_dtype = DType::kBfloat16;
    pass.segments = absl::MakeConstSpan(&segment, 1);
    pass.args = absl::MakeConstSpan(&args, 1);
    ApplyUpdate(pass, 0, kBedChunk);
  }

  NvmeBed bed_;
  std::vector<float> gradients_;
  std::vector<uint16_t> parameters_;
  std::vector<TierItem> step_items_;
  std::map<uint32_t, std::vector<std::byte>> samples_;
  std::vector<Staged> staged_;
  uint64_t step_ = 0;
};

void CompareWithFio(Bench& bench, Job& job, const Fio& fio) {
  NvmeBed& bed = job.bed();
  const double bytes = 2 * static_cast<double>(bed.pass_bytes());
  const auto run_fio = [&] {
    const absl::StatusOr<FioResult> result = fio.Run(bed.file(), {.mixed = true,
                                                                  .offset = bed.NextSlots().read,
                                                                  .block = bed.image_bytes(),
                                                                  .count = bed.images(),
                                                                  .depth = 2 * bed.depth()});
    MustBeOk(result.status());
    return std::vector<double>{result->gb_per_second, result->cpu_seconds_gib};
  };
  const auto measure = [&](auto work) {
    const Spent spent = Measure(work);
    return std::vector<double>{bytes / spent.wall / 1e9, spent.cpu / (bytes / kGiB)};
  };
  const std::string vs =
      absl::StrCat(fio.version(), ", half of it writes, depth ", 2 * bed.depth());
  bench.Compare(
      {{"step", vs, "GB/s", AtLeast(0.92)}, {"step, processor time", vs, "s/GiB"}},
      [&] { return measure([&] { job.Step(); }); }, run_fio);
  bench.Compare(
      {{"its transfers alone", vs, "GB/s"}, {"its transfers alone, processor time", vs, "s/GiB"}},
      [&] { return measure([&] { bed.Transfer(/*write=*/true); }); }, run_fio);
}

void CompareWithParts(Bench& bench, Job& job) {
  double transfers = 0, computation = 0;
  bench.Compare(
      {{"step", "the longer of transfers and computation alone", "s", AtMost(1.06)},
       {"step, processor time", "both alone", "s"}},
      [&] {
        const Spent step = Measure([&] { job.Step(); });
        return std::vector<double>{step.wall, step.cpu};
      },
      [&] {
        const Spent io = Measure([&] { job.bed().Transfer(/*write=*/true); });
        const Spent compute = Measure([&] { job.Compute(); });
        transfers = io.wall;
        computation = compute.wall;
        return std::vector<double>{std::max(io.wall, compute.wall), io.cpu + compute.cpu};
      });
  bench.Absolute({"transfers alone, last", "", "s"}, transfers);
  bench.Absolute({"computation alone, last", "", "s"}, computation);
}

uint64_t Images(const Bench& bench, int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.rfind("--images=", 0) == 0) return std::stoull(argument.substr(9));
  }
  return bench.Size<uint64_t>(2816, 128);
}

int Main(int argc, char** argv) {
  Bench bench("nvme", argc, argv);
  const auto directory = DriveDirectory::Make();
  if (!directory.ok()) {
    std::cerr << "nvme: " << directory.status() << std::endl;
    return 2;
  }
  Job job(**directory, Images(bench, argc, argv) * kBedChunk);
  std::cerr << "nvme: " << job.bed().pass_bytes() << " bytes of images; "
            << job.bed().tier().description() << std::endl;
  const absl::StatusOr<Fio> fio = Fio::Find();
  if (fio.ok()) {
    CompareWithFio(bench, job, *fio);
  } else {
    std::cout << R"({"bench": "nvme", "skipped": ")" << fio.status().message() << "\"}"
              << std::endl;
  }
  CompareWithParts(bench, job);
  const std::string wrong = job.Check();
  bench.Require(wrong.empty(), wrong);
  return std::max(bench.Finish(), fio.ok() || bench.smoke() ? 0 : 2);
}

}  // namespace
}  // namespace zeroshard::bench

int main(int argc, char** argv) { return zeroshard::bench::Main(argc, argv); }
