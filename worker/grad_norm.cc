#include "worker/grad_norm.h"

#include <algorithm>
#include <cstring>

#include "worker/norm_table.h"

namespace zeroshard {
namespace {

using norm_internal::NormTable;

static_assert(kNormGrain == norm_internal::kGrain);

const NormTable& TableOf(Isa isa) {
  switch (isa) {
    case Isa::kX86V4:
      return norm_internal::kNormTableV4;
    case Isa::kX86V3:
      return norm_internal::kNormTableV3;
    case Isa::kX86V2:
      break;
  }
  return norm_internal::kNormTableV2;
}

}  // namespace

void AddSquaresOn(Isa isa, const NormInput& input, absl::Span<const ElementRange> included,
                  uint64_t grain_begin, uint64_t grain_end, ExactSum& sum) {
  const NormTable& table = TableOf(isa);
  const int dtype = static_cast<int>(input.dtype);
  auto range =
      std::upper_bound(included.begin(), included.end(), grain_begin * kNormGrain,
                       [](uint64_t element, const ElementRange& r) { return element < r.end; });
  for (uint64_t grain = grain_begin; grain < grain_end; ++grain) {
    const uint64_t begin = grain * kNormGrain;
    const uint64_t end = std::min<uint64_t>(begin + kNormGrain, input.elements);
    while (range != included.end() && range->end <= begin) ++range;
    if (range == included.end() || begin >= end) return;
    if (range->begin >= end) continue;
    if (end - begin == kNormGrain && range->begin <= begin && end <= range->end) {
      sum.Add(table.grain[dtype](input.data, begin));
      continue;
    }
    uint8_t mask[kNormGrain] = {};
    for (auto r = range; r != included.end() && r->begin < end; ++r) {
      const uint64_t from = std::max(begin, r->begin);
      const uint64_t to = std::min(end, r->end);
      if (from < to) std::memset(mask + (from - begin), 1, to - from);
    }
    sum.Add(table.masked[dtype](input.data, begin, static_cast<uint32_t>(end - begin), mask));
  }
}

void AddSquares(const NormInput& input, absl::Span<const ElementRange> included,
                uint64_t grain_begin, uint64_t grain_end, ExactSum& sum) {
  static const Isa isa = BestIsa();
  AddSquaresOn(isa, input, included, grain_begin, grain_end, sum);
}

}  // namespace zeroshard
