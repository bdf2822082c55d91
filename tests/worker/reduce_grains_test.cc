// The sum of whole grains with their squares against a sum and the squares of what it left.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "tests/worker/random_values.h"
#include "worker/grad_norm.h"
#include "worker/reduce_kernel.h"

namespace zeroshard {
namespace {

constexpr size_t kGrains = 5;
constexpr size_t kElements = kGrains * kNormGrain;

// Values aligned to 64 bytes, as accumulators are.
struct alignas(64) Aligned {
  std::byte bytes[kElements * sizeof(float)];
};

struct Inputs {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<ReduceSource> sources;
};

// All of one type without weights, which have loops of their own, or mixed.
Inputs RandomInputs(std::mt19937_64& random, uint32_t ranks, Values kind) {
  Inputs inputs;
  const bool alike = random() % 2 == 0;
  const DType common = kAllDTypes[random() % 3];
  inputs.bytes.reserve(ranks);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const DType dtype = alike ? common : kAllDTypes[random() % 3];
    inputs.bytes.push_back(Encode(dtype, RandomFloats(random, kElements, kind)));
    inputs.sources.push_back({.data = inputs.bytes.back().data(), .dtype = dtype});
    if (!alike && random() % 3 == 0) {
      inputs.sources.back().weighted = true;
      inputs.sources.back().weight = 1.5f;
    }
  }
  return inputs;
}

// How many elements of each row of 16 count.
std::vector<uint8_t> RandomUsed(std::mt19937_64& random) {
  std::vector<uint8_t> used(kElements / 16);
  for (uint8_t& row : used) row = static_cast<uint8_t>(random() % 2 == 0 ? 16 : random() % 17);
  return used;
}

// Zeros in the elements of [begin, end) that do not count.
void ClearUnused(const std::vector<uint8_t>& used, DType dtype, size_t begin, size_t end,
                 std::byte* values) {
  for (size_t i = begin; i < end; ++i) {
    if (i % 16 >= used[i / 16]) std::memset(values + i * SizeOf(dtype), 0, SizeOf(dtype));
  }
}

class ReduceGrainsTest : public ::testing::TestWithParam<Isa> {};

TEST_P(ReduceGrainsTest, SumAndSquaresAreThoseOfTwoPasses) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 400; ++round) {
    const uint32_t ranks = 1 + random() % 9;
    const Values kind = random() % 4 == 0 ? Values::kAny : Values::kOrdinary;
    const Inputs inputs = RandomInputs(random, ranks, kind);
    const ReductionProgram program =
        ReductionTree::Create(ranks, 1 + random() % ranks)->RankPlan().Program();
    const DType dtype = kAllDTypes[random() % 3];
    const AccumulateMode mode = random() % 2 == 0 ? AccumulateMode::kStore : AccumulateMode::kAdd;
    Aligned fused;
    const auto before = Encode(dtype, RandomFloats(random, kElements, kind));
    std::memcpy(fused.bytes, before.data(), before.size());
    const std::vector<uint8_t> used = RandomUsed(random);
    const bool padded = random() % 2 == 0;
    if (padded) ClearUnused(used, dtype, 0, kElements, fused.bytes);
    Aligned apart = fused;
    const size_t begin = random() % kGrains;
    const size_t end = begin + 1 + random() % (kGrains - begin);

    ExactSum squares;
    ReduceGrainsOn(GetParam(), program, inputs.sources,
                   {.data = fused.bytes,
                    .dtype = dtype,
                    .mode = mode,
                    .used = padded ? used.data() : nullptr,
                    .streamed = round % 2 == 0},
                   begin * kNormGrain, end * kNormGrain, squares);
    ReduceOn(Isa::kX86V2, program, inputs.sources,
             {.data = apart.bytes, .dtype = dtype, .mode = mode}, begin * kNormGrain,
             end * kNormGrain);
    if (padded) ClearUnused(used, dtype, begin * kNormGrain, end * kNormGrain, apart.bytes);
    ASSERT_EQ(std::memcmp(fused.bytes, apart.bytes, before.size()), 0) << "round " << round;
    ExactSum expected;
    AddSquaresOn(Isa::kX86V2, {.data = apart.bytes, .dtype = dtype, .elements = kElements},
                 {{0, kElements}}, begin, end, expected);
    squares.Normalize();
    expected.Normalize();
    ASSERT_EQ(std::memcmp(&squares, &expected, sizeof(squares)), 0) << "round " << round;
  }
}

INSTANTIATE_TEST_SUITE_P(Isas, ReduceGrainsTest, ::testing::ValuesIn(SupportedIsas()));

}  // namespace
}  // namespace zeroshard
