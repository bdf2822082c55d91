#include "storage/device_plan.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "storage/device_table.h"
#include "storage/nvme_plan.h"

namespace zeroshard {
namespace {

using model::v1::Tier;

constexpr uint64_t kJob = 17;
constexpr uint64_t kLayout = 18;

Layout MakeLayout(const std::vector<uint64_t>& sizes, DType dtype, uint32_t workers) {
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

model::v1::EngineConfig Config(Tier tier, double ratio, uint32_t stage = 2) {
  model::v1::EngineConfig config;
  config.set_stage(stage);
  config.set_data_plane(true);
  config.set_tiered(true);
  config.set_optimizer_tier(tier);
  config.set_optimizer_ratio(ratio);
  config.set_parameter_tier(model::v1::TIER_GPU);
  config.set_accumulator_dtype(model::v1::DTYPE_FLOAT32);
  config.set_window(model::v1::WINDOW_COPY);
  config.set_sub_group_elements(2048);
  config.add_state_slots("exp_avg");
  config.add_state_slots("exp_avg_sq");
  return config;
}

struct Planned {
  PartitionPlan partition;
  DevicePlan plan;
};

Planned MakePlan(const Layout& layout, const model::v1::EngineConfig& config, uint32_t worker = 0) {
  auto partition = PartitionPlan::Create(layout, config, worker, 1);
  EXPECT_TRUE(partition.ok()) << partition.status();
  auto plan = DevicePlan::Create(layout, *partition, config);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return {*std::move(partition), *std::move(plan)};
}

// Units of many chunks, of one and a bit, and of a few grains.
const std::vector<uint64_t> kSizes = {20000, 20, 30000, 7000, 17000, 300, 2304, 40000};

struct Part {
  uint64_t begin, end;
};

void ExpectApart(std::vector<Part> parts, uint64_t bytes) {
  std::sort(parts.begin(), parts.end(), [](Part a, Part b) { return a.begin < b.begin; });
  for (size_t i = 0; i < parts.size(); ++i) {
    EXPECT_EQ(parts[i].begin % 256, 0u);
    EXPECT_LE(parts[i].end, i + 1 < parts.size() ? parts[i + 1].begin : bytes);
  }
}

TEST(DevicePlanTest, PartsOfTheSharedRegionDoNotOverlap) {
  for (const DType dtype : {DType::kBfloat16, DType::kFloat32}) {
    const Layout layout = MakeLayout(kSizes, dtype, 3);
    for (uint32_t worker = 0; worker < 3; ++worker) {
      const auto [partition, plan] = MakePlan(layout, Config(model::v1::TIER_GPU, 1), worker);
      std::vector<Part> parts;
      for (uint32_t u = 0; u < layout.units().size(); ++u) {
        const DeviceUnit& unit = plan.unit(u);
        EXPECT_EQ(unit.accumulator == kAbsent, !layout.units()[u].trainable);
        if (unit.accumulator != kAbsent) {
          parts.push_back(
              {unit.accumulator, unit.accumulator + partition.unit(u).slice.elements() * 4});
        }
        EXPECT_EQ(unit.presence % 128, 0u);
        EXPECT_EQ(unit.presence, plan.unit(0).presence + u * 128);
        parts.push_back({unit.parameters,
                         unit.parameters + partition.unit(u).shard.elements() * SizeOf(dtype)});
      }
      const uint64_t first = plan.unit(0).presence;
      parts.push_back({first, first + layout.units().size() * 128});
      ExpectApart(parts, plan.shared_bytes());
      EXPECT_EQ(plan.shared_bytes() % kDevicePage, 0u);
    }
  }
}

TEST(DevicePlanTest, SlotsAreOfAFewSizesAndDoNotOverlap) {
  const Layout layout = MakeLayout(kSizes, DType::kBfloat16, 2);
  const auto [partition, plan] = MakePlan(layout, Config(model::v1::TIER_GPU, 1), 1);
  ASSERT_GT(plan.classes().size(), 1u);
  std::vector<Part> parts;
  for (uint32_t slot = 0; slot < plan.slots(); ++slot) {
    parts.push_back(
        {plan.slot_offset(slot), plan.slot_offset(slot) + plan.class_of_slot(slot).bytes});
  }
  for (uint32_t u = 0; u < layout.units().size(); ++u) {
    const uint64_t table = plan.parameter_table(u);
    parts.push_back({table, table + layout.units()[u].parameters.size() * 16});
  }
  parts.push_back({plan.presence(0), plan.presence(0) + layout.units().size() * 128});
  parts.push_back({plan.squares(), plan.squares() + 2 * kDeviceSquares * 8});
  ExpectApart(parts, plan.states_bytes());
  std::vector<uint32_t> of_class(plan.classes().size());
  for (uint32_t image = 0; image < plan.images().size(); ++image) {
    const DeviceImage& planned = plan.images()[image];
    const uint64_t bytes = plan.classes()[planned.slot_class].bytes;
    EXPECT_LE(plan.image_bytes(image), bytes);
    const bool smallest = planned.slot_class + 1 == plan.classes().size();
    EXPECT_TRUE(smallest || plan.classes()[planned.slot_class + 1].bytes < plan.image_bytes(image));
    ++of_class[planned.slot_class];
  }
  for (size_t i = 0; i < of_class.size(); ++i) {
    EXPECT_EQ(plan.classes()[i].slots, of_class[i] + std::min(of_class[i], kDeviceSpares));
  }
}

// What is copied between a slot and an image of the NVMe tier lies at the same distances.
TEST(DevicePlanTest, ArraysLieAsInAnImageOfTheNvmeTier) {
  const Layout layout = MakeLayout(kSizes, DType::kBfloat16, 2);
  model::v1::EngineConfig config = Config(model::v1::TIER_NVME, 1);
  config.set_state_format(model::v1::STATE_FORMAT_INT8);
  config.mutable_nvme()->set_spares(2);
  const auto [partition, plan] = MakePlan(layout, config);
  const uint64_t weights[] = {1};
  const auto nvme = NvmePlan::Create(layout, partition, config, weights);
  ASSERT_TRUE(nvme.ok()) << nvme.status();
  ASSERT_EQ(nvme->chunks(), plan.images().size());
  for (uint32_t image = 0; image < nvme->chunks(); ++image) {
    const DeviceImage& planned = plan.images()[image];
    ASSERT_EQ(planned.elements, nvme->images()[image].elements);
    ASSERT_EQ(planned.arrays.size(), nvme->images()[image].arrays.size());
    for (size_t i = 0; i < planned.arrays.size(); ++i) {
      EXPECT_EQ(plan.array_offset(image, i) - plan.array_offset(image, 0),
                nvme->shape(image).offset(i) - nvme->shape(image).offset(0));
      EXPECT_EQ(planned.arrays[i].offset, nvme->images()[image].arrays[i].offset);
    }
  }
}

TEST(DevicePlanTest, WhatRestsElsewhereIsTheNvmePlansShare) {
  const Layout layout = MakeLayout(kSizes, DType::kBfloat16, 2);
  for (const double ratio : {0.25, 0.5, 1.0}) {
    model::v1::EngineConfig config = Config(model::v1::TIER_NVME, ratio);
    config.mutable_nvme()->set_spares(2);
    const auto [partition, plan] = MakePlan(layout, config);
    const uint64_t weights[] = {1};
    const auto nvme = NvmePlan::Create(layout, partition, config, weights);
    ASSERT_TRUE(nvme.ok());
    config.set_optimizer_tier(model::v1::TIER_HOST);
    const auto [same, on_host] = MakePlan(layout, config);
    for (uint32_t image = 0; image < nvme->chunks(); ++image) {
      EXPECT_NE(nvme->images()[image].home, plan.images()[image].home);
      EXPECT_EQ(on_host.images()[image].home, plan.images()[image].home);
    }
    EXPECT_EQ(plan.slots() == 0, ratio == 1.0);
    EXPECT_EQ(plan.home_bytes() == 0, ratio == 1.0);
    EXPECT_LE(plan.unbacked_bytes(), plan.home_bytes());
  }
  const auto [partition, unset] = MakePlan(layout, Config(model::v1::TIER_HOST, 0));
  EXPECT_EQ(unset.slots(), 0u) << "no ratio is all of it";
}

TEST(DevicePlanTest, OtherJobsAreRefused) {
  const Layout layout = MakeLayout(kSizes, DType::kBfloat16, 1);
  model::v1::EngineConfig config = Config(model::v1::TIER_GPU, 1);
  const auto partition = PartitionPlan::Create(layout, config, 0, 1);
  config.set_stage(0);
  EXPECT_FALSE(DevicePlan::Create(layout, *partition, config).ok());
  config = Config(model::v1::TIER_GPU, 1);
  config.set_tiered(false);
  EXPECT_FALSE(DevicePlan::Create(layout, *partition, config).ok());
  config = Config(model::v1::TIER_GPU, 1);
  config.set_data_plane(false);
  const auto resident = PartitionPlan::Create(layout, config, 0, 1);
  EXPECT_FALSE(DevicePlan::Exists(config));
  config.set_data_plane(true);
  EXPECT_TRUE(DevicePlan::Exists(config));
  EXPECT_FALSE(DevicePlan::Create(layout, *resident, config).ok()) << "stage 2: in a window";
}

struct Memory {
  explicit Memory(const DevicePlan& plan) : words(plan.table_bytes() / 64) {}
  struct alignas(64) Line {
    std::byte bytes[64] = {};
  };
  std::span<std::byte> bytes() { return std::as_writable_bytes(std::span(words)); }
  std::vector<Line> words;
};

TEST(DeviceTableTest, UpdatesGoFromSlotToSlotAndSurviveTheirWriter) {
  const Layout layout = MakeLayout(kSizes, DType::kBfloat16, 1);
  const auto [partition, plan] = MakePlan(layout, Config(model::v1::TIER_GPU, 1));
  Memory memory(plan);
  auto table = DeviceTable::Open(memory.bytes(), plan, kJob, kLayout);
  ASSERT_TRUE(table.ok()) << table.status();
  for (uint32_t image = 0; image < plan.images().size(); ++image) {
    EXPECT_FALSE(table->Holds(image));
    const auto slot = table->Reserve(image, DeviceTable::Purpose::kMove);
    ASSERT_TRUE(slot.has_value()) << image;
    table->Name(image, *slot, 3);
  }
  const uint32_t free = table->free_slots();
  EXPECT_EQ(free, plan.slots() - plan.images().size());
  const auto before = *table->place(0);
  const auto spare = table->Reserve(0, DeviceTable::Purpose::kUpdate);
  ASSERT_TRUE(spare.has_value());
  EXPECT_NE(*spare, before.slot);
  EXPECT_EQ(*table->place(0), before) << "until it is named";
  // Who dies here leaves the old image and a free slot.
  auto successor = DeviceTable::Open(memory.bytes(), plan, kJob, kLayout);
  ASSERT_TRUE(successor.ok()) << successor.status();
  EXPECT_EQ(*successor->place(0), before);
  EXPECT_EQ(successor->free_slots(), free);
  table->Name(0, *spare, 4);
  EXPECT_EQ(*table->place(0), (DeviceTable::Place{*spare, 4}));
  EXPECT_EQ(table->free_slots(), free) << "the old slot is free";
  table->Forget(0);
  EXPECT_FALSE(table->Holds(0));
  EXPECT_EQ(table->free_slots(), free + 1);
  table->SetTarget(2, DeviceTarget::kHost);
  successor = DeviceTable::Open(memory.bytes(), plan, kJob, kLayout);
  ASSERT_TRUE(successor.ok());
  EXPECT_EQ(successor->target(2), DeviceTarget::kHost);
  EXPECT_EQ(successor->target(1), DeviceTarget::kAsPlanned);
  EXPECT_FALSE(successor->Holds(0));
  EXPECT_TRUE(successor->Holds(1));
}

// What is moved in leaves room for updates; an update may take the last slot.
TEST(DeviceTableTest, MovesLeaveRoomForUpdates) {
  const Layout layout = MakeLayout({20000}, DType::kBfloat16, 1);
  const auto [partition, plan] = MakePlan(layout, Config(model::v1::TIER_HOST, 0.5));
  Memory memory(plan);
  auto table = DeviceTable::Open(memory.bytes(), plan, kJob, kLayout);
  ASSERT_TRUE(table.ok());
  uint32_t held = 0;
  for (uint32_t image = 0; image < plan.images().size(); ++image) {
    const auto slot = table->Reserve(image, DeviceTable::Purpose::kMove);
    if (!slot.has_value()) continue;
    table->Name(image, *slot, 0);
    ++held;
  }
  EXPECT_LT(held, plan.images().size());
  for (uint32_t image = 0; image < plan.images().size(); ++image) {
    if (!table->Holds(image)) continue;
    const auto slot = table->Reserve(image, DeviceTable::Purpose::kUpdate);
    ASSERT_TRUE(slot.has_value()) << image;
    table->Release(*slot);
  }
}

TEST(DeviceTableTest, OthersTablesAreRefused) {
  const Layout layout = MakeLayout(kSizes, DType::kBfloat16, 1);
  const auto [partition, plan] = MakePlan(layout, Config(model::v1::TIER_GPU, 1));
  const auto [other_partition, other] = MakePlan(layout, Config(model::v1::TIER_HOST, 0.5));
  Memory memory(plan);
  EXPECT_FALSE(DeviceTable::Open(memory.bytes().subspan(8), plan, kJob, kLayout).ok());
  auto table = DeviceTable::Open(memory.bytes(), plan, kJob, kLayout);
  ASSERT_TRUE(table.ok());
  EXPECT_TRUE(
      absl::IsDataLoss(DeviceTable::Open(memory.bytes(), plan, kJob + 1, kLayout).status()));
  EXPECT_TRUE(
      absl::IsDataLoss(DeviceTable::Open(memory.bytes(), plan, kJob, kLayout + 1).status()));
  EXPECT_TRUE(absl::IsDataLoss(DeviceTable::Open(memory.bytes(), other, kJob, kLayout).status()));
  table->Name(0, 0, 1);
  table->Name(1, 0, 1);
  EXPECT_TRUE(absl::IsDataLoss(DeviceTable::Open(memory.bytes(), plan, kJob, kLayout).status()))
      << "two in a slot";
  table->Name(1, 1, 1);
  EXPECT_TRUE(DeviceTable::Open(memory.bytes(), plan, kJob, kLayout).ok());
  // Word 1 names a slot that there is not.
  const uint64_t word = uint64_t{1} << 24 | (plan.slots() + 5);
  std::memcpy(memory.bytes().data() + 128 + 8, &word, sizeof(word));
  EXPECT_TRUE(absl::IsDataLoss(DeviceTable::Open(memory.bytes(), plan, kJob, kLayout).status()));
}

}  // namespace
}  // namespace zeroshard
