// What the kernels on a GPU are told: plain structs of device addresses (worker/cuda/kernels.h).
//
// An address of 0 is none. All addresses of a launch are those of the first element of its range,
// which begins at element `first` of the unit: a multiple of 16 elements, and `elements` is one,
// too (of grains for squares). Arrays are aligned to 16 bytes. Spans are read during the call only;
// what lies behind device addresses stays as it is until the stream has come by.
#ifndef ZEROSHARD_WORKER_CUDA_KERNEL_ARGS_H_
#define ZEROSHARD_WORKER_CUDA_KERNEL_ARGS_H_

#include <cstdint>

#include "absl/types/span.h"
#include "base/dtype.h"
#include "device/cuda/address.h"
#include "storage/state_format.h"
#include "worker/optim/functor.h"
#include "worker/optim/optimizer_kind.h"
#include "worker/optim/update_args.h"
#include "worker/optim/update_segment.h"
#include "worker/reduction_tree.h"

namespace zeroshard {

// An array before and after an update. In place, both being the same, is allowed; only an update
// from one image to another can be done again.
struct DeviceArrayPair {
  DeviceAddress before = 0;
  DeviceAddress after = 0;
};

// One step of an optimizer over one chunk. Elements in no segment (absent parameters, padding) are
// copied: masters, states and scales as they are, the parameter as the rounded master. So
// afterwards the image is whole, and the bits are those of PreparedUpdate (worker/optim/kernels.h).
struct UpdateLaunch {
  OptimizerKind kind = OptimizerKind::kAdamW;
  uint64_t first = 0;
  uint64_t elements = 0;
  DeviceAddress grad = 0;
  DType grad_dtype = DType::kFloat32;
  // kFloat32, kFloat32Canonical: fp32. kStochastic: bf16, and so is `parameter`, a copy of it.
  MasterKind master_kind = MasterKind::kFloat32;
  DeviceArrayPair master = {};
  StateFormat state_format = StateFormat::kFloat32;
  DeviceArrayPair state[kMaxStateSlots] = {};
  // kInt8: fp32, from the scale of block `first_block` on, which is that of element `first`
  // (BlockTable::first); `blocks` of them.
  DeviceArrayPair scales[kMaxStateSlots] = {};
  uint64_t first_block = 0;
  uint64_t blocks = 0;
  // The master in the compute dtype; 0: it is not written.
  DeviceAddress parameter = 0;
  DType parameter_dtype = DType::kBfloat16;
  // Of the unit, increasing and disjoint; those outside the range are skipped.
  absl::Span<const UpdateSegment> segments = {};
  absl::Span<const UpdateArgs> args = {};
  float grad_scale = 1.0f;
  uint64_t random_key = 0;  // kStochastic: RandomKey(seed, step, unit) of random_key.h
};

// A parameter's elements in its unit, without padding. Units' tables of these lie in device memory,
// in order of the positions that presence bits count (ParameterTableOf).
struct DeviceParameter {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Bit p % 64 of word p / 64: whether there is a gradient for the parameter at position p.
inline constexpr uint32_t kDevicePresenceWords = 16;

struct SumInput {
  DeviceAddress data = 0;      // 0: this input has nothing at all
  DeviceAddress presence = 0;  // kDevicePresenceWords words; 0: all parameters are present
  // The fp32 number that each element is multiplied by: at this address, or if that is 0 `weight`.
  DeviceAddress weight_address = 0;
  float weight = 1.0f;
  DType dtype = DType::kFloat32;
};

inline constexpr size_t kMaxSumInputs = 64;

// accumulator = (or +=) the sum of the inputs in the canonical order, by parameter: inputs in which
// it is absent pass through; if it is absent in all, the accumulator stays. Zeros go to padding.
// The bits are those of worker/reduce_kernel.h.
struct SumLaunch {
  absl::Span<const SumInput> inputs = {};     // at most kMaxSumInputs
  const ReductionProgram* program = nullptr;  // ReductionPlan::Program(), all inputs present
  DeviceAddress parameters = 0;               // DeviceParameter[parameter_count]
  uint32_t parameter_count = 0;
  uint64_t first = 0;
  uint64_t elements = 0;
  DeviceAddress accumulator = 0;
  DType accumulator_dtype = DType::kFloat32;
  // Presence of what the accumulator holds already: those parameters are added to, all others
  // stored. 0: it holds nothing. Must not change under the launch: MergePresence comes after it.
  DeviceAddress before = 0;
};

// after = before | inputs[0] | inputs[1] ...; an address of 0 counts as no bits. `after` may be
// `before`.
struct MergePresenceLaunch {
  absl::Span<const DeviceAddress> inputs = {};  // at most kMaxSumInputs
  DeviceAddress before = 0;
  DeviceAddress after = 0;
};

// squares[i] = the fp64 number of grain i of the range (worker/grad_norm.h), for ExactSum on the
// host. Absent parameters and padding count as 0.
struct SquaresLaunch {
  DeviceAddress accumulator = 0;
  DType dtype = DType::kFloat32;
  DeviceAddress presence = 0;    // 0: all are present
  DeviceAddress parameters = 0;  // DeviceParameter[parameter_count]
  uint32_t parameter_count = 0;
  uint64_t first = 0;  // multiples of 256
  uint64_t elements = 0;
  DeviceAddress squares = 0;  // double[elements / 256]
};

// to[i] = convert(from[i]), rounding to nearest even; NaNs become the canonical one. Any number of
// elements. In place if the types are the same.
struct ConvertLaunch {
  DeviceAddress from = 0;
  DType from_dtype = DType::kFloat32;
  DeviceAddress to = 0;
  DType to_dtype = DType::kBfloat16;
  uint64_t elements = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_CUDA_KERNEL_ARGS_H_
