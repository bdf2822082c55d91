#include "worker/optim/kernels.h"

#include <algorithm>

#include "worker/optim/kernel_table.h"

namespace zeroshard {
namespace {

using optim_internal::KernelArrays;
using optim_internal::UpdateFn;
using optim_internal::UpdateTable;

static_assert(static_cast<int>(DType::kFloat32) == 0 && static_cast<int>(DType::kBfloat16) == 1 &&
              static_cast<int>(DType::kFloat16) == 2);

const UpdateTable& TableOf(Isa isa) {
  switch (isa) {
    case Isa::kX86V4:
      return optim_internal::kUpdateTableV4;
    case Isa::kX86V3:
      return optim_internal::kUpdateTableV3;
    case Isa::kX86V2:
      break;
  }
  return optim_internal::kUpdateTableV2;
}

}  // namespace

void ApplyUpdateOn(Isa isa, const UpdatePass& pass, uint64_t begin, uint64_t end) {
  const UpdateArrays& a = pass.arrays;
  const int output = a.out == nullptr ? 0 : 1 + static_cast<int>(a.out_dtype);
  const UpdateFn update =
      TableOf(isa).update[static_cast<int>(pass.kind)][static_cast<int>(a.grad_dtype)][output];
  const KernelArrays arrays = {
      a.grad, a.param, {static_cast<float*>(a.state[0]), static_cast<float*>(a.state[1])}, a.out};
  auto segment =
      std::upper_bound(pass.segments.begin(), pass.segments.end(), begin,
                       [](uint64_t element, const UpdateSegment& s) { return element < s.end; });
  for (; segment != pass.segments.end() && segment->begin < end; ++segment) {
    const uint64_t from = std::max(begin, segment->begin);
    const uint64_t to = std::min(end, segment->end);
    if (from < to) update(arrays, from, to, pass.grad_scale, pass.args[segment->args]);
  }
}

void ApplyUpdate(const UpdatePass& pass, uint64_t begin, uint64_t end) {
  static const Isa isa = BestIsa();
  ApplyUpdateOn(isa, pass, begin, end);
}

}  // namespace zeroshard
