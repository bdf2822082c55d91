// The compiled loops of one instruction set. Included by kernel files: no standard library.
//
// A core is the fused loop of one optimizer: gradient, master and states each read once and
// written once. Cores exist for the forms that training uses most:
//
//   gradient  fp32, bf16          states  fp32
//   master    fp32 without output, fp32 with bf16 output (also past the caches), split
//
// that is eight loops an optimizer. Everything else goes through the same cores in blocks of at
// most kStateBlock elements that a stage has widened into fp32 buffers in the first-level cache,
// and that another stage narrows afterwards (worker/optim/kernels.cc). So a new optimizer costs six
// loops and a new format two stages, and no format has an arithmetic of its own.
#ifndef ZEROSHARD_WORKER_OPTIM_KERNEL_TABLE_H_
#define ZEROSHARD_WORKER_OPTIM_KERNEL_TABLE_H_

#include <cstdint>

#include "worker/optim/optimizer_kind.h"
#include "worker/optim/update_args.h"

namespace zeroshard::optim_internal {

// Pointers to the element of index 0; those that the core does not use are null.
struct CoreArrays {
  const void* grad;
  float* param;
  uint16_t* high;
  uint16_t* low;
  float* state[kMaxStateSlots];
  uint16_t* out;
};

// Updates the elements [begin, end).
using CoreFn = void (*)(const CoreArrays& arrays, uint64_t begin, uint64_t end, float grad_scale,
                        const UpdateArgs& args);

inline constexpr int kCoreGrads = 2;  // fp32, bf16
enum CoreMaster : int {
  kCoreFloat32,
  kCoreFloat32ToBf16,
  kCoreFloat32ToBf16Streamed,
  kCoreSplit,
  kCoreMasters
};

struct CoreTable {
  CoreFn core[kOptimizerKinds][kCoreGrads][kCoreMasters];
};

// Ranges do not overlap.
struct StageTable {
  void (*load_bf16)(const uint16_t* in, uint64_t n, float* out);
  void (*load_fp16)(const uint16_t* in, uint64_t n, float* out);
  void (*store_bf16)(const float* in, uint64_t n, uint16_t* out);
  void (*store_fp16)(const float* in, uint64_t n, uint16_t* out);
  void (*store_fp32)(const float* in, uint64_t n, float* out);
  // Brings values into the split's canonical form; and that, rounded, to `out`.
  void (*canonical)(float* values, uint64_t n);
  void (*canonical_bf16)(float* values, uint64_t n, uint16_t* out);
  // Lanes [lane, lane + n) of the grain with this key.
  void (*store_stochastic)(const float* in, uint64_t n, uint64_t grain_key, uint32_t lane,
                           uint16_t* out);
  // One block of 8-bit states; encoding returns the scale.
  void (*decode_signed)(const uint8_t* codes, uint64_t n, float absmax, float* out);
  void (*decode_unsigned)(const uint8_t* codes, uint64_t n, float absmax, float* out);
  float (*encode_signed)(const float* values, uint64_t n, uint8_t* codes);
  float (*encode_unsigned)(const float* values, uint64_t n, uint8_t* codes);
};

extern const CoreTable kCoreTableV2;
extern const CoreTable kCoreTableV3;
extern const CoreTable kCoreTableV4;
extern const StageTable kStageTableV2;
extern const StageTable kStageTableV3;
extern const StageTable kStageTableV4;

}  // namespace zeroshard::optim_internal

#endif  // ZEROSHARD_WORKER_OPTIM_KERNEL_TABLE_H_
