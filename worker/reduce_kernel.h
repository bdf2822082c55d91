// Sums gradients of several ranks in the canonical order, in fp32, in one pass over memory.
//
// For each element of [begin, end): every present source is widened to fp32 (exact), multiplied by
// its weight if it has one (one fp32 rounding), and the values are added in the order of the
// program (one fp32 rounding per addition). The result is stored in the accumulator, or added to it
// as acc = round(float(acc) + sum); a 16-bit accumulator is rounded to nearest even. NaNs are
// stored in one canonical form, so all instruction sets store the same bits.
//
// Elementwise: cutting a range in any way gives the same bits. The work goes in blocks of 256
// elements, partial sums staying in the first-level cache. Called from any thread; sources,
// accumulator and temporaries never overlap. kAdd changes the accumulator in place and must run
// under the undo record (worker/protected_pass.h) to survive a kill; kStore can simply be run
// again.
#ifndef ZEROSHARD_WORKER_REDUCE_KERNEL_H_
#define ZEROSHARD_WORKER_REDUCE_KERNEL_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "base/dtype.h"
#include "device/cpu/isa.h"
#include "worker/exact_sum.h"
#include "worker/reduction_tree.h"

namespace zeroshard {

struct ReduceSource {
  const void* data =
      nullptr;  // element 0 of the range's index space; unused when the program leaves it out
  DType dtype = DType::kFloat32;
  bool weighted = false;
  float weight = 1.0f;  // used when weighted
};

enum class AccumulateMode : uint8_t { kStore, kAdd };

struct Accumulator {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  AccumulateMode mode = AccumulateMode::kStore;
  // ReduceGrains: for each row of 16 elements, from element 0, how many of them count; the others
  // get zeros (kAdd: and hold zeros before). Null: all count.
  const uint8_t* used = nullptr;
  // ReduceGrains stores past the caches: for accumulators that are larger than they. Needs
  // accumulators aligned to 64 bytes at every grain.
  bool streamed = false;
};

// Elements of the stack of blocks that a program needs; the program's stack_depth must not exceed
// it.
inline constexpr uint32_t kMaxReductionDepth = 40;

// An empty program leaves the accumulator as it is (an absent parameter is not zero).
void Reduce(const ReductionProgram& program, absl::Span<const ReduceSource> sources,
            const Accumulator& accumulator, size_t begin, size_t end);

// The same on a chosen instruction set, for tests; `isa` must be supported.
void ReduceOn(Isa isa, const ReductionProgram& program, absl::Span<const ReduceSource> sources,
              const Accumulator& accumulator, size_t begin, size_t end);

// The same for whole grains (begin and end are multiples of 256) and a program that is not empty;
// adds the grains' numbers of what the accumulator holds then, all elements included, to `squares`
// (worker/grad_norm.h), while they are in registers and in the first-level cache.
void ReduceGrains(const ReductionProgram& program, absl::Span<const ReduceSource> sources,
                  const Accumulator& accumulator, size_t begin, size_t end, ExactSum& squares);
void ReduceGrainsOn(Isa isa, const ReductionProgram& program,
                    absl::Span<const ReduceSource> sources, const Accumulator& accumulator,
                    size_t begin, size_t end, ExactSum& squares);

// destination[i] = convert(source[i]) for i in [0, elements): widening exactly, rounding to nearest
// even.
void ConvertElements(const void* source, DType from, void* destination, DType to, size_t elements);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_REDUCE_KERNEL_H_
