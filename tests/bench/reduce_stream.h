// The memory traffic of a sum of bf16 gradients into fp32, by two threads that do nothing else: the
// limit that the benchmark `reduce` is held against.
#ifndef ZEROSHARD_TESTS_BENCH_REDUCE_STREAM_H_
#define ZEROSHARD_TESTS_BENCH_REDUCE_STREAM_H_

#include <cstdint>
#include <vector>

#include "base/shared_memory.h"
#include "tests/bench/rank_threads.h"

namespace zeroshard::bench {

class ReduceStream {
 public:
  // Inputs and outputs of `units` sums lie in memory files, as windows and accumulators do. There
  // are as many as on the other side, so that neither finds in the caches what it left there.
  ReduceStream(uint32_t ranks, uint64_t elements, uint32_t units);

  // Seconds of each of the units' sums, in the way that is faster now.
  std::vector<double> Run();

 private:
  enum class Store { kPlain, kPastCaches };
  std::vector<double> RunAll(Store store);
  double RunUnit(uint32_t unit, Store store);

  const uint64_t elements_;
  const uint32_t units_;
  std::vector<MappedRegion> inputs_;
  MappedRegion output_;
  RankThreads threads_;
};

}  // namespace zeroshard::bench

#endif  // ZEROSHARD_TESTS_BENCH_REDUCE_STREAM_H_
