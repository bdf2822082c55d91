#include "storage/nvme_plan.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

Layout MakeLayout(const std::vector<uint64_t>& sizes, DType dtype, uint32_t workers = 1) {
  std::vector<ParameterSpec> parameters;
  for (size_t i = 0; i < sizes.size(); ++i) {
    parameters.push_back({.name = absl::StrCat("p", i),
                          .shape = {sizes[i]},
                          .dtype = dtype,
                          .trainable = i % 4 != 3,
                          .module = absl::StrCat("m", i)});
  }
  return *Layout::Create(std::move(parameters), workers);
}

model::v1::EngineConfig Config(model::v1::Tier optimizer, model::v1::Tier parameters) {
  model::v1::EngineConfig config;
  config.set_stage(3);
  config.set_tiered(true);
  config.set_optimizer_tier(optimizer);
  config.set_optimizer_ratio(1);
  config.set_parameter_tier(parameters);
  config.set_accumulator_dtype(model::v1::DTYPE_FLOAT32);
  config.set_window(model::v1::WINDOW_COPY);
  config.set_sub_group_elements(2048);
  config.add_state_slots("exp_avg");
  config.add_state_slots("exp_avg_sq");
  config.mutable_nvme()->set_spares(3);
  return config;
}

struct Planned {
  PartitionPlan partition;
  NvmePlan plan;
};

Planned MakePlan(const Layout& layout, const model::v1::EngineConfig& config, uint32_t worker = 0,
                 std::vector<uint64_t> weights = {1}) {
  auto partition = PartitionPlan::Create(layout, config, worker, 1);
  EXPECT_TRUE(partition.ok()) << partition.status();
  auto plan = NvmePlan::Create(layout, *partition, config, weights);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return {*std::move(partition), *std::move(plan)};
}

const std::vector<uint64_t> kSizes = {1000, 5000, 300, 7000, 257, 4096};

TEST(NvmePlanTest, WhoHasOne) {
  model::v1::EngineConfig config;
  EXPECT_FALSE(NvmePlan::Exists(config));
  config.set_tiered(true);
  EXPECT_TRUE(NvmePlan::Exists(config));
  config.set_tiered(false);
  config.set_parameter_tier(model::v1::TIER_NVME);
  EXPECT_TRUE(NvmePlan::Exists(config));
}

TEST(NvmePlanTest, TheStatesOfAllChunksAreImages) {
  for (const DType dtype : {DType::kBfloat16, DType::kFloat32, DType::kFloat16}) {
    for (const uint32_t workers : {1u, 3u}) {
      const Layout layout = MakeLayout(kSizes, dtype, workers);
      for (uint32_t worker = 0; worker < workers; ++worker) {
        const auto [partition, plan] =
            MakePlan(layout, Config(model::v1::TIER_NVME, model::v1::TIER_HOST), worker);
        ASSERT_EQ(plan.chunks(), partition.chunks().size());
        ASSERT_EQ(plan.images().size(), plan.chunks());
        uint64_t unbacked = 0;
        for (uint32_t chunk = 0; chunk < plan.chunks(); ++chunk) {
          const NvmeImage& image = plan.images()[chunk];
          EXPECT_EQ(image.unit, partition.chunks()[chunk].unit);
          EXPECT_EQ(image.begin, partition.chunks()[chunk].begin);
          EXPECT_EQ(image.elements, partition.chunks()[chunk].elements);
          EXPECT_TRUE(image.home);
          EXPECT_FALSE(image.parameters);
          ASSERT_EQ(image.arrays.size(), 3u) << "a tiered job has a master of every type";
          for (size_t i = 0; i < image.arrays.size(); ++i) {
            const ChunkArray& array = plan.shape(chunk).arrays()[i];
            EXPECT_EQ(array.bytes, image.elements * 4);
            EXPECT_EQ(array.bytes, image.arrays[i].array.bytes);
            EXPECT_LE(image.arrays[i].offset + array.bytes, partition.bytes());
            // Pages that it shares with its neighbours stay.
            const uint64_t end = (image.arrays[i].offset + array.bytes) / 4096;
            const uint64_t begin = (image.arrays[i].offset + 4095) / 4096;
            unbacked += end > begin ? (end - begin) * 4096 : 0;
          }
          EXPECT_EQ(plan.parameter_image_of(chunk), kNoImage);
          EXPECT_LE(plan.shape(chunk).image_bytes(), plan.max_image_bytes());
        }
        EXPECT_EQ(plan.unbacked_bytes(), unbacked);
      }
    }
  }
}

