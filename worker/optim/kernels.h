// The fused optimizer pass: gradient accumulator in, states and master updated in place, rounded
// parameter out, each byte of memory touched once.
//
// For each element, in fp32 (every operation rounded once, no fma):
//   g = float(grad[i]) * grad_scale             widening exact, one multiplication
//   Functor::Update(args, g, master, states)    worker/optim/{adamw,adam,sgd,adagrad,lion}.h
//   master and states stored in their formats; the parameter in the compute dtype written
// where grad_scale = float(clip_factor / (loss_scale * count)) is part of the step's decision, made
// once. NaNs are stored in one canonical form. So all instruction sets, and any cutting of the
// range, give the same bits. docs/numerics.md describes the formats.
//
// Called from any thread. The arrays do not overlap and share one index space: every pointer is
// that of the unit's element 0 (or block 0) and is used only for the elements of the pass. The pass
// changes master and states in place: run it under the undo record (worker/protected_pass.h) to
// survive a kill. grad is only read; out may be written again by a redo.
#ifndef ZEROSHARD_WORKER_OPTIM_KERNELS_H_
#define ZEROSHARD_WORKER_OPTIM_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "base/dtype.h"
#include "device/cpu/isa.h"
#include "storage/state_format.h"
#include "worker/optim/kernel_table.h"
#include "worker/optim/registry.h"
#include "worker/optim/update_args.h"
#include "worker/optim/update_segment.h"

namespace zeroshard {

struct UpdateArrays {
  const void* grad = nullptr;
  DType grad_dtype = DType::kFloat32;
  MasterKind master = MasterKind::kFloat32;
  float* param = nullptr;    // kFloat32, kFloat32Canonical
  uint16_t* high = nullptr;  // kSplit, kStochastic
  uint16_t* low = nullptr;   // kSplit
  StateFormat state_format = StateFormat::kFloat32;
  // As many as the optimizer's state_slots: float, bf16 (uint16_t) or codes (uint8_t).
  void* state[kMaxStateSlots] = {};
  float* absmax[kMaxStateSlots] = {};  // kInt8: the blocks' scales
  // The parameter beside the master, in the compute dtype; null: none. With kFloat32Canonical it is
  // bf16, with kStochastic a copy of the master; split masters have none.
  void* out = nullptr;
  DType out_dtype = DType::kFloat32;
};

// One step of an optimizer over any part of a slice.
struct UpdatePass {
  OptimizerKind kind = OptimizerKind::kAdamW;
  UpdateArrays arrays = {};
  // Increasing and disjoint; elements outside them are not touched.
  absl::Span<const UpdateSegment> segments = {};
  absl::Span<const UpdateArgs> args = {};
  float grad_scale = 1.0f;
  uint64_t random_key = 0;  // kStochastic: RandomKey(seed, step, unit) of random_key.h
  // A bf16 output beside an fp32 master goes past the caches, which saves reading the lines that it
  // overwrites: for units much larger than the caches. Whoever hands the output to another thread
  // puts a store fence before (RunProtected does).
  bool stream_output = false;
};

// A pass with its loops chosen, for calls over small parts. Copyable; what the pass points to must
// outlive it. Any thread.
class PreparedUpdate {
 public:
  explicit PreparedUpdate(const UpdatePass& pass);
  // On a chosen instruction set, for tests; `isa` must be supported.
  PreparedUpdate(Isa isa, const UpdatePass& pass);

  // Updates the elements of [begin, end) that lie in a segment. With 8-bit states begin and end are
  // multiples of kStateBlock, or do not lie inside a segment.
  void Apply(uint64_t begin, uint64_t end) const;

 private:
  void ApplyTo(const UpdateSegment& segment, uint64_t begin, uint64_t end) const;

  UpdatePass pass_;
  Isa isa_;
  bool staged_ = true;  // goes through buffers
  optim_internal::CoreArrays arrays_ = {};
  optim_internal::CoreFn core_ = nullptr;
};

// PreparedUpdate(pass).Apply(begin, end).
void ApplyUpdate(const UpdatePass& pass, uint64_t begin, uint64_t end);
void ApplyUpdateOn(Isa isa, const UpdatePass& pass, uint64_t begin, uint64_t end);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_OPTIM_KERNELS_H_
