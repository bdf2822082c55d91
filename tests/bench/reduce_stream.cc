#include "tests/bench/reduce_stream.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace zeroshard::bench {
namespace {

constexpr int kThreads = 2;

struct Pass {
  const uint16_t* inputs[4];
  uint32_t ranks;
  float* output;
};

// 16 elements at a time with the widest registers: one line a store.
__attribute__((target("avx512f"))) void Wide(const Pass& pass, uint64_t begin, uint64_t end,
                                             bool around) {
  typedef short Halves __attribute__((vector_size(32), aligned(2)));
  typedef int Words __attribute__((vector_size(64)));
  typedef float Line __attribute__((vector_size(64)));
  for (uint64_t i = begin; i < end; i += 16) {
    Line sum = {};
    for (uint32_t rank = 0; rank < pass.ranks; ++rank) {
      const Halves halves = *reinterpret_cast<const Halves*>(pass.inputs[rank] + i);
      const Words words = __builtin_ia32_pmovzxwd512_mask(halves, Words{}, 0xffff);
      sum += (Line)(words << 16);
    }
    if (around) {
      __builtin_ia32_movntps512(pass.output + i, sum);
    } else {
      *reinterpret_cast<Line*>(pass.output + i) = sum;
    }
  }
}

void Narrow(const Pass& pass, uint64_t begin, uint64_t end, bool around) {
  for (uint64_t i = begin; i < end; i += 8) {
    __m128 low = _mm_setzero_ps();
    __m128 high = _mm_setzero_ps();
    for (uint32_t rank = 0; rank < pass.ranks; ++rank) {
      const __m128i halves =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(pass.inputs[rank] + i));
      const __m128i zero = _mm_setzero_si128();
      low = _mm_add_ps(low, _mm_castsi128_ps(_mm_unpacklo_epi16(zero, halves)));
      high = _mm_add_ps(high, _mm_castsi128_ps(_mm_unpackhi_epi16(zero, halves)));
    }
    if (around) {
      _mm_stream_ps(pass.output + i, low);
      _mm_stream_ps(pass.output + i + 4, high);
    } else {
      _mm_store_ps(pass.output + i, low);
      _mm_store_ps(pass.output + i + 4, high);
    }
  }
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

ReduceStream::ReduceStream(uint32_t ranks, uint64_t elements)
    : elements_(elements), output_(File(elements * sizeof(float))), threads_(kThreads) {
  ZS_CHECK(ranks <= 4 && elements % (16 * kThreads) == 0, "a stream of this shape is not made");
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    inputs_.push_back(File(elements * sizeof(uint16_t)));
  }
}

double ReduceStream::Run(bool around) {
  Pass pass = {};
  for (const MappedRegion& input : inputs_) {
    pass.inputs[pass.ranks++] = reinterpret_cast<const uint16_t*>(input.data());
  }
  pass.output = reinterpret_cast<float*>(output_.data());
  const uint64_t part = elements_ / kThreads;
  const bool wide = __builtin_cpu_supports("avx512f") != 0;
  return threads_.Run([&](uint32_t thread) {
    (wide ? Wide : Narrow)(pass, thread * part, (thread + 1) * part, around);
    _mm_sfence();
  });
}

void ReduceStream::Choose() {
  double best[2] = {1e9, 1e9};
  for (int i = 0; i < 10; ++i) best[i % 2] = std::min(best[i % 2], Run(i % 2 == 1));
  around_ = best[1] < best[0];
}

}  // namespace zeroshard::bench
