// KernelDataPlane: the ranks' part of jobs with a data plane, for tests of the engine in one
// process: sums by the kernels, from gradients that are simply copied to the owner's device.
#ifndef ZEROSHARD_TESTS_WORKER_KERNEL_DATA_PLANE_H_
#define ZEROSHARD_TESTS_WORKER_KERNEL_DATA_PLANE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "device/cuda/memory.h"
#include "device/cuda/stream.h"
#include "tests/fakes/local_job.h"
#include "worker/cuda/cuda_shard.h"
#include "worker/reduction_tree.h"

namespace zeroshard {

class KernelDataPlane final : public LocalDataPlane {
 public:
  // Before the first scatter; the job must outlive what comes after.
  void Attach(LocalJob& job) { job_ = &job; }

  void Scatter(const Gradient& gradient) override;
  // All ranks have scattered. Once an attempt and rank.
  void Boundary(uint32_t rank, uint64_t attempt) override;
  // The step in flight is dropped.
  void Forget();
  // From here on ranks arrive before their devices say that all is summed; until LetGo.
  void Hold() { held_.emplace(); }
  void LetGo();

 private:
  struct Kept {
    std::vector<std::byte> values;
    Presence present = {};
    float weight = 1.0f;
  };
  using Key = std::tuple<uint32_t, uint32_t, uint32_t>;  // unit, micro-step, rank
  class SliceSum;

  LocalJob* job_ = nullptr;
  std::map<Key, Kept> gradients_;
  std::set<uint32_t> summed_;                         // ranks
  std::map<uint32_t, uint64_t> told_;                 // the last attempt, by rank
  std::optional<std::map<uint32_t, uint64_t>> held_;  // attempts by rank
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_WORKER_KERNEL_DATA_PLANE_H_
