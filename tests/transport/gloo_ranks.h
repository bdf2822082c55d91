// GlooRanks: the ranks of a sum over gradients done by Gloo itself, for benchmarks. Every rank is a
// thread of this process with a connection of its own to every other over loopback.
//
// Gloo knows no bf16, so it gets a vectorised sum of bf16 numbers to call; that moves as few bytes
// as possible but rounds after every addition. With fp32 numbers, twice the bytes, it keeps what
// ZeroShard keeps.
#ifndef ZEROSHARD_TESTS_TRANSPORT_GLOO_RANKS_H_
#define ZEROSHARD_TESTS_TRANSPORT_GLOO_RANKS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace zeroshard {

enum class GlooSum { kReduceScatterBf16, kReduceScatterFloat, kAllreduceBf16, kAllreduceFloat };

inline constexpr GlooSum kGlooSums[] = {GlooSum::kReduceScatterBf16, GlooSum::kReduceScatterFloat,
                                        GlooSum::kAllreduceBf16, GlooSum::kAllreduceFloat};

// "reduce-scatter bf16" and so on.
std::string GlooSumName(GlooSum sum);

class GlooRanks {
 public:
  // `ranks` must be a power of 2 and divide `elements`.
  static absl::StatusOr<std::unique_ptr<GlooRanks>> Create(uint32_t ranks, uint64_t elements,
                                                           GlooSum sum);
  ~GlooRanks();

  // Makes value(rank, element) the rank's gradient.
  void Fill(const std::function<float(uint32_t rank, uint64_t element)>& value);
  // One sum, called by every rank on a thread of its own; takes what the last one left as input.
  // Not OK when Gloo failed.
  absl::Status Run(uint32_t rank);
  // What `rank` holds of its part of the sum, which begins at element rank * elements / ranks.
  float Result(uint32_t rank, uint64_t element_of_part) const;

 private:
  struct Rank;
  GlooRanks();
  uint64_t elements_ = 0;
  GlooSum sum_ = GlooSum::kReduceScatterBf16;
  std::unique_ptr<Rank[]> ranks_;
  uint32_t count_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_TRANSPORT_GLOO_RANKS_H_
