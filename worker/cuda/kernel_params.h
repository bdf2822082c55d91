// The parameter of each kernel, as it lies in constant memory: everything a kernel is told that is
// no tensor. So a launch copies nothing to the device and leaves nothing there. What does not fit
// goes into several launches (worker/cuda/kernels.cc).
//
// Included by kernel files: no standard library.
#ifndef ZEROSHARD_WORKER_CUDA_KERNEL_PARAMS_H_
#define ZEROSHARD_WORKER_CUDA_KERNEL_PARAMS_H_

#include <cstdint>

#include "worker/optim/functor.h"

namespace zeroshard::gpu {

// What every device has (the limit is 4 KiB up to CUDA 12.0).
inline constexpr uint32_t kMaxParamsBytes = 4096;

// Of 8-bit states; kStateBlock of worker/optim/update_segment.h.
inline constexpr uint32_t kStateGrain = 256;

inline constexpr uint32_t kMaxRuns = 64;
inline constexpr uint32_t kMaxArgs = 16;

inline constexpr uint32_t kMaxChunks = 8;

// Elements of a chunk, counted from its first, with the same arguments.
struct UpdateRun {
  uint32_t begin;
  uint32_t end;
  uint32_t args;
  // 8-bit states: the scale of the block that holds element e of the unit is at
  // e / 256 + block_shift of the chunk's scales; wraps.
  uint32_t block_shift;
};

// A chunk, or a part of one: a row of the grid.
struct UpdateChunk {
  uint64_t grad;
  uint64_t master_before;
  uint64_t master_after;
  uint64_t state_before[kMaxStateSlots];
  uint64_t state_after[kMaxStateSlots];
  uint64_t scales_before[kMaxStateSlots];
  uint64_t scales_after[kMaxStateSlots];
  uint64_t parameter;  // 0: none
  uint64_t random_key;
  uint64_t first;  // element of the unit
  uint32_t elements;
  uint32_t first_run;
  uint32_t runs;
};

enum Master : uint32_t { kMasterFloat32, kMasterCanonical, kMasterStochastic };

struct UpdateParams {
  float grad_scale;
  uint32_t grad_type;
  uint32_t parameter_type;
  uint32_t master;
  uint32_t chunks;
  UpdateChunk chunk[kMaxChunks];
  UpdateRun run[kMaxRuns];
  UpdateArgs args[kMaxArgs];
};
static_assert(sizeof(UpdateParams) <= kMaxParamsBytes);

inline constexpr uint32_t kMaxInputs = 64;
inline constexpr uint32_t kPresenceWords = 16;

// Of the values on the stack: kernels hold them in registers, and exist for these two depths.
inline constexpr uint32_t kShallowStack = 4;
inline constexpr uint32_t kDeepStack = 10;

// One input of a sum's program: it is pushed on the stack, or added to the top. Then the two
// topmost values are added, `adds` times.
struct SumStep {
  uint8_t input;
  uint8_t pushed;  // 0 or 1
  uint8_t adds;
  uint8_t type;  // of the input
};

struct SumParams {
  uint64_t data[kMaxInputs];
  uint64_t presence[kMaxInputs];
  uint64_t weight_address[kMaxInputs];
  float weight[kMaxInputs];
  SumStep step[kMaxInputs];
  uint32_t steps;
  uint32_t accumulator_type;
  uint64_t accumulator;
  uint64_t before;
  uint64_t parameters;
  uint64_t parameter_count;
  uint64_t first;
  uint64_t elements;
};
static_assert(sizeof(SumParams) <= kMaxParamsBytes);

struct MergePresenceParams {
  uint64_t input[kMaxInputs];
  uint32_t inputs;
  uint64_t before;
  uint64_t after;
};

struct SquaresParams {
  uint64_t accumulator;
  uint64_t presence;
  uint64_t parameters;
  uint32_t parameter_count;
  uint32_t type;
  uint64_t first;
  uint64_t grains;
  uint64_t squares;
};

struct ConvertParams {
  uint64_t from;
  uint64_t to;
  uint32_t from_type;
  uint32_t to_type;
  uint64_t elements;
};

}  // namespace zeroshard::gpu

#endif  // ZEROSHARD_WORKER_CUDA_KERNEL_PARAMS_H_
