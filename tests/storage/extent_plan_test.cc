#include "storage/extent_plan.h"

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

ExtentPlan Plan(const std::vector<uint64_t>& images, const std::vector<uint64_t>& weights,
                uint32_t spares) {
  auto plan = ExtentPlan::Create(images, weights, spares);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return *std::move(plan);
}

struct Input {
  std::vector<uint64_t> images;
  std::vector<uint64_t> weights;
  uint32_t spares = 0;
};

Input RandomInput(uint64_t seed) {
  std::mt19937_64 random(seed);
  Input input;
  const uint64_t largest = 1 + random() % 200;
  const bool equal = random() % 2 == 0;
  for (size_t i = 1 + random() % 400; i > 0; --i) {
    const uint64_t pages = equal ? largest : random() % (largest + 1);
    input.images.push_back(4096 * pages);
  }
  for (size_t i = 1 + random() % 8; i > 0; --i) input.weights.push_back(1 + random() % 7000);
  input.spares = random() % 5;
  return input;
}

TEST(ExtentPlanTest, TheExampleOfTheFormatPage) {
  const ExtentPlan plan = Plan({12288}, {1}, 1);
  ASSERT_EQ(plan.slots(), 3u);
  EXPECT_EQ(plan.slot(0), (SlotPlace{0, 4096, 12288}));
  EXPECT_EQ(plan.slot(1), (SlotPlace{0, 16384, 12288}));
  EXPECT_EQ(plan.slot(2), (SlotPlace{0, 28672, 12288}));
  EXPECT_EQ(plan.file_bytes(0), 40960u);
  EXPECT_EQ(plan.step_bytes(0), 12288u);
}

TEST(ExtentPlanTest, SlotsAreAlignedAndFillTheirFilesWithoutOverlap) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const Input input = RandomInput(seed);
    const ExtentPlan plan = Plan(input.images, input.weights, input.spares);
    ASSERT_EQ(plan.slots(), 2 * input.images.size() + input.spares * input.weights.size());
    std::map<uint32_t, std::vector<SlotPlace>> by_path;
    for (uint32_t s = 0; s < plan.slots(); ++s) {
      const SlotPlace& slot = plan.slot(s);
      ASSERT_EQ(slot.offset % 4096, 0u);
      const bool home = s < 2 * input.images.size();
      const uint64_t need =
          home ? input.images[s / 2] : *std::max_element(input.images.begin(), input.images.end());
      ASSERT_EQ(slot.bytes, need);
      if (home) {
        ASSERT_EQ(slot.path, plan.path_of(s / 2));
      }
      by_path[slot.path].push_back(slot);
    }
    uint64_t total = 0;
    for (uint32_t path = 0; path < plan.paths(); ++path) {
      auto& slots = by_path[path];
      std::sort(slots.begin(), slots.end(), [](const SlotPlace& a, const SlotPlace& b) {
        return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
      });
      uint64_t end = kExtentFirstSlot;
      for (const SlotPlace& slot : slots) {
        ASSERT_EQ(slot.offset, end) << "seed " << seed;
        end += slot.bytes;
      }
      ASSERT_EQ(plan.file_bytes(path), end);
      total += end;
    }
    ASSERT_EQ(plan.total_bytes(), total);
  }
}

TEST(ExtentPlanTest, AnyRunFromTheFirstChunkKeepsTheWeightsToWithinOneChunk) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    const Input input = RandomInput(seed);
    const ExtentPlan plan = Plan(input.images, input.weights, input.spares);
    double weight = 0;
    for (uint64_t w : input.weights) weight += static_cast<double>(w);
    const auto largest =
        static_cast<double>(*std::max_element(input.images.begin(), input.images.end()));
    std::vector<double> dealt(plan.paths());
    double total = 0;
    for (uint32_t k = 0; k < plan.chunks(); ++k) {
      dealt[plan.path_of(k)] += static_cast<double>(input.images[k]);
      total += static_cast<double>(input.images[k]);
      for (uint32_t path = 0; path < plan.paths(); ++path) {
        const double share = total * static_cast<double>(input.weights[path]) / weight;
        ASSERT_LE(std::abs(dealt[path] - share), largest * 1.000001)
            << "seed " << seed << " chunk " << k << " path " << path << " of " << plan.paths();
      }
    }
    for (uint32_t path = 0; path < plan.paths(); ++path) {
      ASSERT_EQ(static_cast<double>(plan.step_bytes(path)), dealt[path]);
    }
  }
}