// Every element of a shard on the tier is in exactly one image, with the same elements as the
// states that belong to it.
TEST(NvmePlanTest, ParameterImagesCoverTheShardsAndMatchTheirStates) {
  for (const uint32_t workers : {1u, 2u}) {
    const Layout layout = MakeLayout(kSizes, DType::kBfloat16, workers);
    for (uint32_t worker = 0; worker < workers; ++worker) {
      const auto [partition, plan] =
          MakePlan(layout, Config(model::v1::TIER_NVME, model::v1::TIER_NVME), worker);
      std::vector<std::pair<uint64_t, uint64_t>> ranges;
      for (uint32_t u = 0; u < layout.units().size(); ++u) {
        const UnitPlan& unit = partition.unit(u);
        const NvmePlan::ImageRange range = plan.parameter_images(u);
        EXPECT_EQ(range.count > 0, !unit.resident && unit.shard.elements() > 0);
        uint64_t next = unit.shard.first_element();
        for (uint32_t i = range.first; i < range.first + range.count; ++i) {
          const NvmeImage& image = plan.images()[i];
          EXPECT_TRUE(image.parameters);
          EXPECT_TRUE(image.home);
          EXPECT_EQ(image.unit, u);
          EXPECT_EQ(image.begin, next);
          EXPECT_LE(image.elements, partition.chunk_elements());
          next += image.elements;
          ASSERT_EQ(image.arrays.size(), 1u);
          EXPECT_EQ(image.arrays[0].array.bytes, image.elements * 2);
          ranges.push_back(
              {image.arrays[0].offset, image.arrays[0].offset + image.arrays[0].array.bytes});
        }
        EXPECT_TRUE(range.count == 0 || next == unit.shard.first_element() + unit.shard.elements());
      }
      std::sort(ranges.begin(), ranges.end());
      for (size_t i = 1; i < ranges.size(); ++i) EXPECT_LE(ranges[i - 1].second, ranges[i].first);
      for (uint32_t chunk = 0; chunk < plan.chunks(); ++chunk) {
        const uint32_t parameters = plan.parameter_image_of(chunk);
        if (partition.unit(plan.images()[chunk].unit).resident) {
          EXPECT_EQ(parameters, kNoImage);
          continue;
        }
        ASSERT_LT(parameters, plan.images().size());
        EXPECT_EQ(plan.images()[parameters].unit, plan.images()[chunk].unit);
        EXPECT_EQ(plan.images()[parameters].begin, plan.images()[chunk].begin);
        EXPECT_EQ(plan.images()[parameters].elements, plan.images()[chunk].elements);
      }
    }
  }
}

TEST(NvmePlanTest, ARatioPutsThatPartOfTheChunksOnTheTierEvenly) {
  const Layout layout = MakeLayout({64 * 2048}, DType::kBfloat16);
  for (const double ratio : {0.0, 0.25, 0.5, 0.9, 1.0}) {
    model::v1::EngineConfig config = Config(model::v1::TIER_NVME, model::v1::TIER_HOST);
    config.set_optimizer_ratio(ratio);
    const auto [partition, plan] = MakePlan(layout, config);
    ASSERT_EQ(plan.chunks(), 64u);
    double home = 0;
    for (uint32_t chunk = 0; chunk < plan.chunks(); ++chunk) {
      home += plan.images()[chunk].home ? 1 : 0;
      EXPECT_NEAR(home, ratio * (chunk + 1), 1.0) << "in any run from the first on";
      EXPECT_GT(plan.images()[chunk].elements, 0u) << "the others can be moved there";
    }
    EXPECT_NEAR(home, ratio * 64, 1.0);
    EXPECT_EQ(plan.unbacked_bytes(), static_cast<uint64_t>(home) * 2048 * 12) << "whole pages";
  }
}

// States that may be moved to the tier have room there and rest on the host.
TEST(NvmePlanTest, WhatMayBeMovedHasRoomAndNoHome) {
  const Layout layout = MakeLayout(kSizes, DType::kBfloat16);
  const auto [partition, plan] =
      MakePlan(layout, Config(model::v1::TIER_HOST, model::v1::TIER_HOST));
  for (uint32_t chunk = 0; chunk < plan.chunks(); ++chunk) {
    EXPECT_FALSE(plan.images()[chunk].home);
    EXPECT_GE(plan.extents().slot(2 * chunk).bytes, plan.shape(chunk).image_bytes());
  }
  EXPECT_EQ(plan.unbacked_bytes(), 0u);
}

