#include "tests/bench/adamw_job.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/dtype.h"
#include "base/strings.h"
#include "worker/optim/split_master.h"
#include "worker/protected_pass.h"

namespace zeroshard::bench {
namespace {

constexpr uint64_t kChunk = 64 * 1024;
constexpr uint64_t kStreamedElements = 16 << 20;  // 32 MiB of parameters, as in a worker
const Hyperparameters kHyperparameters = {.lr = 1e-3, .weight_decay = 0.1};

template <typename T>
T Must(absl::StatusOr<T> value) {
  ZS_CHECK(value.ok(), Std(value.status().message()));
  return *std::move(value);
}

// The clones differ in width only. `zero` is 0, which the compiler does not know.
#define ZS_STREAM \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), optimize("O3")))

ZS_STREAM void StreamFloat32(const uint16_t* __restrict grad, float* __restrict param,
                             float* __restrict state0, float* __restrict state1,
                             uint16_t* __restrict out, uint64_t begin, uint64_t end, float zero) {
  for (uint64_t i = begin; i < end; ++i) {
    param[i] += zero;
    state0[i] += zero;
    state1[i] += zero;
    out[i] = grad[i];
  }
}

ZS_STREAM void StreamSplit(const uint16_t* __restrict grad, uint16_t* __restrict high,
                           uint16_t* __restrict low, float* __restrict state0,
                           float* __restrict state1, uint64_t begin, uint64_t end, float zero) {
  const auto nothing = static_cast<uint16_t>(zero);
  for (uint64_t i = begin; i < end; ++i) {
    high[i] = static_cast<uint16_t>(high[i] + nothing);
    low[i] = static_cast<uint16_t>(low[i] + (grad[i] & nothing));
    state0[i] += zero;
    state1[i] += zero;
  }
}

float Fp32Ulp(double value) {
  const float magnitude = std::fabs(static_cast<float>(value));
  return std::nextafter(magnitude, INFINITY) - magnitude;
}

}  // namespace

AdamWJob::AdamWJob(MasterKind master, uint64_t elements, int threads, Pages pages)
    : master_(master),
      elements_(elements),
      pages_(pages),
      pool_(Must(ThreadPool::Create({.threads = threads}))) {
  ZS_CHECK(elements_ % kChunk == 0 && elements_ > 0, "elements must be a multiple of 65536");
  arrays_.grad_dtype = DType::kBfloat16;
  arrays_.grad = Allocate("grad", 2 * elements_);
  arrays_.master = master_;
  if (split()) {
    arrays_.high = reinterpret_cast<uint16_t*>(Allocate("high", 2 * elements_));
    arrays_.low = reinterpret_cast<uint16_t*>(Allocate("low", 2 * elements_));
  } else {
    arrays_.param = reinterpret_cast<float*>(Allocate("master", 4 * elements_));
    arrays_.out = Allocate("parameter", 2 * elements_);
    arrays_.out_dtype = DType::kBfloat16;
  }
  for (void*& state : arrays_.state) state = Allocate("state", 4 * elements_);
  chunks_.resize(elements_ / kChunk);
  std::iota(chunks_.begin(), chunks_.end(), 0);
  const auto lanes = static_cast<uint32_t>(threads);
  const auto chunks = static_cast<uint32_t>(chunks_.size());
  const size_t bytes = UndoArea::BytesNeeded(lanes, chunks);
  undo_.push_back(Must(UndoArea::Format(Allocate("undo", bytes), bytes, lanes, chunks)));
  Fill();
}

std::byte* AdamWJob::AllocateHuge(uint64_t bytes) {
  constexpr uint64_t kHugePage = 2 << 20;
  bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  blocks_.emplace_back(static_cast<std::byte*>(std::aligned_alloc(kHugePage, bytes)));
  ZS_CHECK(blocks_.back() != nullptr, "no memory");
  static_cast<void>(::madvise(blocks_.back().get(), bytes, MADV_HUGEPAGE));  // a wish
  std::memset(blocks_.back().get(), 0, bytes);
  return blocks_.back().get();
}

std::byte* AdamWJob::Allocate(const char* name, uint64_t bytes) {
  if (pages_ == Pages::kHuge) return AllocateHuge(bytes);
  const UniqueFd fd = Must(CreateSealedMemfd(name, bytes));
  const absl::Status reserved = Reserve(fd.get(), 0, bytes);
  ZS_CHECK(reserved.ok(), Std(reserved.message()));
  regions_.push_back(Must(MappedRegion::Map(fd.get(), bytes, Access::kReadWrite)));
  return regions_.back().data();
}

void AdamWJob::Fill() {
  auto* grad = static_cast<uint16_t*>(const_cast<void*>(arrays_.grad));
  pool_->ParallelFor(chunks_.size(), [&](size_t chunk, int) {
    uint32_t bits = static_cast<uint32_t>(chunk) * 747796405u + 1;
    for (uint64_t i = chunk * kChunk; i < (chunk + 1) * kChunk; ++i) {
      bits = bits * 1664525u + 1013904223u;
      const float p = (static_cast<float>(bits >> 8) * 0x1p-23f - 1.0f) * 0.1f;
      if (split()) {
        SplitMaster(&p, 1, arrays_.high + i, arrays_.low + i);
      } else {
        arrays_.param[i] = p;
      }
      grad[i] = FloatToBf16(p * 0.01f + 1e-4f);
      static_cast<float*>(arrays_.state[0])[i] = 0.0f;
      static_cast<float*>(arrays_.state[1])[i] = 0.0f;
    }
  });
}

UndoChunk AdamWJob::UndoOf(uint32_t chunk) const {
  UndoChunk undo;
  undo.elements = kChunk;
  const auto add = [&](auto* array) {
    undo.arrays[undo.array_count++] = {reinterpret_cast<std::byte*>(array + chunk * kChunk),
                                       sizeof(*array)};
  };
  if (split()) {
    add(arrays_.high);
    add(arrays_.low);
  } else {
    add(arrays_.param);
  }
  for (void* state : arrays_.state) add(static_cast<float*>(state));
  return undo;
}

void AdamWJob::Update() {
  const UpdateSegment segment = {.begin = 0, .end = elements_};
  const UpdateArgs args = MakeUpdateArgs(kHyperparameters, static_cast<int64_t>(++step_));
  UpdatePass pass;
  pass.arrays = arrays_;
  pass.segments = absl::MakeConstSpan(&segment, 1);
  pass.args = absl::MakeConstSpan(&args, 1);
  pass.stream_output = elements_ >= kStreamedElements;
  const PreparedUpdate update(pass);
  RunProtected(
      ProtectedPass{undo_[0], {.tag = step_}}, chunks_,
      [&](size_t items, auto fn) { pool_->ParallelFor(items, fn); },
      [&](uint32_t chunk) { return UndoOf(chunk); },
      [&](uint32_t chunk, uint64_t begin, uint64_t end) {
        update.Apply(chunk * kChunk + begin, chunk * kChunk + end);
      });
}

void AdamWJob::Stream() {
  static volatile float zero = 0.0f;
  const auto* grad = static_cast<const uint16_t*>(arrays_.grad);
  auto* state0 = static_cast<float*>(arrays_.state[0]);
  auto* state1 = static_cast<float*>(arrays_.state[1]);
  pool_->ParallelFor(chunks_.size(), [&](size_t chunk, int) {
    const uint64_t begin = chunk * kChunk;
    const uint64_t end = begin + kChunk;
    if (split()) {
      StreamSplit(grad, arrays_.high, arrays_.low, state0, state1, begin, end, zero);
    } else {
      StreamFloat32(grad, arrays_.param, state0, state1, static_cast<uint16_t*>(arrays_.out), begin,
                    end, zero);
    }
  });
}

AdamWJob::Sample AdamWJob::SampleAt(uint64_t element) const {
  float p;
  if (split()) {
    JoinMaster(arrays_.high + element, arrays_.low + element, 1, &p);
  } else {
    p = arrays_.param[element];
  }
  return {.p = p,
          .m = static_cast<const float*>(arrays_.state[0])[element],
          .v = static_cast<const float*>(arrays_.state[1])[element],
          .g = Bf16ToFloat(static_cast<const uint16_t*>(arrays_.grad)[element])};
}

std::string AdamWJob::Check() {
  std::vector<uint64_t> places;
  for (uint64_t chunk = 0; chunk < chunks_.size(); ++chunk) {
    for (uint64_t i = 0; i < 8; ++i) {
      places.push_back(chunk * kChunk + (chunk * 7919 + i * 8191) % kChunk);
    }
  }
  std::vector<Sample> before;
  for (uint64_t place : places) before.push_back(SampleAt(place));
  Update();
  const Hyperparameters& h = kHyperparameters;
  const auto rounded = [](double x) { return double{static_cast<float>(x)}; };
  for (size_t i = 0; i < places.size(); ++i) {
    const Sample& b = before[i];
    const Sample after = SampleAt(places[i]);
    const double m = rounded(h.beta1) * b.m + rounded(1 - h.beta1) * b.g;
    const double v = rounded(h.beta2) * b.v + rounded(1 - h.beta2) * b.g * b.g;
    const double t = static_cast<double>(step_);
    const double p =
        b.p * (1 - h.lr * h.weight_decay) - h.lr * (m / (1 - std::pow(h.beta1, t))) /
                                                (std::sqrt(v / (1 - std::pow(h.beta2, t))) + h.eps);
    // A difference has the error of its terms.
    const double scale = std::max({std::fabs(p), std::fabs(b.p), std::fabs(b.p - p)});
    const double m_scale = std::max({std::fabs(m), std::fabs(b.m), std::fabs(b.g)});
    const uint16_t parameter =
        split() ? arrays_.high[places[i]] : static_cast<uint16_t*>(arrays_.out)[places[i]];
    if (!(std::fabs(after.p - p) <= 4 * Fp32Ulp(scale)) ||
        !(std::fabs(after.m - m) <= 2 * Fp32Ulp(m_scale)) ||
        !(std::fabs(after.v - v) <= 2 * Fp32Ulp(v)) ||
        parameter != FloatToBf16(static_cast<float>(after.p))) {
      return absl::StrCat("element ", places[i], " of step ", step_, ": p ", after.p, " for ", p,
                          ", m ", after.m, " for ", m, ", v ", after.v, " for ", v);
    }
  }
  return "";
}

}  // namespace zeroshard::bench
