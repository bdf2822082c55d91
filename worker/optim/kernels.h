// The fused optimizer pass: gradient accumulator in, states and master updated in place, rounded
// parameter out, each byte of memory touched once.
//
// For each element, in fp32 (every operation rounded once, no fma):
//   g = float(grad[i]) * grad_scale                    widening exact, one multiplication
//   Functor::Update(args, g, param[i], state[..][i])   worker/optim/{adamw,adam,sgd}.h
//   out[i] = round_to_nearest_even(param[i])           when out is given
// where grad_scale = float(clip_factor / (loss_scale * count)) is part of the step's decision, made
// once. NaNs are stored in one canonical form. So all instruction sets, and any cutting of the
// range, give the same bits.
//
// Called from any thread. The arrays do not overlap and share one index space. The pass changes
// param and states in place: run it under the undo record (worker/protected_pass.h) to survive a
// kill. grad is only read; out may be written again by a redo.
#ifndef ZEROSHARD_WORKER_OPTIM_KERNELS_H_
#define ZEROSHARD_WORKER_OPTIM_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "base/dtype.h"
#include "device/cpu/isa.h"
#include "worker/optim/registry.h"
#include "worker/optim/update_args.h"

namespace zeroshard {

struct UpdateArrays {
  const void* grad = nullptr;
  DType grad_dtype = DType::kFloat32;
  float* param = nullptr;             // the fp32 master, or the fp32 parameter itself
  float* state[kMaxStateSlots] = {};  // as many as the optimizer's state_slots
  void* out = nullptr;                // the parameter in the compute dtype; null: none
  DType out_dtype = DType::kFloat32;
};

// A run of elements with the same arguments, in the index space of the arrays.
struct UpdateSegment {
  uint64_t begin = 0;
  uint64_t end = 0;
  uint32_t args = 0;  // index into the list of UpdateArgs
};

// One step of an optimizer over any part of a slice.
struct UpdatePass {
  OptimizerKind kind = OptimizerKind::kAdamW;
  UpdateArrays arrays = {};
  // Increasing and disjoint; elements outside them are not touched.
  absl::Span<const UpdateSegment> segments = {};
  absl::Span<const UpdateArgs> args = {};
  float grad_scale = 1.0f;
};

// Updates the elements of [begin, end) that lie in a segment.
void ApplyUpdate(const UpdatePass& pass, uint64_t begin, uint64_t end);

// The same on a chosen instruction set, for tests; `isa` must be supported.
void ApplyUpdateOn(Isa isa, const UpdatePass& pass, uint64_t begin, uint64_t end);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_OPTIM_KERNELS_H_
