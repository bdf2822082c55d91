// All kernels. nvcc makes one fatbin of this file for CudaKernels; the fake GPU of the tests
// compiles it as host code. A kernel is found by its name, which is unmangled.
#include "worker/cuda/code_tile.h"
#include "worker/cuda/half_update_kernel.h"
#include "worker/cuda/kernel_launch.h"
#include "worker/cuda/kernel_params.h"
#include "worker/cuda/squares_tile.h"
#include "worker/cuda/sum_kernel.h"
#include "worker/cuda/update_kernel.h"
#include "worker/optim/optimizer_kind.h"

namespace zeroshard::gpu {

template <class Functor>
ZS_KERNEL_FN void UpdateCodes(const UpdateParams& params) {
  if constexpr (Functor::kStates > 0 && Functor::kStateMaps[0] != StateMap::kNone) {
    ZS_SHARED CodeTile tile;
    const UpdateChunk& chunk = params.chunk[BlockRow()];
    const uint64_t extent = chunk.first % kStateGrain + chunk.elements;
    for (uint32_t at = BlockIndex(); uint64_t{at} * kTileElements < extent; at += BlockCount()) {
      ZS_THREADS(thread) { UpdateTile<Functor>(params, chunk, at, thread, tile); }
      ZS_BARRIER();
      ZS_THREADS(thread) { FindLargestOfRow<Functor>(thread, tile); }
      ZS_BARRIER();
      ZS_THREADS(thread) { EncodeTile<Functor>(params, chunk, at, thread, tile); }
      ZS_BARRIER();
    }
  }
}

#define ZS_UPDATE_KERNELS(kind, Functor)                                                \
  ZS_KERNEL(zs_update_##Functor##_fp32, UpdateParams) {                                 \
    ZS_THREADS(thread) { UpdateElements<Functor, WholeStates>(params, thread); }        \
  }                                                                                     \
  ZS_KERNEL(zs_update_##Functor##_bf16, UpdateParams) {                                 \
    ZS_THREADS(thread) { UpdateElements<Functor, HalfStates>(params, thread); }         \
  }                                                                                     \
  ZS_KERNEL(zs_update_##Functor##_int8, UpdateParams) { UpdateCodes<Functor>(params); } \
  ZS_WIDE_KERNEL(zs_update_##Functor##_none_fp32, UpdateParams) {                       \
    ZS_THREADS(thread) { UpdateHalves<Functor, WholeStates>(params, thread); }          \
  }                                                                                     \
  ZS_WIDE_KERNEL(zs_update_##Functor##_none_bf16, UpdateParams) {                       \
    ZS_THREADS(thread) { UpdateHalves<Functor, HalfStates>(params, thread); }           \
  }

ZS_FOR_EACH_OPTIMIZER(ZS_UPDATE_KERNELS)

ZS_KERNEL(zs_sum_any, SumParams) {
  ZS_THREADS(thread) { SumElements<kShallowStack, AnyInputs>(params, thread); }
}

ZS_WIDE_KERNEL(zs_sum_any_deep, SumParams) {
  ZS_THREADS(thread) { SumElements<kDeepStack, AnyInputs>(params, thread); }
}

ZS_WIDE_KERNEL(zs_sum_bf16, SumParams) {
  ZS_THREADS(thread) { SumElements<kShallowStack, HalfInputs<kTypeBfloat16>>(params, thread); }
}

ZS_WIDE_KERNEL(zs_sum_fp16, SumParams) {
  ZS_THREADS(thread) { SumElements<kShallowStack, HalfInputs<kTypeFloat16>>(params, thread); }
}

ZS_KERNEL(zs_merge_presence, MergePresenceParams) {
  ZS_THREADS(thread) { MergeWord(params, thread); }
}

ZS_KERNEL(zs_squares, SquaresParams) {
  ZS_SHARED LaneSums sums;
  for (uint64_t grain = uint64_t{BlockIndex()} * kBlockGrains; grain < params.grains;
       grain += uint64_t{BlockCount()} * kBlockGrains) {
    ZS_THREADS(thread) { SumLanes(params, grain, thread, sums); }
    ZS_BARRIER();
    ZS_THREADS(thread) { MergeLanes(params, grain, thread, sums); }
    ZS_BARRIER();
  }
}

ZS_KERNEL(zs_convert, ConvertParams) {
  ZS_THREADS(thread) {
    ConvertElements(params, thread);
    ConvertTail(params, thread);
  }
}

}  // namespace zeroshard::gpu
