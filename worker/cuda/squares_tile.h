// Squared norms of grains (worker/grad_norm.h): four threads a grain, each with four of the 16
// lanes; one of them then merges the lanes.
//
// Included by kernel files: no standard library.
#ifndef ZEROSHARD_WORKER_CUDA_SQUARES_TILE_H_
#define ZEROSHARD_WORKER_CUDA_SQUARES_TILE_H_

#include <cstdint>

#include "worker/cuda/kernel_launch.h"
#include "worker/cuda/kernel_params.h"
#include "worker/cuda/sum_kernel.h"

namespace zeroshard::gpu {

inline constexpr uint32_t kGrain = 256;
inline constexpr uint32_t kRow = 16;  // lanes; a row of elements belongs to one parameter
inline constexpr uint32_t kGrainThreads = kRow / kVector;
inline constexpr uint32_t kBlockGrains = kBlockThreads / kGrainThreads;

// The lanes' sums of the grains of a block: those of lane 4 * part + i of its grain g at
// [g * kGrainThreads + part][i].
using LaneSums = double[kBlockThreads][kVector];

// How many elements from `element` of the unit on count: none, if the parameter is absent.
ZS_KERNEL_FN uint32_t Counted(const SquaresParams& params, uint32_t position, uint64_t element) {
  const uint64_t end = At<const Place>(params.parameters, position)->end;
  const bool present = params.presence == 0 || HasBit(params.presence, position);
  if (!present || end <= element) return 0;
  return end - element < kVector ? static_cast<uint32_t>(end - element) : kVector;
}

ZS_KERNEL_FN void SumLanes(const SquaresParams& params, uint64_t first_grain, uint32_t thread,
                           LaneSums& sums) {
  const uint64_t grain = first_grain + thread / kGrainThreads;
  if (grain >= params.grains) return;
  const uint64_t range_element = grain * kGrain;
  const uint32_t part = thread % kGrainThreads * kVector;
  uint64_t element = params.first + range_element;
  uint32_t position = FindPosition(params.parameters, params.parameter_count, element);
  double lane[kVector] = {};
  for (uint32_t row = 0; row < kGrain; row += kRow, element += kRow) {
    const Floats values = Load(params.type, params.accumulator, range_element + row + part);
    while (position + 1 < params.parameter_count &&
           At<const Place>(params.parameters, position + 1)->begin <= element) {
      ++position;
    }
    const uint32_t counted = Counted(params, position, element + part);
    ZS_UNROLL for (uint32_t i = 0; i < kVector; ++i) {
      const double value = i < counted ? static_cast<double>(values.at[i]) : 0.0;
      lane[i] = lane[i] + value * value;
    }
  }
  ZS_UNROLL for (uint32_t i = 0; i < kVector; ++i) sums[thread][i] = lane[i];
}

// Lane k with lane k + 8, + 4, + 2, + 1.
ZS_KERNEL_FN double MergedLanes(const LaneSums& sums, uint32_t first) {
  double lane[kRow / 2];
  ZS_UNROLL for (uint32_t k = 0; k < kRow / 2; ++k) {
    lane[k] = sums[first + k / kVector][k % kVector] +
              sums[first + (k + kRow / 2) / kVector][k % kVector];
  }
  ZS_UNROLL for (uint32_t k = 0; k < 4; ++k) lane[k] = lane[k] + lane[k + 4];
  const double even = lane[0] + lane[2];
  const double odd = lane[1] + lane[3];
  return even + odd;
}

ZS_KERNEL_FN void MergeLanes(const SquaresParams& params, uint64_t first_grain, uint32_t thread,
                             const LaneSums& sums) {
  const uint64_t grain = first_grain + thread / kGrainThreads;
  if (thread % kGrainThreads != 0 || grain >= params.grains) return;
  *At<double>(params.squares, grain) = MergedLanes(sums, thread);
}

}  // namespace zeroshard::gpu

#endif  // ZEROSHARD_WORKER_CUDA_SQUARES_TILE_H_
