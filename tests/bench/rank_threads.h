// RankThreads: a thread a rank, for operations that all ranks call at the same time. Used by the
// thread that made it.
#ifndef ZEROSHARD_TESTS_BENCH_RANK_THREADS_H_
#define ZEROSHARD_TESTS_BENCH_RANK_THREADS_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"

namespace zeroshard::bench {

class RankThreads {
 public:
  explicit RankThreads(uint32_t ranks) {
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      threads_.emplace_back([this, rank] { Serve(rank); });
    }
  }
  ~RankThreads() {
    {
      absl::MutexLock lock(&mu_);
      stopping_ = true;
    }
    for (std::thread& thread : threads_) thread.join();
  }
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  // Calls work(rank) on every thread; seconds from the first one's call until the last one has
  // returned.
  double Run(const std::function<void(uint32_t rank)>& work) {
    absl::MutexLock lock(&mu_);
    work_ = &work;
    busy_ = threads_.size();
    first_ = absl::InfiniteFuture();
    last_ = absl::InfinitePast();
    ++round_;
    mu_.Await(absl::Condition(
        +[](size_t* busy) { return *busy == 0; }, &busy_));
    return absl::ToDoubleSeconds(last_ - first_);
  }

 private:
  void Serve(uint32_t rank) {
    for (uint64_t seen = 0;; ++seen) {
      const std::function<void(uint32_t)>* work = nullptr;
      {
        absl::MutexLock lock(&mu_);
        const auto called = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
          return stopping_ || round_ > seen;
        };
        mu_.Await(absl::Condition(&called));
        if (stopping_) return;
        work = work_;
      }
      const absl::Time start = absl::Now();
      (*work)(rank);
      const absl::Time end = absl::Now();
      absl::MutexLock lock(&mu_);
      first_ = std::min(first_, start);
      last_ = std::max(last_, end);
      --busy_;
    }
  }

  absl::Mutex mu_;
  const std::function<void(uint32_t)>* work_ ABSL_GUARDED_BY(mu_) = nullptr;
  uint64_t round_ ABSL_GUARDED_BY(mu_) = 0;
  size_t busy_ ABSL_GUARDED_BY(mu_) = 0;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time first_ ABSL_GUARDED_BY(mu_);
  absl::Time last_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_;
};

}  // namespace zeroshard::bench

#endif  // ZEROSHARD_TESTS_BENCH_RANK_THREADS_H_
