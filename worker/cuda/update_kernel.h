// The update of four elements a thread: masters and states from one image to another, and the
// parameter. The functors of the host (worker/optim/), and its forms of masters and states.
//
// Included by kernel files: no standard library.
#ifndef ZEROSHARD_WORKER_CUDA_UPDATE_KERNEL_H_
#define ZEROSHARD_WORKER_CUDA_UPDATE_KERNEL_H_

#include <cstdint>

#include "worker/cuda/kernel_launch.h"
#include "worker/cuda/kernel_params.h"
#include "worker/optim/functor.h"
#include "worker/optim/random_key.h"
#include "worker/optim/split_master.h"

namespace zeroshard::gpu {

// Which of a vector's elements are updated, and how. A vector holds elements of one run at most:
// runs begin at multiples of 16 elements.
struct VectorRun {
  uint32_t index;  // of the run; 0 if there is none
  uint32_t end;    // elements of the vector before it are updated
};

// `element` is the vector's first, counted from the range's.
ZS_KERNEL_FN VectorRun FindRun(const UpdateParams& params, const UpdateChunk& chunk,
                               uint32_t element) {
  uint32_t below = chunk.first_run;  // what comes after the runs that begin at or before it
  uint32_t above = chunk.first_run + chunk.runs;
  while (below < above) {
    const uint32_t middle = (below + above) / 2;
    const bool begun = params.run[middle].begin <= element;
    below = begun ? middle + 1 : below;
    above = begun ? above : middle;
  }
  if (below == chunk.first_run) return {0, 0};
  const uint32_t end = params.run[below - 1].end;
  return {below - 1, end > element ? end - element : 0};
}

ZS_KERNEL_FN uint32_t MasterType(const UpdateParams& params) {
  return params.master == kMasterStochastic ? kTypeBfloat16 : kTypeFloat32;
}

// The bits of a vector of bf16 masters: of updated elements stochastically rounded, of others as
// they were.
ZS_KERNEL_FN Words2 StochasticHalves(const UpdateChunk& chunk, uint32_t element, VectorRun run,
                                     const Floats& value) {
  const uint64_t of_unit = chunk.first + element;
  const uint64_t key = GrainKey(chunk.random_key, of_unit / kStateGrain);
  const auto lane = static_cast<uint32_t>(of_unit % kStateGrain);
  uint32_t half[kVector];
  ZS_UNROLL for (uint32_t i = 0; i < kVector; ++i) {
    const uint32_t bits = kernel::BitsOf(value.at[i]);
    const uint32_t random = RandomBits(key, lane + i);
    const bool is_nan = value.at[i] != value.at[i];
    const uint32_t rounded = is_nan ? 0x7fc0u : ((bits + random) >> 16) & 0xffffu;
    half[i] = i < run.end ? rounded : bits >> 16;
  }
  return {half[0] | half[1] << 16, half[2] | half[3] << 16};
}

// Writes master and parameter; of the elements from `run.end` on, which are as they were, the
// parameter only is made anew.
ZS_KERNEL_FN void StoreMaster(const UpdateParams& params, const UpdateChunk& chunk,
                              uint32_t element, VectorRun run, Floats value) {
  ZS_UNROLL for (uint32_t i = 0; i < kVector; ++i) {
    const float stored = params.master == kMasterCanonical ? kernel::CanonicalMaster(value.at[i])
                                                           : kernel::CanonicalNan(value.at[i]);
    value.at[i] = i < run.end ? stored : value.at[i];
  }
  StoreFloat32(chunk.master_after, element, value);
  if (chunk.parameter != 0) Store(params.parameter_type, chunk.parameter, element, value);
}

// The same of masters of any form.
ZS_KERNEL_FN void StoreAnyMaster(const UpdateParams& params, const UpdateChunk& chunk,
                                 uint32_t element, VectorRun run, const Floats& value) {
  if (params.master != kMasterStochastic) return StoreMaster(params, chunk, element, run, value);
  const Words2 halves = StochasticHalves(chunk, element, run, value);
  *At<Words2>(chunk.master_after, element / kVector) = halves;
  if (chunk.parameter != 0) *At<Words2>(chunk.parameter, element / kVector) = halves;
}

// Runs the functor on the elements before `run.end`; the others stay.
template <class Functor>
ZS_KERNEL_FN void UpdateVector(const UpdateParams& params, VectorRun run, const Floats& grad,
                               Floats& master, Floats (&state)[kMaxStateSlots]) {
  const UpdateArgs& args = params.args[params.run[run.index].args];
  ZS_UNROLL for (uint32_t i = 0; i < kVector; ++i) {
    float p = master.at[i];
    float s0 = Functor::kStates > 0 ? state[0].at[i] : 0.0f;
    float s1 = Functor::kStates > 1 ? state[1].at[i] : 0.0f;
    Functor::Update(args, grad.at[i] * params.grad_scale, p, s0, s1);
    const bool updated = i < run.end;
    master.at[i] = updated ? p : master.at[i];
    if constexpr (Functor::kStates > 0) {
      state[0].at[i] = updated ? kernel::CanonicalNan(s0) : state[0].at[i];
    }
    if constexpr (Functor::kStates > 1) {
      state[1].at[i] = updated ? kernel::CanonicalNan(s1) : state[1].at[i];
    }
  }
}

// States of fp32 and of bf16. The values have canonical NaNs, or are just what was loaded, which is
// stored as it was, even a NaN's payload.
struct WholeStates {
  static constexpr uint32_t kType = kTypeFloat32;
  static ZS_KERNEL_FN void Store(uint64_t address, uint32_t element, const Floats& value) {
    StoreFloat32(address, element, value);
  }
};

struct HalfStates {
  static constexpr uint32_t kType = kTypeBfloat16;
  static ZS_KERNEL_FN Words2 Narrow(const Floats& value) {
    uint32_t half[kVector];
    ZS_UNROLL for (uint32_t i = 0; i < kVector; ++i) {
      half[i] = kernel::Bf16::StoreCanonical(value.at[i]);
    }
    return {half[0] | half[1] << 16, half[2] | half[3] << 16};
  }
  static ZS_KERNEL_FN void Store(uint64_t address, uint32_t element, const Floats& value) {
    *At<Words2>(address, element / kVector) = Narrow(value);
  }
};

// Every vector of the block's chunk that falls to this thread; of fp32 masters.
template <class Functor, class States>
ZS_KERNEL_FN void UpdateElements(const UpdateParams& params, uint32_t thread) {
  const UpdateChunk& chunk = params.chunk[BlockRow()];
  const uint32_t threads = BlockCount() * kBlockThreads;
  for (uint32_t vector = BlockIndex() * kBlockThreads + thread; vector < chunk.elements / kVector;
       vector += threads) {
    const uint32_t element = vector * kVector;
    const Words4 raw_grad = LoadRaw(params.grad_type, chunk.grad, element);
    const Words4 raw_master = LoadRaw(kTypeFloat32, chunk.master_before, element);
    Words4 raw_state[kMaxStateSlots];
    ZS_UNROLL for (int slot = 0; slot < Functor::kStates; ++slot) {
      raw_state[slot] = LoadRaw(States::kType, chunk.state_before[slot], element);
    }
    const VectorRun run = FindRun(params, chunk, element);
    Floats state[kMaxStateSlots];
    ZS_UNROLL for (int slot = 0; slot < Functor::kStates; ++slot) {
      state[slot] = Widen(States::kType, raw_state[slot]);
    }
    const Floats grad = Widen(params.grad_type, raw_grad);
    Floats master = Widen(kTypeFloat32, raw_master);
    UpdateVector<Functor>(params, run, grad, master, state);
    ZS_UNROLL for (int slot = 0; slot < Functor::kStates; ++slot) {
      States::Store(chunk.state_after[slot], element, state[slot]);
    }
    StoreMaster(params, chunk, element, run, master);
  }
}

}  // namespace zeroshard::gpu

#endif  // ZEROSHARD_WORKER_CUDA_UPDATE_KERNEL_H_
