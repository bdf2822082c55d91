#include "tests/fakes/cuda/host_kernels.h"

#include "worker/cuda/kernels.cu"

namespace zeroshard {
namespace {

template <class Params, void (*kKernel)(const Params&)>
void RunBlocks(const void* params, uint32_t blocks, uint32_t rows) {
  for (uint32_t row = 0; row < rows; ++row) {
    for (uint32_t block = 0; block < blocks; ++block) {
      gpu::host_block = {block, blocks, row};
      kKernel(*static_cast<const Params*>(params));
    }
  }
}

template <class Params, void (*kKernel)(const Params&)>
constexpr HostKernel Entry(const char* name) {
  return {name, sizeof(Params), RunBlocks<Params, kKernel>};
}

#define ZS_ENTRY(name, Params) Entry<gpu::Params, gpu::name>(#name)
#define ZS_UPDATE_ENTRIES(kind, functor)                       \
  ZS_ENTRY(zs_update_##functor##_fp32, UpdateParams),          \
      ZS_ENTRY(zs_update_##functor##_bf16, UpdateParams),      \
      ZS_ENTRY(zs_update_##functor##_int8, UpdateParams),      \
      ZS_ENTRY(zs_update_##functor##_none_fp32, UpdateParams), \
      ZS_ENTRY(zs_update_##functor##_none_bf16, UpdateParams),

constexpr HostKernel kHostKernels[] = {
    ZS_FOR_EACH_OPTIMIZER(ZS_UPDATE_ENTRIES)  //
    ZS_ENTRY(zs_sum_any, SumParams),
    ZS_ENTRY(zs_sum_any_deep, SumParams),
    ZS_ENTRY(zs_sum_bf16, SumParams),
    ZS_ENTRY(zs_sum_fp16, SumParams),
    ZS_ENTRY(zs_merge_presence, MergePresenceParams),
    ZS_ENTRY(zs_squares, SquaresParams),
    ZS_ENTRY(zs_convert, ConvertParams),
};

}  // namespace

std::span<const HostKernel> HostKernels() { return kHostKernels; }

}  // namespace zeroshard
