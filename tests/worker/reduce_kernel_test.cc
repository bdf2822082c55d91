#include "worker/reduce_kernel.h"

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "tests/worker/random_values.h"

namespace zeroshard {
namespace {

constexpr size_t kElements = 700;  // two blocks and an odd rest
constexpr size_t kBegin = 3;
constexpr size_t kEnd = 691;

// The canonical order on single numbers, as its definition says.
std::optional<float> Pairwise(std::vector<std::optional<float>> level) {
  while (level.size() > 1) {
    std::vector<std::optional<float>> next;
    for (size_t i = 0; i + 1 < level.size(); i += 2) {
      if (level[i].has_value() && level[i + 1].has_value()) {
        next.push_back(*level[i] + *level[i + 1]);
      } else {
        next.push_back(level[i].has_value() ? level[i] : level[i + 1]);
      }
    }
    if (level.size() % 2 != 0) next.push_back(level.back());
    level = next;
  }
  return level[0];
}

std::optional<float> CanonicalSum(const std::vector<std::optional<float>>& inputs, size_t group) {
  std::vector<std::optional<float>> groups;
  for (size_t begin = 0; begin < inputs.size(); begin += group) {
    const size_t end = std::min(begin + group, inputs.size());
    groups.push_back(Pairwise({inputs.begin() + begin, inputs.begin() + end}));
  }
  return Pairwise(groups);
}

float RoundTo(DType dtype, float value) { return Decode(dtype, Encode(dtype, {value}))[0]; }

struct World {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<ReduceSource> sources;
  std::vector<std::vector<float>> values;  // as fp32, before the weight
  std::unique_ptr<bool[]> present;
};

World RandomWorld(std::mt19937_64& random, uint32_t ranks, Values kind, bool all_present) {
  World world;
  world.present = std::make_unique<bool[]>(ranks);
  world.bytes.reserve(ranks);
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    const DType dtype = kAllDTypes[random() % 3];
    world.bytes.push_back(Encode(dtype, RandomFloats(random, kElements, kind)));
    world.values.push_back(Decode(dtype, world.bytes.back()));
    world.present[rank] = all_present || random() % 3 != 0;
    ReduceSource source = {.data = world.bytes.back().data(), .dtype = dtype};
    source.weighted = random() % 2 == 0;
    source.weight = RandomValue(random, Values::kOrdinary);
    if (!world.present[rank]) source.data = nullptr;
    world.sources.push_back(source);
  }
  return world;
}

// What the accumulator must hold at `element` afterwards.
float Expected(const World& world, size_t group, size_t element, AccumulateMode mode, DType dtype,
               float before) {
  std::vector<std::optional<float>> inputs;
  for (size_t rank = 0; rank < world.sources.size(); ++rank) {
    std::optional<float> input;
    if (world.present[rank]) {
      const ReduceSource& source = world.sources[rank];
      const float value = world.values[rank][element];
      input = source.weighted ? value * source.weight : value;
    }
    inputs.push_back(input);
  }
  const std::optional<float> sum = CanonicalSum(inputs, group);
  if (!sum.has_value() || element < kBegin || element >= kEnd) return before;
  return RoundTo(dtype, mode == AccumulateMode::kAdd ? before + *sum : *sum);
}

TEST(ReduceKernelTest, Bf16SumKeepsWhatBf16WouldLose) {
  const std::vector<std::byte> one = Encode(DType::kBfloat16, {1.0f});
  const std::vector<std::byte> small = Encode(DType::kBfloat16, {0x1p-8f});
  std::vector<ReduceSource> sources(4, {.data = small.data(), .dtype = DType::kBfloat16});
  sources[0].data = one.data();
  for (uint32_t group : {1u, 2u, 3u, 4u}) {
    float sum = 0;
    Reduce(ReductionTree::Create(4, group)->RankPlan().Program(), sources, {.data = &sum}, 0, 1);
    EXPECT_EQ(sum, 1.01171875f);
  }
}

TEST(ReduceKernelTest, AbsenceKeepsMinusZero) {
  const float minus_zero = -0.0f;
  const std::vector<ReduceSource> sources = {{.data = &minus_zero}, {}};
  float sum = 7;
  Reduce(ReductionTree::Create(2, 2)->RankPlan().Program({true, false}), sources, {.data = &sum}, 0,
         1);
  EXPECT_EQ(CanonicalBits(sum), 0x80000000u);
}

TEST(ReduceKernelTest, NothingPresentLeavesTheAccumulator) {
  const std::vector<ReduceSource> sources(2);
  float sum = 7;
  Reduce(ReductionTree::Create(2, 2)->RankPlan().Program({false, false}), sources, {.data = &sum},
         0, 1);
  EXPECT_EQ(sum, 7.0f);
}

class ReduceKernelIsaTest : public ::testing::TestWithParam<Isa> {};

TEST_P(ReduceKernelIsaTest, EqualsTheScalarDefinition) {
  std::mt19937_64 random(3);
  for (uint32_t ranks = 1; ranks <= 9; ++ranks) {
    for (uint32_t group : {1u, 2u, 3u, 4u, ranks}) {
      for (Values kind : {Values::kOrdinary, Values::kAny}) {
        const ReductionPlan plan = ReductionTree::Create(ranks, group)->RankPlan();
        const World world = RandomWorld(random, ranks, kind, random() % 4 == 0);
        const auto program = plan.Program(absl::MakeConstSpan(world.present.get(), ranks));
        const DType dtype = kAllDTypes[random() % 3];
        for (AccumulateMode mode : {AccumulateMode::kStore, AccumulateMode::kAdd}) {
          std::vector<std::byte> bytes = Encode(dtype, RandomFloats(random, kElements, kind));
          const std::vector<float> before = Decode(dtype, bytes);
          const Accumulator accumulator = {.data = bytes.data(), .dtype = dtype, .mode = mode};
          ReduceOn(GetParam(), program, world.sources, accumulator, kBegin, kEnd);
          const std::vector<float> after = Decode(dtype, bytes);
          for (size_t i = 0; i < kElements; ++i) {
            const float expected = Expected(world, group, i, mode, dtype, before[i]);
            ASSERT_EQ(CanonicalBits(after[i]), CanonicalBits(expected))
                << ranks << " ranks, group " << group << ", element " << i;
          }
        }
      }
    }
  }
}

TEST_P(ReduceKernelIsaTest, StoresOneNan) {
  const std::vector<float> nans(64, std::bit_cast<float>(0xff812345u));
  const std::vector<ReduceSource> sources(2, {.data = nans.data()});
  std::vector<float> sum(64);
  ReduceOn(GetParam(), ReductionTree::Create(2, 2)->RankPlan().Program(), sources,
           {.data = sum.data()}, 0, 64);
  for (float value : sum) EXPECT_EQ(std::bit_cast<uint32_t>(value), 0x7fc00000u);
}

TEST_P(ReduceKernelIsaTest, CuttingTheRangeChangesNothing) {
  std::mt19937_64 random(4);
  const ReductionProgram program = ReductionTree::Create(5, 2)->RankPlan().Program();
  const World world = RandomWorld(random, 5, Values::kOrdinary, true);
  std::vector<float> whole(kElements, 0.5f);
  std::vector<float> cut = whole;
  ReduceOn(GetParam(), program, world.sources, {.data = whole.data(), .mode = AccumulateMode::kAdd},
           0, kElements);
  for (size_t begin = 0; begin < kElements;) {
    const size_t end = std::min(kElements, begin + 1 + random() % 300);
    ReduceOn(GetParam(), program, world.sources, {.data = cut.data(), .mode = AccumulateMode::kAdd},
             begin, end);
    begin = end;
  }
  EXPECT_EQ(whole, cut);
}

INSTANTIATE_TEST_SUITE_P(Isas, ReduceKernelIsaTest, ::testing::ValuesIn(SupportedIsas()));

TEST(ConvertElementsTest, AllSixteenBitPatternsAndRoundings) {
  std::mt19937_64 random(5);
  for (DType dtype : {DType::kBfloat16, DType::kFloat16}) {
    std::vector<uint16_t> patterns(65536);
    for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
    std::vector<float> widened(patterns.size());
    ConvertElements(patterns.data(), dtype, widened.data(), DType::kFloat32, patterns.size());
    for (size_t i = 0; i < patterns.size(); ++i) {
      const float expected =
          dtype == DType::kBfloat16 ? Bf16ToFloat(patterns[i]) : Fp16ToFloat(patterns[i]);
      ASSERT_EQ(CanonicalBits(widened[i]), CanonicalBits(expected)) << i;
    }
    std::vector<float> values = widened;  // each exact value and its neighbours between two
    for (float value : widened) {
      values.push_back(std::bit_cast<float>(std::bit_cast<uint32_t>(value) + 0x8000u));
      values.push_back(std::bit_cast<float>(std::bit_cast<uint32_t>(value) + 0x1000u));
      values.push_back(std::bit_cast<float>(static_cast<uint32_t>(random())));
    }
    std::vector<uint16_t> rounded(values.size());
    ConvertElements(values.data(), DType::kFloat32, rounded.data(), dtype, values.size());
    for (size_t i = 0; i < values.size(); ++i) {
      if (values[i] != values[i]) continue;
      ASSERT_EQ(rounded[i],
                dtype == DType::kBfloat16 ? FloatToBf16(values[i]) : FloatToFp16(values[i]))
          << values[i];
    }
  }
}

}  // namespace
}  // namespace zeroshard
