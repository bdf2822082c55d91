// The compiled block loops of one instruction set. Included by kernel files: no standard library.
#ifndef ZEROSHARD_WORKER_REDUCE_TABLE_H_
#define ZEROSHARD_WORKER_REDUCE_TABLE_H_

#include <cstdint>

namespace zeroshard::reduce_internal {

inline constexpr int kDTypes = 3;  // in the order of DType
inline constexpr int kGrain = 256;
inline constexpr int kRow = 16;  // of Accumulator::used

// block[i] = (or +=) widen(source[begin + i]), times weight in the weighted loops.
using SourceFn = void (*)(float* block, const void* source, uint64_t begin, uint32_t elements,
                          float weight);
// block[i] = the sum of widen(sources[k][begin + i]) over 2 or 4 sources of one type.
using TreeFn = void (*)(float* block, const void* const* sources, uint64_t begin,
                        uint32_t elements);
// target[begin + i] = round(block[i]), or round(widen(target[begin + i]) + block[i]).
using TargetFn = void (*)(const float* block, void* target, uint64_t begin, uint32_t elements);
// The same for one grain; returns the sum of squares of what is in the target then (grad_norm.h).
using GrainFn = double (*)(const float* block, void* target, uint64_t begin);
// The sum of 1, 2 or 4 sources of one type into whole grains of an fp32 target, and squares[i] of
// the grain begin / 256 + i. `sources` as in TreeFn, `used` as in Accumulator.
using DirectFn = void (*)(const void* const* sources, void* target, uint64_t begin, uint32_t grains,
                          const uint8_t* used, double* squares);

struct ReduceTable {
  SourceFn load[kDTypes][2];  // [dtype][weighted]
  SourceFn add[kDTypes][2];
  TreeFn pair[kDTypes];        // a + b
  TreeFn quad[kDTypes];        // (a + b) + (c + d)
  TargetFn store[kDTypes][2];  // [dtype][AccumulateMode]
  GrainFn grain[kDTypes][2];   // [dtype][AccumulateMode]
  // Stores past the caches; block and target are aligned to 64 bytes. A stream fence must follow.
  GrainFn streamed_grain[kDTypes];
  // [1, 2, 4 inputs][fp32, bf16][kStore, kAdd, kStore past the caches][all count, `used` do]
  DirectFn direct[3][2][3][2];
  void (*stream_fence)();
  // block[i] += other[i]
  void (*add_block)(float* block, const float* other, uint32_t elements);
  // Zeros in the elements of a grain that do not count; used[i] is of its row i.
  void (*clear_unused)(float* block, const uint8_t* used);
};

extern const ReduceTable kReduceTableV2;
extern const ReduceTable kReduceTableV3;
extern const ReduceTable kReduceTableV4;

}  // namespace zeroshard::reduce_internal

#endif  // ZEROSHARD_WORKER_REDUCE_TABLE_H_