TEST(NvmePlanTest, WithoutTieredStatesOnlyParametersHaveRoom) {
  const Layout layout = MakeLayout(kSizes, DType::kBfloat16);
  model::v1::EngineConfig config = Config(model::v1::TIER_HOST, model::v1::TIER_NVME);
  config.set_tiered(false);
  const auto [partition, plan] = MakePlan(layout, config);
  EXPECT_GT(plan.images().size(), plan.chunks());
  for (uint32_t i = 0; i < plan.images().size(); ++i) {
    EXPECT_EQ(plan.images()[i].elements > 0, i >= plan.chunks());
    EXPECT_EQ(plan.extents().slot(2 * i).bytes > 0, i >= plan.chunks());
    EXPECT_EQ(plan.images()[i].home, i >= plan.chunks());
  }
}

TEST(NvmePlanTest, TheFirstParametersStayOnTheHostUpToTheirBound) {
  const Layout layout = MakeLayout(kSizes, DType::kBfloat16);
  model::v1::EngineConfig config = Config(model::v1::TIER_NVME, model::v1::TIER_NVME);
  uint32_t before = ~0u;
  for (const uint64_t bound : {0, 1000, 6000, 20000}) {
    config.set_host_parameter_elements(bound);
    const auto [partition, plan] = MakePlan(layout, config);
    uint64_t host = 0;
    uint32_t on_tier = 0;
    for (uint32_t u = 0; u < layout.units().size(); ++u) {
      if (partition.unit(u).resident) continue;
      if (plan.parameter_images(u).count == 0) host += layout.units()[u].data_elements;
      on_tier += plan.parameter_images(u).count > 0 ? 1 : 0;
    }
    EXPECT_LE(host, bound);
    EXPECT_LE(on_tier, before);
    before = on_tier;
  }
  EXPECT_EQ(before, 0u);
}

TEST(NvmePlanTest, TheTablesRegionHasRoomForTableAndTargets) {
  const Layout layout = MakeLayout(kSizes, DType::kBfloat16);
  const auto [partition, plan] =
      MakePlan(layout, Config(model::v1::TIER_NVME, model::v1::TIER_NVME), 0, {2, 1});
  const SlotTableShape shape = plan.table_shape(5, 6);
  EXPECT_EQ(shape.chunks, plan.images().size());
  EXPECT_EQ(shape.slots, 2 * plan.images().size() + 2 * 3) << "3 spares on each of two paths";
  EXPECT_EQ(shape.job_id, 5u);
  EXPECT_EQ(shape.layout_fingerprint, 6u);
  EXPECT_EQ(shape.plan_fingerprint, plan.extents().fingerprint());
  EXPECT_GE(plan.targets_offset(), SlotTable::Bytes(shape.chunks, shape.slots));
  EXPECT_EQ(plan.targets_offset() % 64, 0u);
  EXPECT_GE(plan.table_bytes(), plan.targets_offset() + 8 * plan.images().size());
  EXPECT_EQ(plan.table_bytes() % 4096, 0u);
}

TEST(NvmePlanTest, ThePlanIsAFunctionOfItsInputs) {
  const Layout layout = MakeLayout(kSizes, DType::kBfloat16);
  const model::v1::EngineConfig config = Config(model::v1::TIER_NVME, model::v1::TIER_NVME);
  const auto fingerprint = [&](const model::v1::EngineConfig& c, std::vector<uint64_t> weights) {
    return MakePlan(layout, c, 0, std::move(weights)).plan.extents().fingerprint();
  };
  EXPECT_EQ(fingerprint(config, {1}), fingerprint(config, {1}));
  EXPECT_NE(fingerprint(config, {1}), fingerprint(config, {1, 1}));
  model::v1::EngineConfig other = config;
  other.set_sub_group_elements(4096);
  EXPECT_NE(fingerprint(config, {1}), fingerprint(other, {1}));
  auto partition = PartitionPlan::Create(layout, config, 0, 1);
  const std::vector<uint64_t> zero = {0};
  EXPECT_EQ(NvmePlan::Create(layout, *partition, config, zero).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace zeroshard