TEST(ExtentPlanTest, AStepAlternatesBetweenDrives) {
  const ExtentPlan plan = Plan(std::vector<uint64_t>(8, 4096), {3, 1}, 0);
  std::vector<uint32_t> order;
  for (uint32_t k = 0; k < 8; ++k) order.push_back(plan.path_of(k));
  for (size_t i = 0; i < 8; i += 4) {
    EXPECT_EQ(std::count(order.begin() + i, order.begin() + i + 4, 1u), 1) << i;
  }
  EXPECT_EQ(plan.step_bytes(0), 6u * 4096);
}

TEST(ExtentPlanTest, TheUnitOfTheWeightsDoesNotMatter) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Input input = RandomInput(seed);
    const ExtentPlan plan = Plan(input.images, input.weights, 1);
    for (uint64_t& weight : input.weights) weight *= 1000000007;
    const ExtentPlan scaled = Plan(input.images, input.weights, 1);
    for (uint32_t s = 0; s < plan.slots(); ++s) ASSERT_EQ(plan.slot(s), scaled.slot(s));
  }
}

// A change here makes files of earlier builds unreadable: raise the version of the plan.
TEST(ExtentPlanTest, PlansAreStable) {
  const std::vector<uint64_t> images = {8192, 4096, 0, 12288, 8192};
  const ExtentPlan plan = Plan(images, {2, 1}, 1);
  const std::vector<SlotPlace> expected = {{0, 4096, 8192},   {0, 12288, 8192},  {1, 4096, 4096},
                                           {1, 8192, 4096},   {0, 20480, 0},     {0, 20480, 0},
                                           {0, 20480, 12288}, {0, 32768, 12288}, {1, 12288, 8192},
                                           {1, 20480, 8192},  {0, 45056, 12288}, {1, 28672, 12288}};
  ASSERT_EQ(plan.slots(), expected.size());
  for (uint32_t s = 0; s < plan.slots(); ++s) {
    EXPECT_EQ(plan.slot(s).path, expected[s].path) << s;
    EXPECT_EQ(plan.slot(s).offset, expected[s].offset) << s;
    EXPECT_EQ(plan.slot(s).bytes, expected[s].bytes) << s;
  }
  EXPECT_EQ(plan.fingerprint(), Plan(images, {2, 1}, 1).fingerprint());
  EXPECT_EQ(plan.fingerprint(), 2178103663552726917u);
}

TEST(ExtentPlanTest, TheFingerprintCoversAllInput) {
  const uint64_t base = Plan({8192, 4096}, {2, 1}, 1).fingerprint();
  EXPECT_NE(base, Plan({4096, 8192}, {2, 1}, 1).fingerprint());
  EXPECT_NE(base, Plan({8192, 4096, 0}, {2, 1}, 1).fingerprint());
  EXPECT_NE(base, Plan({8192, 4096}, {1, 2}, 1).fingerprint());
  EXPECT_NE(base, Plan({8192, 4096}, {2}, 1).fingerprint());
  EXPECT_NE(base, Plan({8192, 4096}, {2, 1}, 2).fingerprint());
}

TEST(ExtentPlanTest, BadInputIsRefused) {
  using Words = std::vector<uint64_t>;
  const auto message = [](const Words& images, const Words& weights, uint32_t spares) {
    auto plan = ExtentPlan::Create(images, weights, spares);
    EXPECT_EQ(plan.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(plan.status().message());
  };
  EXPECT_THAT(message({}, {1}, 0), HasSubstr("0 chunks"));
  EXPECT_THAT(message({4096}, {}, 0), HasSubstr("0 nvme paths; 1 to 64"));
  EXPECT_THAT(message({4096}, Words(65, 1), 0), HasSubstr("65 nvme paths"));
  EXPECT_THAT(message({4096}, {1, 0}, 0), HasSubstr("nvme path 1 has the weight 0"));
  EXPECT_THAT(message({4096}, {kMaxPathWeight + 1}, 0), HasSubstr("has the weight"));
  EXPECT_THAT(message({4096, 100}, {1}, 0), HasSubstr("a chunk image of 100 bytes"));
  EXPECT_THAT(message({uint64_t{1} << 59, 4096}, {1}, 0), HasSubstr("more than"));
  EXPECT_THAT(message({uint64_t{1} << 50}, {1, 1}, 1 << 20), HasSubstr("more than"));
  EXPECT_THAT(message({4096}, {1}, (1 << 20) + 1), HasSubstr("spare slots"));
}

}  // namespace
}  // namespace zeroshard
