#include "tests/transport/gloo_ranks.h"

#include <gloo/algorithm.h>
#include <gloo/allreduce.h>
#include <gloo/reduce_scatter.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/hash_store.h>
#include <gloo/transport/tcp/device.h>

#include <chrono>
#include <exception>
#include <thread>
#include <vector>

#include "base/dtype.h"

namespace zeroshard {
namespace {

constexpr std::chrono::seconds kTimeout{60};

bool IsBf16(GlooSum sum) {
  return sum == GlooSum::kReduceScatterBf16 || sum == GlooSum::kAllreduceBf16;
}
bool IsReduceScatter(GlooSum sum) {
  return sum == GlooSum::kReduceScatterBf16 || sum == GlooSum::kReduceScatterFloat;
}

#define ZS_VECTORISED __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))

ZS_VECTORISED void SumBf16(uint16_t* out, const uint16_t* a, const uint16_t* b, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const float sum = __builtin_bit_cast(float, static_cast<uint32_t>(a[i]) << 16) +
                      __builtin_bit_cast(float, static_cast<uint32_t>(b[i]) << 16);
    const auto bits = __builtin_bit_cast(uint32_t, sum);
    out[i] = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
}

ZS_VECTORISED void SumFloat(float* out, const float* a, const float* b, size_t count) {
  for (size_t i = 0; i < count; ++i) out[i] = a[i] + b[i];
}

// Gloo's own type of 2 bytes carries bf16.
using Half = gloo::float16;

void SumHalves(Half* a, const Half* b, size_t count) {
  auto* out = reinterpret_cast<uint16_t*>(a);
  SumBf16(out, out, reinterpret_cast<const uint16_t*>(b), count);
}
void SumFloats(float* a, const float* b, size_t count) { SumFloat(a, a, b, count); }

const gloo::ReductionFunction<Half> kSumHalves(gloo::CUSTOM, SumHalves);
const gloo::ReductionFunction<float> kSumFloats(gloo::CUSTOM, SumFloats);

}  // namespace

std::string GlooSumName(GlooSum sum) {
  return std::string(IsReduceScatter(sum) ? "reduce-scatter" : "allreduce") +
         (IsBf16(sum) ? " bf16" : " fp32");
}

struct GlooRanks::Rank {
  std::shared_ptr<gloo::Context> context;
  std::vector<uint16_t> halves;
  std::vector<float> floats;
  std::unique_ptr<gloo::Algorithm> reduce_scatter;
  absl::Status status;

  void Connect(uint32_t rank, uint32_t count, gloo::rendezvous::Store& store) {
    gloo::transport::tcp::attr attr("127.0.0.1");
    auto rendezvous = std::make_shared<gloo::rendezvous::Context>(static_cast<int>(rank),
                                                                  static_cast<int>(count));
    rendezvous->setTimeout(kTimeout);
    std::shared_ptr<gloo::transport::Device> device = gloo::transport::tcp::CreateDevice(attr);
    rendezvous->connectFullMesh(store, device);
    context = std::move(rendezvous);
  }

  void Prepare(uint64_t elements, GlooSum sum) {
    if (IsBf16(sum)) {
      halves.resize(elements);
    } else {
      floats.resize(elements);
    }
    if (!IsReduceScatter(sum)) return;
    const std::vector<int> parts(context->size, static_cast<int>(elements / context->size));
    if (IsBf16(sum)) {
      reduce_scatter = std::make_unique<gloo::ReduceScatterHalvingDoubling<Half>>(
          context, std::vector<Half*>{reinterpret_cast<Half*>(halves.data())},
          static_cast<int>(elements), parts, &kSumHalves);
    } else {
      reduce_scatter = std::make_unique<gloo::ReduceScatterHalvingDoubling<float>>(
          context, std::vector<float*>{floats.data()}, static_cast<int>(elements), parts,
          &kSumFloats);
    }
  }

  void Allreduce() {
    gloo::AllreduceOptions options(context);
    if (halves.empty()) {
      options.setOutput(floats.data(), floats.size());
      options.setReduceFunction([](void* out, const void* a, const void* b, size_t count) {
        SumFloat(static_cast<float*>(out), static_cast<const float*>(a),
                 static_cast<const float*>(b), count);
      });
    } else {
      options.setOutput(halves.data(), halves.size());
      options.setReduceFunction([](void* out, const void* a, const void* b, size_t count) {
        SumBf16(static_cast<uint16_t*>(out), static_cast<const uint16_t*>(a),
                static_cast<const uint16_t*>(b), count);
      });
    }
    gloo::allreduce(options);
  }

  template <typename Work>
  void Try(const Work& work) {
    try {
      work();
    } catch (const std::exception& error) {
      status = absl::UnavailableError(error.what());
    }
  }
};

GlooRanks::GlooRanks() = default;
GlooRanks::~GlooRanks() = default;

absl::StatusOr<std::unique_ptr<GlooRanks>> GlooRanks::Create(uint32_t ranks, uint64_t elements,
                                                             GlooSum sum) {
  std::unique_ptr<GlooRanks> all(new GlooRanks());
  all->elements_ = elements;
  all->sum_ = sum;
  all->count_ = ranks;
  all->ranks_ = std::make_unique<Rank[]>(ranks);
  gloo::rendezvous::HashStore store;
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      all->ranks_[rank].Try([&] {
        all->ranks_[rank].Connect(rank, ranks, store);
        all->ranks_[rank].Prepare(elements, sum);
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    if (!all->ranks_[rank].status.ok()) return all->ranks_[rank].status;
  }
  return all;
}

void GlooRanks::Fill(const std::function<float(uint32_t rank, uint64_t element)>& value) {
  for (uint32_t rank = 0; rank < count_; ++rank) {
    for (uint64_t i = 0; i < elements_; ++i) {
      if (IsBf16(sum_)) {
        ranks_[rank].halves[i] = FloatToBf16(value(rank, i));
      } else {
        ranks_[rank].floats[i] = value(rank, i);
      }
    }
  }
}

absl::Status GlooRanks::Run(uint32_t rank) {
  Rank& self = ranks_[rank];
  self.Try([&] {
    if (self.reduce_scatter != nullptr) {
      self.reduce_scatter->run();
    } else {
      self.Allreduce();
    }
  });
  return self.status;
}

float GlooRanks::Result(uint32_t rank, uint64_t element_of_part) const {
  // A reduce-scatter leaves a rank's part at the start of its buffer.
  const uint64_t at = element_of_part + (IsReduceScatter(sum_) ? 0 : rank * (elements_ / count_));
  return IsBf16(sum_) ? Bf16ToFloat(ranks_[rank].halves[at]) : ranks_[rank].floats[at];
}

}  // namespace zeroshard
