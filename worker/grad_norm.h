// The squared norm of gradient accumulators, with the finite check in the same pass.
//
// Definition: for each grain (256 elements of a unit, from its start) one fp64 number: 16 lanes,
// lane k adding double(x)^2 of the grain's elements k, k+16, ... in order (the squares are exact in
// fp64), the lanes then added as a tree: k with k+8, k with k+4, k with k+2, k with k+1. Elements
// outside `included` (absent parameters, padding) count as exactly 0. The grains' numbers are added
// exactly (ExactSum), so the result does not depend on how grains are spread over threads, chunks
// and workers. x is the stored accumulator value, before any unscaling; the caller multiplies the
// norm by its grad_scale. The square of an fp32 number never overflows fp64, so the sum is
// non-finite exactly when an included element is.
//
// Pure; any thread.
#ifndef ZEROSHARD_WORKER_GRAD_NORM_H_
#define ZEROSHARD_WORKER_GRAD_NORM_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "base/dtype.h"
#include "device/cpu/isa.h"
#include "worker/exact_sum.h"

namespace zeroshard {

inline constexpr size_t kNormGrain = 256;

// Elements [begin, end).
struct ElementRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// The first element of `data` must be the first of a grain; a last grain cut short counts as filled
// with zeros.
struct NormInput {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  uint64_t elements = 0;
};

// Adds the squares of the elements in `included` (increasing, disjoint, not necessarily apart) that
// lie in the grains [grain_begin, grain_end) to `sum`.
void AddSquares(const NormInput& input, absl::Span<const ElementRange> included,
                uint64_t grain_begin, uint64_t grain_end, ExactSum& sum);

// The same on a chosen instruction set, for tests; `isa` must be supported.
void AddSquaresOn(Isa isa, const NormInput& input, absl::Span<const ElementRange> included,
                  uint64_t grain_begin, uint64_t grain_end, ExactSum& sum);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_GRAD_NORM_H_
