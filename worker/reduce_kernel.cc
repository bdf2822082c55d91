#include "worker/reduce_kernel.h"

#include <algorithm>

#include "base/check.h"
#include "worker/reduce_table.h"

namespace zeroshard {
namespace {

using reduce_internal::ReduceTable;

constexpr uint32_t kBlock = reduce_internal::kGrain;
// Grains of one call of a direct loop.
constexpr uint32_t kDirectGrains = 16;

static_assert(static_cast<int>(DType::kFloat32) == 0 && static_cast<int>(DType::kBfloat16) == 1 &&
              static_cast<int>(DType::kFloat16) == 2);
static_assert(static_cast<int>(AccumulateMode::kStore) == 0 &&
              static_cast<int>(AccumulateMode::kAdd) == 1);

const ReduceTable& TableOf(Isa isa) {
  switch (isa) {
    case Isa::kX86V4:
      return reduce_internal::kReduceTableV4;
    case Isa::kX86V3:
      return reduce_internal::kReduceTableV3;
    case Isa::kX86V2:
      break;
  }
  return reduce_internal::kReduceTableV2;
}

Isa ChosenIsa() {
  static const Isa isa = BestIsa();
  return isa;
}

struct BlockStack {
  alignas(64) float blocks[kMaxReductionDepth][kBlock];
};

// The sum of 1, 2 or 4 sources of one type without weights, which one loop computes.
struct SmallTree {
  uint32_t steps = 0;   // of the program; 0: there is none
  uint32_t inputs = 0;  // 1, 2 or 4
  const void* data[4] = {};
};

// The largest one that the program's steps from `at` on begin with. That step is a push.
SmallTree TreeAt(const ReductionProgram& program, absl::Span<const ReduceSource> sources,
                 size_t at) {
  using Kind = ReductionStep::Kind;
  constexpr Kind kQuad[] = {Kind::kPush, Kind::kAddInput, Kind::kPush, Kind::kAddInput,
                            Kind::kAddTop};
  const DType dtype = sources[program.steps[at].input].dtype;
  SmallTree tree;
  uint32_t matching = 0;
  uint32_t inputs = 0;
  for (; matching < 5 && at + matching < program.steps.size(); ++matching) {
    const ReductionStep& step = program.steps[at + matching];
    if (step.kind != kQuad[matching]) break;
    if (step.kind == Kind::kAddTop) continue;
    const ReduceSource& source = sources[step.input];
    if (source.dtype != dtype || source.weighted) break;
    tree.data[inputs++] = source.data;
  }
  tree.steps = matching == 5 ? 5 : std::min(matching, 2u);
  tree.inputs = matching == 5 ? 4 : tree.steps;
  return tree;
}

// Runs the program on elements [begin, begin + elements) and returns the block with the sum.
float* SumBlock(const ReduceTable& table, const ReductionProgram& program,
                absl::Span<const ReduceSource> sources, uint64_t begin, uint32_t elements,
                BlockStack& stack) {
  float(*top)[kBlock] = stack.blocks - 1;
  for (size_t at = 0; at < program.steps.size(); ++at) {
    const ReductionStep& step = program.steps[at];
    if (step.kind == ReductionStep::Kind::kAddTop) {
      table.add_block(top[-1], top[0], elements);
      --top;
      continue;
    }
    const ReduceSource& source = sources[step.input];
    const int dtype = static_cast<int>(source.dtype);
    const int weighted = source.weighted ? 1 : 0;
    if (step.kind == ReductionStep::Kind::kAddInput) {
      table.add[dtype][weighted](*top, source.data, begin, elements, source.weight);
      continue;
    }
    ++top;
    const SmallTree tree = TreeAt(program, sources, at);
    if (tree.inputs < 2) {
      table.load[dtype][weighted](*top, source.data, begin, elements, source.weight);
      continue;
    }
    (tree.inputs == 4 ? table.quad : table.pair)[dtype](*top, tree.data, begin, elements);
    at += tree.steps - 1;
  }
  return *top;
}

void CheckProgram(const ReductionProgram& program, absl::Span<const ReduceSource> sources) {
  ZS_CHECK(program.stack_depth <= kMaxReductionDepth, "reduction tree too deep");
  ZS_CHECK(program.inputs == sources.size(), "sources do not match the program");
}

}  // namespace

void ReduceOn(Isa isa, const ReductionProgram& program, absl::Span<const ReduceSource> sources,
              const Accumulator& accumulator, size_t begin, size_t end) {
  if (program.steps.empty()) return;
  CheckProgram(program, sources);
  const ReduceTable& table = TableOf(isa);
  const auto store =
      table.store[static_cast<int>(accumulator.dtype)][static_cast<int>(accumulator.mode)];
  BlockStack stack;
  for (uint64_t at = begin; at < end; at += kBlock) {
    const auto elements = static_cast<uint32_t>(std::min<uint64_t>(kBlock, end - at));
    store(SumBlock(table, program, sources, at, elements, stack), accumulator.data, at, elements);
  }
}

void Reduce(const ReductionProgram& program, absl::Span<const ReduceSource> sources,
            const Accumulator& accumulator, size_t begin, size_t end) {
  ReduceOn(ChosenIsa(), program, sources, accumulator, begin, end);
}

void ReduceGrainsOn(Isa isa, const ReductionProgram& program,
                    absl::Span<const ReduceSource> sources, const Accumulator& accumulator,
                    size_t begin, size_t end, ExactSum& squares) {
  ZS_CHECK(!program.steps.empty() && begin % kBlock == 0 && end % kBlock == 0, "no whole grains");
  CheckProgram(program, sources);
  const ReduceTable& table = TableOf(isa);
  const int mode = static_cast<int>(accumulator.mode);
  const bool streamed = accumulator.streamed && accumulator.mode == AccumulateMode::kStore;
  const SmallTree tree = TreeAt(program, sources, 0);
  const DType source_dtype = sources[program.steps[0].input].dtype;
  if (tree.inputs > 0 && tree.steps == program.steps.size() &&
      accumulator.dtype == DType::kFloat32 && source_dtype != DType::kFloat16) {
    const auto direct = table.direct[tree.inputs / 2][static_cast<int>(source_dtype)]
                                    [streamed ? 2 : mode][accumulator.used != nullptr ? 1 : 0];
    double parts[kDirectGrains];
    for (uint64_t at = begin; at < end; at += kDirectGrains * kBlock) {
      const auto grains =
          static_cast<uint32_t>(std::min<uint64_t>(kDirectGrains, (end - at) / kBlock));
      direct(tree.data, accumulator.data, at, grains, accumulator.used, parts);
      for (uint32_t i = 0; i < grains; ++i) squares.Add(parts[i]);
    }
  } else {
    const int dtype = static_cast<int>(accumulator.dtype);
    const auto grain = streamed ? table.streamed_grain[dtype] : table.grain[dtype][mode];
    BlockStack stack;
    for (uint64_t at = begin; at < end; at += kBlock) {
      float* block = SumBlock(table, program, sources, at, kBlock, stack);
      if (accumulator.used != nullptr) {
        table.clear_unused(block, accumulator.used + at / reduce_internal::kRow);
      }
      squares.Add(grain(block, accumulator.data, at));
    }
  }
  if (streamed) table.stream_fence();
}

void ReduceGrains(const ReductionProgram& program, absl::Span<const ReduceSource> sources,
                  const Accumulator& accumulator, size_t begin, size_t end, ExactSum& squares) {
  ReduceGrainsOn(ChosenIsa(), program, sources, accumulator, begin, end, squares);
}

void ConvertElements(const void* source, DType from, void* destination, DType to, size_t elements) {
  const ReduceTable& table = TableOf(ChosenIsa());
  const auto load = table.load[static_cast<int>(from)][0];
  const auto store = table.store[static_cast<int>(to)][0];
  alignas(64) float block[kBlock];
  for (uint64_t at = 0; at < elements; at += kBlock) {
    const auto count = static_cast<uint32_t>(std::min<uint64_t>(kBlock, elements - at));
    load(block, source, at, count, 1.0f);
    store(block, destination, at, count);
  }
}

}  // namespace zeroshard
