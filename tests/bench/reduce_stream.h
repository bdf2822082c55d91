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
  // Inputs and output lie in memory files, as windows and accumulators do.
  ReduceStream(uint32_t ranks, uint64_t elements);

  // Seconds of one pass; `around`: stores past the caches.
  double Run(bool around);
  // Decides by trying; then Run() runs the faster one.
  void Choose();
  double Run() { return Run(around_); }
  bool around() const { return around_; }

 private:
  const uint64_t elements_;
  bool around_ = false;
  std::vector<MappedRegion> inputs_;
  MappedRegion output_;
  RankThreads threads_;
};

}  // namespace zeroshard::bench

#endif  // ZEROSHARD_TESTS_BENCH_REDUCE_STREAM_H_
