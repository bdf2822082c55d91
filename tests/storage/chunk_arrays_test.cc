#include "storage/chunk_arrays.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "storage/extent_plan.h"

namespace zeroshard {
namespace {

Layout MakeLayout(const std::vector<uint64_t>& sizes, DType dtype, uint32_t workers) {
  std::vector<ParameterSpec> parameters;
  for (size_t i = 0; i < sizes.size(); ++i) {
    parameters.push_back({.name = absl::StrCat("p", i),
                          .shape = {sizes[i]},
                          .dtype = dtype,
                          .trainable = i % 4 != 3,
                          .module = absl::StrCat("m", i / 2)});
  }
  return *Layout::Create(std::move(parameters), workers);
}

model::v1::EngineConfig Config(uint32_t stage, uint32_t slots) {
  model::v1::EngineConfig config;
  config.set_stage(stage);
  config.set_accumulator_dtype(model::v1::DTYPE_FLOAT32);
  config.set_window(model::v1::WINDOW_IN_PLACE);
  config.set_sub_group_elements(4096);
  for (uint32_t s = 0; s < slots; ++s) config.add_state_slots(absl::StrCat("state", s));
  return config;
}

// Every byte of master, states and scales of the region belongs to exactly one chunk.
void ExpectExactCover(const Layout& layout, const PartitionPlan& plan) {
  std::vector<std::pair<uint64_t, uint64_t>> ranges;  // begin, end in the region
  uint64_t bytes = 0;
  for (uint32_t chunk = 0; chunk < plan.chunks().size(); ++chunk) {
    ChunkArrayKind last = {};
    for (const PartitionArray& part : ChunkArraysOf(layout, plan, chunk)) {
      EXPECT_LT(last, part.array.kind) << "one of each kind, in order";
      last = part.array.kind;
      ranges.push_back({part.offset, part.offset + part.array.bytes});
      bytes += part.array.bytes;
    }
  }
  std::sort(ranges.begin(), ranges.end());
  for (size_t i = 1; i < ranges.size(); ++i) ASSERT_LE(ranges[i - 1].second, ranges[i].first);
  const PartitionBytes& totals = plan.totals();
  EXPECT_EQ(bytes, totals.master + totals.state[0] + totals.state[1]);
}

// Every form of states and master, on every worker.
void ExpectExactCoverInAllForms(const Layout& layout, uint32_t stage, uint32_t slots) {
  namespace v1 = model::v1;
  for (auto states : {v1::STATE_FORMAT_FLOAT32, v1::STATE_FORMAT_BFLOAT16, v1::STATE_FORMAT_INT8}) {
    for (auto master : {v1::MASTER_FORM_FLOAT32, v1::MASTER_FORM_SPLIT, v1::MASTER_FORM_NONE}) {
      if (stage == 0 && master == v1::MASTER_FORM_NONE) continue;
      v1::EngineConfig config = Config(stage, slots);
      config.set_state_format(states);
      config.set_master_form(master);
      config.set_tiered(stage > 1);
      for (uint32_t worker = 0; worker < layout.workers(); ++worker) {
        auto plan = PartitionPlan::Create(layout, config, worker, 1);
        ASSERT_TRUE(plan.ok()) << plan.status();
        ExpectExactCover(layout, *plan);
      }
    }
  }
}

TEST(ChunkArraysTest, ChunksCoverMasterAndStatesExactly) {
  const std::vector<uint64_t> sizes = {1, 255, 256, 257, 511, 512, 513, 32767, 32768, 70000, 5, 9};
  for (uint32_t workers : {1u, 2u, 3u}) {
    for (DType dtype : {DType::kBfloat16, DType::kFloat32, DType::kFloat16}) {
      const Layout layout = MakeLayout(sizes, dtype, workers);
      for (uint32_t stage : {0u, 1u, 3u}) {
        for (uint32_t slots : {0u, 1u, 2u}) ExpectExactCoverInAllForms(layout, stage, slots);
      }
    }
  }
}

TEST(ChunkArraysTest, AFullChunkOfAdamWTakesTwelveBytesAnElementAndAHeader) {
  const Layout layout = MakeLayout({100000}, DType::kBfloat16, 1);
  model::v1::EngineConfig config = Config(3, 2);
  config.set_sub_group_elements(0);
  auto plan = PartitionPlan::Create(layout, config, 0, 1);
  ASSERT_TRUE(plan.ok()) << plan.status();
  auto bytes = ImageBytesOf(layout, *plan);
  ASSERT_TRUE(bytes.ok()) << bytes.status();
  ASSERT_EQ(bytes->size(), 2u);
  EXPECT_EQ((*bytes)[0], 65536u * 12 + 4096);
  EXPECT_EQ((*bytes)[1], 102u * 4096 + 4096) << "(391 * 256 - 65536) * 12 bytes, rounded up";
  auto extents = ExtentPlan::Create(*bytes, std::vector<uint64_t>{1}, 2);
  ASSERT_TRUE(extents.ok()) << extents.status();
  EXPECT_EQ(extents->slot(5).bytes, (*bytes)[0]);
}

TEST(ChunkArraysTest, AChunkWithNothingToStoreHasNoImage) {
  const Layout layout = MakeLayout({1000}, DType::kFloat32, 1);
  auto plan = PartitionPlan::Create(layout, Config(2, 0), 0, 1);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_TRUE(ChunkArraysOf(layout, *plan, 0).empty());
  EXPECT_EQ(*ImageBytesOf(layout, *plan), std::vector<uint64_t>{0});
}

}  // namespace
}  // namespace zeroshard
