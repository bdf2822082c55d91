// Which elements an update touches and where their masters lie; shared by the loops of the host
// (worker/optim/kernels.h) and of GPUs (worker/cuda/kernels.h).
#ifndef ZEROSHARD_WORKER_OPTIM_UPDATE_SEGMENT_H_
#define ZEROSHARD_WORKER_OPTIM_UPDATE_SEGMENT_H_

#include <cstdint>

namespace zeroshard {

// Where the fp32 value that the optimizer updates lies.
enum class MasterKind : uint8_t {
  kFloat32,           // param: an fp32 array
  kFloat32Canonical,  // param: an fp32 array, values in the split's canonical form
  kSplit,             // high: the bf16 parameter, low: the bits that it lacks
  kStochastic,        // high: the bf16 parameter, or a copy of it, rounded stochastically
};

// Elements that share one scale of an 8-bit state, counted from the unit's start; a parameter's end
// ends a block, too.
inline constexpr uint64_t kStateBlock = 256;

// A run of elements with the same arguments, in the index space of the arrays. With 8-bit states it
// is a whole parameter (or the part of one that lies in the slice), whose block of element e has
// the scale absmax[e / kStateBlock + block_shift].
struct UpdateSegment {
  uint64_t begin = 0;
  uint64_t end = 0;
  uint32_t args = 0;  // index into the list of UpdateArgs
  uint32_t block_shift = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_OPTIM_UPDATE_SEGMENT_H_
