// TorchRanks: tests/bench/reduce_torch.py, PyTorch's ranks that sum gradients over Gloo, in the
// environment of tests/bench/peers.
#ifndef ZEROSHARD_TESTS_BENCH_TORCH_RANKS_H_
#define ZEROSHARD_TESTS_BENCH_TORCH_RANKS_H_

#include <sys/types.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace zeroshard::bench {

class TorchRanks {
 public:
  // The interpreter of the environment; NotFound where it is not made. The working directory must
  // be the repository's root.
  static absl::StatusOr<std::string> Python();

  // Returns when every rank stands.
  static absl::StatusOr<std::unique_ptr<TorchRanks>> Start(const std::string& python,
                                                           uint32_t ranks, uint64_t elements);
  ~TorchRanks();
  TorchRanks(const TorchRanks&) = delete;
  TorchRanks& operator=(const TorchRanks&) = delete;

  // How they do it: the fastest way here, "reduce_scatter bf16" or another.
  const std::string& way() const { return way_; }
  // Seconds of each of `count` sums; empty when the ranks are gone.
  std::vector<double> Run(int count);

 private:
  TorchRanks() = default;
  std::string ReadLine();

  pid_t pid_ = -1;
  FILE* input_ = nullptr;
  FILE* output_ = nullptr;
  std::string way_;
};

}  // namespace zeroshard::bench

#endif  // ZEROSHARD_TESTS_BENCH_TORCH_RANKS_H_
