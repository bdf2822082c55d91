// The compiled grain loops of one instruction set. Included by kernel files: no standard library.
#ifndef ZEROSHARD_WORKER_NORM_TABLE_H_
#define ZEROSHARD_WORKER_NORM_TABLE_H_

#include <cstdint>

namespace zeroshard::norm_internal {

inline constexpr int kDTypes = 3;  // in the order of DType
inline constexpr int kGrain = 256;

struct NormTable {
  // The sum of squares of the 256 elements from `begin` on.
  double (*grain[kDTypes])(const void* data, uint64_t begin);
  // The same where only elements with included[i] != 0 count.
  double (*masked[kDTypes])(const void* data, uint64_t begin, uint32_t elements,
                            const uint8_t* included);
};

extern const NormTable kNormTableV2;
extern const NormTable kNormTableV3;
extern const NormTable kNormTableV4;

}  // namespace zeroshard::norm_internal

#endif  // ZEROSHARD_WORKER_NORM_TABLE_H_
