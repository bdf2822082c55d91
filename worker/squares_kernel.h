// The sum of squares of one grain, for kernel files: the definition in worker/grad_norm.h.
// Always inlined, nothing of the standard library: worker/kernel_math.h says why.
#ifndef ZEROSHARD_WORKER_SQUARES_KERNEL_H_
#define ZEROSHARD_WORKER_SQUARES_KERNEL_H_

#include "worker/kernel_math.h"

namespace zeroshard::kernel {

inline constexpr int kSquaresGrain = 256;
inline constexpr int kSquaresLanes = 16;

ZS_KERNEL_FN double SumSquares(const float* values) {
  typedef float Floats __attribute__((vector_size(kSquaresLanes * sizeof(float))));
  typedef double Doubles __attribute__((vector_size(kSquaresLanes * sizeof(double))));
  Doubles sums = {};
  for (int i = 0; i < kSquaresGrain; i += kSquaresLanes) {
    Floats floats;
    __builtin_memcpy(&floats, values + i, sizeof(floats));
    const Doubles wide = __builtin_convertvector(floats, Doubles);
    sums += wide * wide;
  }
  // Lane k with lane k + 8, + 4, + 2, + 1.
  const auto eight = __builtin_shufflevector(sums, sums, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(sums, sums, 8, 9, 10, 11, 12, 13, 14, 15);
  const auto four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) +
                    __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
  const auto two =
      __builtin_shufflevector(four, four, 0, 1) + __builtin_shufflevector(four, four, 2, 3);
  return two[0] + two[1];
}

}  // namespace zeroshard::kernel

#endif  // ZEROSHARD_WORKER_SQUARES_KERNEL_H_
