// The sum of squares of one grain, for kernel files: the definition in worker/grad_norm.h.
// Always inlined, nothing of the standard library: worker/kernel_math.h says why.
#ifndef ZEROSHARD_WORKER_SQUARES_KERNEL_H_
#define ZEROSHARD_WORKER_SQUARES_KERNEL_H_

#include "worker/kernel_math.h"

namespace zeroshard::kernel {

inline constexpr int kSquaresGrain = 256;
inline constexpr int kSquaresLanes = 16;

// Floats of one register; wider vectors than the machine has are compiled to scalar code.
#if defined(__AVX512F__)
inline constexpr int kVectorFloats = 16;
#elif defined(__AVX2__)
inline constexpr int kVectorFloats = 8;
#else
inline constexpr int kVectorFloats = 4;
#endif
typedef float FloatVector __attribute__((vector_size(kVectorFloats * sizeof(float))));
typedef double DoubleVector __attribute__((vector_size(kVectorFloats * sizeof(float))));

ZS_KERNEL_FN FloatVector LoadVector(const float* values) {
  FloatVector vector;
  __builtin_memcpy(&vector, values, sizeof(vector));
  return vector;
}

// Compilers split __builtin_convertvector into halves, so the conversions are named.
ZS_KERNEL_FN DoubleVector WidenLow(FloatVector v) {
#if defined(__AVX512F__)
  return __builtin_ia32_cvtps2pd512_mask(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                                         DoubleVector{}, 0xff, 4);
#elif defined(__AVX2__)
  return __builtin_ia32_cvtps2pd256(__builtin_shufflevector(v, v, 0, 1, 2, 3));
#elif defined(__SSE2__)
  return __builtin_ia32_cvtps2pd(v);
#else
  return DoubleVector{v[0], v[1]};
#endif
}

ZS_KERNEL_FN DoubleVector WidenHigh(FloatVector v) {
#if defined(__AVX512F__)
  return __builtin_ia32_cvtps2pd512_mask(
      __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15), DoubleVector{}, 0xff, 4);
#elif defined(__AVX2__)
  return __builtin_ia32_cvtps2pd256(__builtin_shufflevector(v, v, 4, 5, 6, 7));
#elif defined(__SSE2__)
  return __builtin_ia32_cvtps2pd(__builtin_shufflevector(v, v, 2, 3, 2, 3));
#else
  return DoubleVector{v[2], v[3]};
#endif
}

// The square of an fp32 number is exact in fp64, so a fused multiply-add rounds as a product and a
// sum do, and is used where there is one.
ZS_KERNEL_FN DoubleVector AddSquare(DoubleVector sum, DoubleVector value) {
#if defined(__AVX512F__)
  return __builtin_ia32_vfmaddpd512_mask(value, value, sum, 0xff, 4);
#elif defined(__FMA__)
  return __builtin_ia32_vfmaddpd256(value, value, sum);
#else
  return sum + value * value;
#endif
}

// The 16 lanes' sums.
class SquareSums {
 public:
  // Adds the next kSquaresLanes / kVectorFloats vectors; `part` counts them from 0.
  ZS_KERNEL_FN void Add(int part, FloatVector v) {
    sums_[2 * part] = AddSquare(sums_[2 * part], WidenLow(v));
    sums_[2 * part + 1] = AddSquare(sums_[2 * part + 1], WidenHigh(v));
  }

  // Lane k with lane k + 8, + 4, + 2, + 1.
  ZS_KERNEL_FN double Total() const {
    DoubleVector sums[kVectors];
    for (int i = 0; i < kVectors; ++i) sums[i] = sums_[i];
    for (int half = kVectors / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
    }
#if defined(__AVX512F__)
    const auto four = __builtin_shufflevector(sums[0], sums[0], 0, 1, 2, 3) +
                      __builtin_shufflevector(sums[0], sums[0], 4, 5, 6, 7);
#elif defined(__AVX2__)
    const auto four = sums[0];
#endif
#if defined(__AVX2__)
    const auto two =
        __builtin_shufflevector(four, four, 0, 1) + __builtin_shufflevector(four, four, 2, 3);
#else
    const auto two = sums[0];
#endif
    return two[0] + two[1];
  }

 private:
  static constexpr int kVectors = 2 * kSquaresLanes / kVectorFloats;
  DoubleVector sums_[kVectors] = {};
};

ZS_KERNEL_FN double SumSquares(const float* values) {
  SquareSums sums;
  for (int i = 0; i < kSquaresGrain; i += kSquaresLanes) {
    for (int part = 0; part < kSquaresLanes / kVectorFloats; ++part) {
      sums.Add(part, LoadVector(values + i + part * kVectorFloats));
    }
  }
  return sums.Total();
}

}  // namespace zeroshard::kernel

#endif  // ZEROSHARD_WORKER_SQUARES_KERNEL_H_
