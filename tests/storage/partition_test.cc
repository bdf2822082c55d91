#include "storage/partition.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "storage/block_table.h"

namespace zeroshard {
namespace {

Layout MakeLayout(const std::vector<uint64_t>& sizes, DType dtype, uint32_t workers) {
  std::vector<ParameterSpec> parameters;
  for (size_t i = 0; i < sizes.size(); ++i) {
    parameters.push_back({.name = absl::StrCat("p", i),
                          .shape = {sizes[i]},
                          .dtype = dtype,
                          .module = absl::StrCat("m", i)});
  }
  return *Layout::Create(std::move(parameters), workers);
}

model::v1::EngineConfig Config(uint32_t stage) {
  model::v1::EngineConfig config;
  config.set_stage(stage);
  config.set_accumulator_dtype(model::v1::DTYPE_FLOAT32);
  config.set_window(model::v1::WINDOW_IN_PLACE);
  config.add_state_slots("exp_avg");
  config.add_state_slots("exp_avg_sq");
  return config;
}

TEST(PartitionPlanTest, BytesAreTheLedgersToTheByte) {
  // 2^20 elements: no padding in any way of cutting them by 2 or 4.
  for (uint32_t workers : {1u, 2u, 4u}) {
    const uint64_t share = (uint64_t{1} << 20) / workers;
    const Layout layout = MakeLayout({1 << 19, 1 << 19}, DType::kBfloat16, workers);
    for (uint32_t stage : {1u, 2u, 3u}) {
      model::v1::EngineConfig config = Config(stage);
      const auto plan = PartitionPlan::Create(layout, config, workers - 1, 1);
      ASSERT_TRUE(plan.ok());
      EXPECT_EQ(plan->totals().accumulator, 4 * share);
      EXPECT_EQ(plan->totals().master, 4 * share);
      EXPECT_EQ(plan->totals().state[0] + plan->totals().state[1], 8 * share);
      EXPECT_EQ(plan->totals().shards, 0u);
      config.set_accumulator_dtype(model::v1::DTYPE_BFLOAT16);
      config.set_window(model::v1::WINDOW_COPY);
      const auto copied = PartitionPlan::Create(layout, config, 0, 1);
      EXPECT_EQ(copied->totals().accumulator, 2 * share);
      EXPECT_EQ(copied->totals().shards, stage == 3 ? 2 * share : 0u);
    }
    // Stage 0 replicates everything.
    EXPECT_EQ(PartitionPlan::Create(layout, Config(0), 0, 1)->totals().master, 4u << 20);
  }
}

TEST(PartitionPlanTest, EveryFormOfMasterAndStatesTakesItsBytes) {
  const uint64_t share = uint64_t{1} << 19;
  const Layout layout = MakeLayout({1 << 20}, DType::kBfloat16, 2);
  struct Form {
    model::v1::MasterForm master;
    model::v1::StateFormat states;
    uint64_t master_bytes;
    uint64_t state_bytes;
  };
  using namespace model::v1;  // NOLINT(google-build-using-namespace)
  for (const Form& form : {Form{MASTER_FORM_FLOAT32, STATE_FORMAT_FLOAT32, 4, 8},
                           Form{MASTER_FORM_SPLIT, STATE_FORMAT_FLOAT32, 2, 8},
                           Form{MASTER_FORM_SPLIT, STATE_FORMAT_BFLOAT16, 2, 4},
                           Form{MASTER_FORM_FLOAT32, STATE_FORMAT_INT8, 4, 2},
                           Form{MASTER_FORM_SPLIT, STATE_FORMAT_INT8, 2, 2},
                           Form{MASTER_FORM_NONE, STATE_FORMAT_BFLOAT16, 0, 4}}) {
    EngineConfig config = Config(2);
    config.set_master_form(form.master);
    config.set_state_format(form.states);
    const auto plan = PartitionPlan::Create(layout, config, 1, 1);
    ASSERT_TRUE(plan.ok());
    EXPECT_EQ(plan->totals().master, form.master_bytes * share);
    const uint64_t scales = form.states == STATE_FORMAT_INT8 ? 2 * share / 256 * 4 : 0;
    EXPECT_EQ(plan->totals().state[0] + plan->totals().state[1], form.state_bytes * share + scales);
    config.set_tiered(true);
    const auto tiered = PartitionPlan::Create(layout, config, 1, 1);
    ASSERT_TRUE(tiered.ok());
    EXPECT_EQ(tiered->totals().master, (form.master == MASTER_FORM_NONE ? 2 : 4) * share);
  }
}

TEST(PartitionPlanTest, StageZeroKeepsWholeMastersInTheFormOfSplitOnes) {
  const Layout layout = MakeLayout({1 << 20}, DType::kBfloat16, 2);
  model::v1::EngineConfig config = Config(0);
  config.set_master_form(model::v1::MASTER_FORM_SPLIT);
  const auto plan = PartitionPlan::Create(layout, config, 0, 1);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->totals().master, 4u << 20);
  EXPECT_TRUE(plan->unit(0).canonical);
  config.set_master_form(model::v1::MASTER_FORM_NONE);
  EXPECT_EQ(PartitionPlan::Create(layout, config, 0, 1).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(PartitionPlanTest, BlocksAreWhatAGrainAndAParameterShare) {
  std::vector<ParameterSpec> parameters;
  for (const uint64_t size : {uint64_t{300}, uint64_t{0}, uint64_t{5}, uint64_t{1000}}) {
    parameters.push_back({.name = absl::StrCat("p", parameters.size()),
                          .shape = {size},
                          .dtype = DType::kBfloat16,
                          .module = "m"});
  }
  const Layout layout = *Layout::Create(parameters, 1);
  ASSERT_EQ(layout.units().size(), 1u);
  const BlockTable table = MakeBlockTable(layout, 0);
  for (uint64_t grain = 0; grain <= layout.units()[0].grains; ++grain) {
    EXPECT_EQ(table.first[grain], FirstBlock(layout, 0, grain)) << grain;
  }
  // Every element's block lies among those of its grain, and no block has two parameters.
  std::map<uint64_t, uint32_t> owner;
  for (uint32_t position = 0; position < parameters.size(); ++position) {
    const ParameterPlace& place = layout.place(layout.units()[0].parameters[position]);
    for (uint64_t e = place.offset; e < place.offset + place.elements; ++e) {
      const uint64_t block = e / kGrainElements + table.shift[position];
      EXPECT_GE(block, table.first[e / kGrainElements]);
      EXPECT_LT(block, table.first[e / kGrainElements + 1]);
      EXPECT_EQ(owner.try_emplace(block, position).first->second, position);
    }
  }
}

TEST(PartitionPlanTest, PartsOfTheRegionDoNotOverlap) {
  const Layout layout = MakeLayout({5, 7, 0, 1, 40000, 70000}, DType::kBfloat16, 3);
  model::v1::EngineConfig config = Config(3);
  config.set_window(model::v1::WINDOW_COPY);
  config.set_master_form(model::v1::MASTER_FORM_SPLIT);
  config.set_state_format(model::v1::STATE_FORMAT_INT8);
  for (uint32_t worker = 0; worker < 3; ++worker) {
    const auto plan = PartitionPlan::Create(layout, config, worker, 2);
    ASSERT_TRUE(plan.ok());
    std::set<std::pair<uint64_t, uint64_t>> parts = {
        {plan->undo_offset(), plan->undo_offset() + plan->undo_bytes()}};
    for (uint32_t u = 0; u < layout.units().size(); ++u) {
      const UnitPlan& unit = plan->unit(u);
      auto add = [&](uint64_t offset, uint64_t bytes) {
        if (bytes > 0) parts.insert({offset, offset + bytes});
      };
      add(unit.accumulator, unit.slice.elements() * 4);
      add(unit.master, unit.slice.elements() * 2);
      for (uint64_t state : unit.state) add(state, unit.slice.elements());
      for (uint64_t scales : unit.scales) add(scales, unit.blocks * 4);
      add(unit.shard_data, unit.shard.elements() * 2);
    }
    uint64_t end = sizeof(PartitionHeader);
    for (const auto& [begin, stop] : parts) {
      EXPECT_GE(begin, end);
      end = stop;
    }
    EXPECT_LE(end, plan->bytes());
    EXPECT_EQ(plan->bytes() % 4096, 0u);
  }
}

TEST(PartitionPlanTest, ChunksCoverEverySliceOnce) {
  const Layout layout = MakeLayout({300000, 513, 1}, DType::kFloat32, 2);
  for (uint64_t sub_group : {0, 1, 256, 1000, 1 << 30}) {
    model::v1::EngineConfig config = Config(3);
    config.set_sub_group_elements(sub_group);
    const auto plan = PartitionPlan::Create(layout, config, 1, 1);
    for (uint32_t u = 0; u < layout.units().size(); ++u) {
      const UnitPlan& unit = plan->unit(u);
      uint64_t at = unit.slice.first_element();
      for (uint32_t c = unit.first_chunk; c < unit.first_chunk + unit.chunks; ++c) {
        EXPECT_EQ(plan->chunks()[c].unit, u);
        EXPECT_EQ(plan->chunks()[c].begin, at);
        EXPECT_LE(plan->chunks()[c].elements, kMaxChunkElements);
        at += plan->chunks()[c].elements;
      }
      EXPECT_EQ(at, unit.slice.end * kGrainElements);
    }
  }
}

TEST(PartitionPlanTest, FrozenUnitsAndForwardOnlyJobsHaveNoStates) {
  std::vector<ParameterSpec> parameters = {
      {.name = "frozen", .shape = {40000}, .trainable = false, .module = "a"},
      {.name = "lora", .shape = {40000}, .trainable = true, .module = "b"}};
  const Layout layout = *Layout::Create(parameters, 1);
  const auto plan = PartitionPlan::Create(layout, Config(2), 0, 1);
  EXPECT_FALSE(plan->unit(0).has_optimizer);
  EXPECT_TRUE(plan->unit(1).has_optimizer);
  model::v1::EngineConfig forward = Config(3);
  forward.set_forward_only(true);
  EXPECT_EQ(PartitionPlan::Create(layout, forward, 0, 1)->totals().accumulator, 0u);
  EXPECT_TRUE(PartitionPlan::Create(layout, forward, 0, 1)->chunks().empty());
}

TEST(PartitionPlanTest, BadArgumentsAreRefused) {
  const Layout layout = MakeLayout({10}, DType::kFloat32, 2);
  EXPECT_FALSE(PartitionPlan::Create(layout, Config(3), 2, 1).ok());
  EXPECT_FALSE(PartitionPlan::Create(layout, Config(3), 0, 0).ok());
  model::v1::EngineConfig config = Config(3);
  config.add_state_slots("third");
  EXPECT_FALSE(PartitionPlan::Create(layout, config, 0, 1).ok());
  config = Config(3);
  config.clear_accumulator_dtype();
  EXPECT_FALSE(PartitionPlan::Create(layout, config, 0, 1).ok());
}

TEST(GradientWindowTest, IsBoundedByTheBucketAndHoldsTwoOfTheLargestUnits) {
  const Layout layout = MakeLayout({1 << 20, 1 << 20, 1 << 20, 1 << 20}, DType::kBfloat16, 1);
  model::v1::EngineConfig config = Config(3);
  config.set_reduce_bucket_elements(500000000);
  EXPECT_EQ(GradientWindowBytes(layout, config), 8u << 20) << "everything fits in the bucket";
  config.set_reduce_bucket_elements(1000);
  EXPECT_EQ(GradientWindowBytes(layout, config), 4u << 20) << "two units at least";
  config.set_forward_only(true);
  EXPECT_EQ(GradientWindowBytes(layout, config), 1u << 20) << "room to put parameters";
}

}  // namespace
}  // namespace zeroshard
