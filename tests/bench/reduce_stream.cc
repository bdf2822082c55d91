#include "tests/bench/reduce_stream.h"

#include <immintrin.h>

#include <cstring>
#include <numeric>

#include "base/check.h"

namespace zeroshard::bench {
namespace {

constexpr int kThreads = 2;

struct Pass {
  const uint16_t* inputs[4];
  float* output;
};
using Stream = void (*)(const Pass& pass, uint64_t begin, uint64_t end);

// 16 elements at a time with the widest registers: one line a store.
template <int kRanks, bool kAround>
__attribute__((target("avx512f"))) void Wide(const Pass& pass, uint64_t begin, uint64_t end) {
  typedef short Halves __attribute__((vector_size(32), aligned(2)));
  typedef int Words __attribute__((vector_size(64)));
  typedef float Line __attribute__((vector_size(64)));
  const Pass in = pass;
  for (uint64_t i = begin; i < end; i += 16) {
    Line lines[kRanks];
#pragma GCC unroll 4
    for (int rank = 0; rank < kRanks; ++rank) {
      const Halves halves = *reinterpret_cast<const Halves*>(in.inputs[rank] + i);
      const Words words = __builtin_ia32_pmovzxwd512_mask(halves, Words{}, 0xffff);
      lines[rank] = (Line)(words << 16);
    }
    Line sum = lines[0] + lines[1];
    if constexpr (kRanks == 4) sum += lines[2] + lines[3];
    if constexpr (kAround) {
      __builtin_ia32_movntps512(in.output + i, sum);
    } else {
      *reinterpret_cast<Line*>(in.output + i) = sum;
    }
  }
}

template <int kRanks, bool kAround>
void Narrow(const Pass& pass, uint64_t begin, uint64_t end) {
  const Pass in = pass;
  for (uint64_t i = begin; i < end; i += 8) {
    __m128 low = _mm_setzero_ps();
    __m128 high = _mm_setzero_ps();
#pragma GCC unroll 4
    for (int rank = 0; rank < kRanks; ++rank) {
      const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(in.inputs[rank] + i));
      const __m128i zero = _mm_setzero_si128();
      low = _mm_add_ps(low, _mm_castsi128_ps(_mm_unpacklo_epi16(zero, halves)));
      high = _mm_add_ps(high, _mm_castsi128_ps(_mm_unpackhi_epi16(zero, halves)));
    }
    if constexpr (kAround) {
      _mm_stream_ps(in.output + i, low);
      _mm_stream_ps(in.output + i + 4, high);
    } else {
      _mm_store_ps(in.output + i, low);
      _mm_store_ps(in.output + i + 4, high);
    }
  }
}

template <int kRanks>
Stream StreamOf(bool around) {
  if (__builtin_cpu_supports("avx512f") != 0) {
    return around ? Wide<kRanks, true> : Wide<kRanks, false>;
  }
  return around ? Narrow<kRanks, true> : Narrow<kRanks, false>;
}

MappedRegion File(uint64_t bytes) {
  const auto fd = CreateSealedMemfd("zeroshard-bench", bytes);
  ZS_CHECK(fd.ok(), "no memory file");
  auto region = MappedRegion::Map(fd->get(), bytes, Access::kReadWrite);
  ZS_CHECK(region.ok(), "memory file not mapped");
  std::memset(region->data(), 0x3c, bytes);
  return *std::move(region);
}

}  // namespace

ReduceStream::ReduceStream(uint32_t ranks, uint64_t elements, uint32_t units)
    : elements_(elements),
      units_(units),
      output_(File(units * elements * sizeof(float))),
      threads_(kThreads) {
  ZS_CHECK((ranks == 2 || ranks == 4) && elements % (16 * kThreads) == 0,
           "a stream of this shape is not made");
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    inputs_.push_back(File(units * elements * sizeof(uint16_t)));
  }
}

double ReduceStream::RunUnit(uint32_t unit, Store store) {
  Pass pass = {};
  for (size_t i = 0; i < inputs_.size(); ++i) {
    pass.inputs[i] = reinterpret_cast<const uint16_t*>(inputs_[i].data()) + unit * elements_;
  }
  pass.output = reinterpret_cast<float*>(output_.data()) + unit * elements_;
  const bool past = store == Store::kPastCaches;
  const Stream stream = inputs_.size() == 2 ? StreamOf<2>(past) : StreamOf<4>(past);
  const uint64_t part = elements_ / kThreads;
  return threads_.Run([&](uint32_t thread) {
    stream(pass, thread * part, (thread + 1) * part);
    _mm_sfence();
  });
}

std::vector<double> ReduceStream::RunAll(Store store) {
  std::vector<double> seconds;
  for (uint32_t unit = 0; unit < units_; ++unit) seconds.push_back(RunUnit(unit, store));
  return seconds;
}

std::vector<double> ReduceStream::Run() {
  const std::vector<double> plain = RunAll(Store::kPlain);
  const std::vector<double> past = RunAll(Store::kPastCaches);
  return std::accumulate(past.begin(), past.end(), 0.0) <
                 std::accumulate(plain.begin(), plain.end(), 0.0)
             ? past
             : plain;
}

}  // namespace zeroshard::bench
