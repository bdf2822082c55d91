// From what a kernel is asked for to the calls that do it: checks, choice of the kernel, its
// parameters, the cut where they do not fit into one. Pure; any thread.
#ifndef ZEROSHARD_WORKER_CUDA_LAUNCH_PLAN_H_
#define ZEROSHARD_WORKER_CUDA_LAUNCH_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/cuda/kernel_args.h"
#include "worker/cuda/kernel_params.h"

namespace zeroshard::gpu {

// Of an optimizer: one for each format of states, and those for parameters without a master, whose
// 8-bit states have none of their own.
inline constexpr uint32_t kUpdateKernels = 5;
inline constexpr uint32_t kWithoutMaster = 3;

// Places in KernelNames(). The update of an optimizer for a format of states is at
// kind * kUpdateKernels + format, plus kWithoutMaster.
enum Kernel : uint32_t {
  kSumAny = kOptimizerKinds * kUpdateKernels,
  kSumAnyDeep,
  kSumBf16,
  kSumFp16,
  kMergePresence,
  kSquares,
  kConvert,
  kKernels
};

// The names in the image, kKernels of them.
absl::Span<const char* const> KernelNames();

template <class Params>
struct KernelCall {
  uint32_t kernel = 0;
  // Of a row of the grid, of kBlockThreads threads that have something to do; fewer will do.
  uint64_t blocks = 0;
  uint32_t rows = 1;
  Params params = {};
};

// The errors are those of CudaKernels (worker/cuda/kernels.h).
absl::StatusOr<std::vector<KernelCall<UpdateParams>>> PlanUpdates(
    absl::Span<const UpdateLaunch> launches);
absl::StatusOr<KernelCall<SumParams>> PlanSum(const SumLaunch& launch);
absl::StatusOr<KernelCall<MergePresenceParams>> PlanMergePresence(
    const MergePresenceLaunch& launch);
absl::StatusOr<KernelCall<SquaresParams>> PlanSquares(const SquaresLaunch& launch);
absl::StatusOr<KernelCall<ConvertParams>> PlanConvert(const ConvertLaunch& launch);

}  // namespace zeroshard::gpu

#endif  // ZEROSHARD_WORKER_CUDA_LAUNCH_PLAN_H_
