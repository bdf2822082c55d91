// The compiled optimizer loops of one instruction set. Included by kernel files: no standard
// library.
#ifndef ZEROSHARD_WORKER_OPTIM_KERNEL_TABLE_H_
#define ZEROSHARD_WORKER_OPTIM_KERNEL_TABLE_H_

#include <cstdint>

#include "worker/optim/optimizer_kind.h"
#include "worker/optim/update_args.h"

namespace zeroshard::optim_internal {

struct KernelArrays {
  const void* grad;
  float* param;
  float* state[kMaxStateSlots];
  void* out;
};

using UpdateFn = void (*)(const KernelArrays& arrays, uint64_t begin, uint64_t end,
                          float grad_scale, const UpdateArgs& args);

inline constexpr int kDTypes = 3;             // in the order of DType
inline constexpr int kOutputs = 1 + kDTypes;  // none, then DType

struct UpdateTable {
  UpdateFn update[kOptimizerKinds][kDTypes][kOutputs];
};

extern const UpdateTable kUpdateTableV2;
extern const UpdateTable kUpdateTableV3;
extern const UpdateTable kUpdateTableV4;

}  // namespace zeroshard::optim_internal

#endif  // ZEROSHARD_WORKER_OPTIM_KERNEL_TABLE_H_
