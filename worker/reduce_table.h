// The compiled block loops of one instruction set. Included by kernel files: no standard library.
#ifndef ZEROSHARD_WORKER_REDUCE_TABLE_H_
#define ZEROSHARD_WORKER_REDUCE_TABLE_H_

#include <cstdint>

namespace zeroshard::reduce_internal {

inline constexpr int kDTypes = 3;  // in the order of DType

// block[i] = (or +=) widen(source[begin + i]), times weight in the weighted loops.
using SourceFn = void (*)(float* block, const void* source, uint64_t begin, uint32_t elements,
                          float weight);
// target[begin + i] = round(block[i]), or round(widen(target[begin + i]) + block[i]).
using TargetFn = void (*)(const float* block, void* target, uint64_t begin, uint32_t elements);

struct ReduceTable {
  SourceFn load[kDTypes][2];  // [dtype][weighted]
  SourceFn add[kDTypes][2];
  TargetFn store[kDTypes][2];  // [dtype][AccumulateMode]
  // block[i] += other[i]
  void (*add_block)(float* block, const float* other, uint32_t elements);
};

extern const ReduceTable kReduceTableV2;
extern const ReduceTable kReduceTableV3;
extern const ReduceTable kReduceTableV4;

}  // namespace zeroshard::reduce_internal

#endif  // ZEROSHARD_WORKER_REDUCE_TABLE_H_
