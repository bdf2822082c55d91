// The update where there is no master: bf16 parameters, rounded stochastically, from one image to
// another. Eight elements a thread, so that an access to an array of 16-bit elements is of 16
// bytes, too.
//
// Included by kernel files: no standard library.
#ifndef ZEROSHARD_WORKER_CUDA_HALF_UPDATE_KERNEL_H_
#define ZEROSHARD_WORKER_CUDA_HALF_UPDATE_KERNEL_H_

#include <cstdint>

#include "worker/cuda/kernel_launch.h"
#include "worker/cuda/kernel_params.h"
#include "worker/cuda/update_kernel.h"

namespace zeroshard::gpu {

// Two vectors as they lie in memory; of 16-bit types in the first.
struct RawOctet {
  Words4 at[2];
};

ZS_KERNEL_FN RawOctet LoadOctet(uint32_t type, uint64_t address, uint32_t octet) {
  if (type != kTypeFloat32) return {{*At<const Words4>(address, octet), {}}};
  return {{*At<const Words4>(address, 2 * octet), *At<const Words4>(address, 2 * octet + 1)}};
}

// One of its vectors.
ZS_KERNEL_FN Floats WidenPart(uint32_t type, const RawOctet& raw, uint32_t part) {
  if (type == kTypeFloat32) return Widen(type, raw.at[part]);
  const Words4& words = raw.at[0];
  return Widen(type, part == 0 ? Words4{words.x, words.y, 0, 0} : Words4{words.z, words.w, 0, 0});
}

template <class States>
ZS_KERNEL_FN void StoreStates(uint64_t address, uint32_t octet, const Floats (&value)[2]) {
  if constexpr (States::kType == kTypeFloat32) {
    ZS_UNROLL for (uint32_t part = 0; part < 2; ++part) {
      StoreFloat32(address, octet * kOctet + part * kVector, value[part]);
    }
  } else {
    const Words2 first = States::Narrow(value[0]);
    const Words2 second = States::Narrow(value[1]);
    *At<Words4>(address, octet) = {first.x, first.y, second.x, second.y};
  }
}

// Every octet of the block's chunk that falls to this thread. It lies in one grain and in one run,
// which begin at multiples of 16 elements.
template <class Functor, class States>
ZS_KERNEL_FN void UpdateHalves(const UpdateParams& params, uint32_t thread) {
  const UpdateChunk& chunk = params.chunk[BlockRow()];
  const uint32_t threads = BlockCount() * kBlockThreads;
  for (uint32_t octet = BlockIndex() * kBlockThreads + thread; octet < chunk.elements / kOctet;
       octet += threads) {
    const RawOctet raw_grad = LoadOctet(params.grad_type, chunk.grad, octet);
    const RawOctet raw_master = LoadOctet(kTypeBfloat16, chunk.master_before, octet);
    RawOctet raw_state[kMaxStateSlots];
    ZS_UNROLL for (int slot = 0; slot < Functor::kStates; ++slot) {
      raw_state[slot] = LoadOctet(States::kType, chunk.state_before[slot], octet);
    }
    const uint32_t element = octet * kOctet;
    const VectorRun run = FindRun(params, chunk, element);
    Words2 half[2];
    Floats state[kMaxStateSlots][2];
    ZS_UNROLL for (uint32_t part = 0; part < 2; ++part) {
      const uint32_t skipped = part * kVector;
      const VectorRun of_part = {run.index, run.end > skipped ? run.end - skipped : 0};
      Floats values[kMaxStateSlots];
      ZS_UNROLL for (int slot = 0; slot < Functor::kStates; ++slot) {
        values[slot] = WidenPart(States::kType, raw_state[slot], part);
      }
      Floats master = WidenPart(kTypeBfloat16, raw_master, part);
      UpdateVector<Functor>(params, of_part, WidenPart(params.grad_type, raw_grad, part), master,
                            values);
      ZS_UNROLL for (int slot = 0; slot < Functor::kStates; ++slot) {
        state[slot][part] = values[slot];
      }
      half[part] = StochasticHalves(chunk, element + skipped, of_part, master);
    }
    ZS_UNROLL for (int slot = 0; slot < Functor::kStates; ++slot) {
      StoreStates<States>(chunk.state_after[slot], octet, state[slot]);
    }
    const Words4 halves = {half[0].x, half[0].y, half[1].x, half[1].y};
    *At<Words4>(chunk.master_after, octet) = halves;
    if (chunk.parameter != 0) *At<Words4>(chunk.parameter, octet) = halves;
  }
}

}  // namespace zeroshard::gpu

#endif  // ZEROSHARD_WORKER_CUDA_HALF_UPDATE_KERNEL_H_
