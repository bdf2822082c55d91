// The optimizer update of many separate tensors in one parallel pass: what zeroshard.optim runs in
// the trainer's own process. The arithmetic is that of the workers (worker/optim/kernels.h); each
// tensor is a unit of its own, one parameter from element 0.
//
// There is no undo record: a process that is killed in the middle takes its tensors with it.
#ifndef ZEROSHARD_CLIENT_PYTHON_TENSOR_UPDATES_H_
#define ZEROSHARD_CLIENT_PYTHON_TENSOR_UPDATES_H_

#include <cstdint>

#include "absl/types/span.h"
#include "device/cpu/thread_pool.h"
#include "worker/optim/kernels.h"

namespace zeroshard {

struct TensorUpdate {
  OptimizerKind kind = OptimizerKind::kAdamW;
  UpdateArrays arrays = {};
  uint64_t elements = 0;
  uint32_t args = 0;  // index into the list of UpdateArgs
  uint64_t random_key = 0;
};

// Updates all tensors, whose memory must not overlap. The lanes get equal shares, cut inside large
// tensors; the result does not depend on their number.
void ApplyTensorUpdates(absl::Span<const TensorUpdate* const> updates,
                        absl::Span<const UpdateArgs> args, ThreadPool& pool);

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_PYTHON_TENSOR_UPDATES_H_
