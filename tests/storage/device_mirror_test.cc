#include "storage/device_mirror.h"

#include <gtest/gtest.h>

#include <string>

#include "storage/aligned_buffer.h"
#include "storage/layout_proto.h"
#include "tests/fakes/local_job.h"

namespace zeroshard {
namespace {

constexpr uint64_t kJob = 7;

// Worker 0 of two.
class DeviceMirrorTest : public ::testing::Test {
 protected:
  DeviceMirrorTest() {
    model::v1::EngineConfig config =
        MakeConfig(/*stage=*/2, /*ranks=*/2, model::v1::DTYPE_BFLOAT16);
    config.set_data_plane(true);
    config.set_tiered(true);
    config.set_optimizer_tier(model::v1::TIER_GPU);
    config.set_optimizer_ratio(1);
    config.set_parameter_tier(model::v1::TIER_GPU);
    config.set_window(model::v1::WINDOW_COPY);
    config.set_gpu_mirror_steps(3);
    EXPECT_TRUE(MirrorPlan::Exists(config));
    const auto manifest = MakeManifest({1000, 5, 70000}, model::v1::DTYPE_BFLOAT16);
    const Layout layout = *LayoutFromProto(manifest, 2);
    const PartitionPlan partition = *PartitionPlan::Create(layout, config, 0, 1);
    const DevicePlan device = *DevicePlan::Create(layout, partition, config);
    last_unit_ = static_cast<uint32_t>(layout.units().size()) - 1;
    plan_.emplace(MirrorPlan::Create(layout, partition, device, config));
    for (uint32_t i = 0; i < device.images().size(); ++i) end_of_images_ += device.image_bytes(i);
    memory_.emplace(*AlignedBuffer::Make(plan_->bytes()));
    std::fill_n(memory_->data(), plan_->bytes(), std::byte{0});
  }
  DeviceMirror Open(uint64_t job = kJob) {
    auto mirror = DeviceMirror::Open(
        {memory_->data(), plan_->bytes()}, *plan_,
        {.job_id = job, .layout_fingerprint = 1, .plan_fingerprint = 2, .worker = 0});
    EXPECT_TRUE(mirror.ok()) << mirror.status();
    return *mirror;
  }
  std::vector<MirrorPoint> Points(uint64_t job = kJob) const {
    return DeviceMirror::PointsIn({memory_->data(), plan_->bytes()}, job);
  }
  static void Take(DeviceMirror& mirror, uint64_t attempt, uint64_t step) {
    EXPECT_TRUE(mirror.Finish(mirror.Begin(), {attempt, step}, std::to_string(step)).ok());
  }

  std::optional<MirrorPlan> plan_;
  std::optional<AlignedBuffer> memory_;
  uint64_t end_of_images_ = 0;
  uint32_t last_unit_ = 0;
};

TEST_F(DeviceMirrorTest, PlacesDoNotOverlapAndAreAligned) {
  EXPECT_EQ(plan_->bytes() % 8192, 0u);
  EXPECT_GE(plan_->image(0), plan_->numbers() + plan_->numbers_capacity());
  EXPECT_GE(plan_->parameters(0), plan_->image(0) + end_of_images_);
  EXPECT_EQ(plan_->image(0) % kDeviceAlignment, 0u);
  EXPECT_LT(plan_->parameters(last_unit_), plan_->half_bytes());
}

TEST_F(DeviceMirrorTest, HalvesAreWrittenInTurnAndCountOnlyWhenWhole) {
  DeviceMirror mirror = Open();
  EXPECT_FALSE(mirror.Newest().has_value());
  Take(mirror, 11, 10);
  Take(mirror, 21, 20);
  EXPECT_EQ(mirror.Newest(), (MirrorPoint{21, 20}));
  const uint32_t third = mirror.Begin();
  EXPECT_FALSE(Open().Find(11).has_value()) << "its half is being written to";
  EXPECT_EQ(Open().Newest(), (MirrorPoint{21, 20})) << "what a killed process leaves";
  EXPECT_EQ(mirror.numbers(*mirror.Find(21)), "20");
  EXPECT_EQ(Open().Begin(), third) << "a successor takes the same half";
  ASSERT_TRUE(mirror.Finish(third, {31, 30}, "").ok());
  EXPECT_EQ(mirror.Newest(), (MirrorPoint{31, 30}));
  EXPECT_NE(mirror.Begin(), third);
}

TEST_F(DeviceMirrorTest, MirrorsOfAnotherJobOrWorkerDoNotCount) {
  DeviceMirror mirror = Open();
  Take(mirror, 11, 10);
  EXPECT_FALSE(Open(kJob + 1).Newest().has_value());
  EXPECT_TRUE(Points(kJob + 1).empty());
  EXPECT_EQ(Points(), (std::vector<MirrorPoint>{{11, 10}}));
}

TEST_F(DeviceMirrorTest, AHistoryThatWasLeftIsForgotten) {
  DeviceMirror mirror = Open();
  Take(mirror, 11, 10);
  Take(mirror, 21, 20);
  mirror.ForgetAfter(11);
  EXPECT_EQ(Points(), (std::vector<MirrorPoint>{{11, 10}}));
  Take(mirror, 25, 20);
  EXPECT_TRUE(mirror.Find(11).has_value()) << "the half of what was forgotten is taken first";
}

TEST_F(DeviceMirrorTest, EveryBitOfAWholeHalfIsCovered) {
  DeviceMirror mirror = Open();
  const uint32_t half = mirror.Begin();
  for (size_t part = 0; part < plan_->parts().size(); ++part) mirror.Sum(half, part);
  ASSERT_TRUE(mirror.Finish(half, {11, 10}, "numbers").ok());
  const auto intact = [&] {
    if (!mirror.CheckHeader(half).ok()) return false;
    for (size_t part = 0; part < plan_->parts().size(); ++part) {
      if (!mirror.IsIntact(half, part)) return false;
    }
    return true;
  };
  ASSERT_TRUE(intact());
  const auto flips = [&](uint64_t at) {
    mirror.half(half)[at] ^= std::byte{1};
    const bool seen = !intact();
    mirror.half(half)[at] ^= std::byte{1};
    return seen;
  };
  EXPECT_TRUE(flips(48)) << "the attempt";
  EXPECT_TRUE(flips(plan_->numbers())) << "numbers";
  EXPECT_TRUE(flips(plan_->checksums())) << "a checksum";
  uint64_t end = plan_->checksums() + plan_->parts().size() * sizeof(uint64_t);
  for (const MirrorPart& part : plan_->parts()) {
    EXPECT_GE(part.offset, end);
    EXPECT_LT(part.offset - end, kDeviceAlignment) << "nothing lies between";
    end = part.offset + part.bytes;
    EXPECT_TRUE(flips(part.offset)) << part.offset;
    EXPECT_TRUE(flips(end - 1)) << part.offset;
  }
}

TEST_F(DeviceMirrorTest, NumbersThatFindNoRoomAreAnErrorAndNoMirror) {
  DeviceMirror mirror = Open();
  const std::string numbers(plan_->numbers_capacity() + 1, 'x');
  EXPECT_EQ(mirror.Finish(mirror.Begin(), {1, 1}, numbers).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_FALSE(mirror.Newest().has_value());
}

TEST_F(DeviceMirrorTest, MemoryThatIsTooSmallIsRefused) {
  EXPECT_EQ(DeviceMirror::Open({memory_->data(), plan_->bytes() - 1}, *plan_, {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(CommonPointsTest, AreWhatEveryWorkerHas) {
  const MirrorPoint ten{11, 10}, twenty{21, 20}, thirty{31, 30};
  using Points = std::vector<std::vector<MirrorPoint>>;
  const auto newest = [](const Points& points) { return NewestOf(CommonPoints(points)); };
  EXPECT_EQ(newest({{ten, twenty}, {twenty, ten}}), twenty);
  EXPECT_EQ(newest({{thirty, twenty}, {twenty}}), twenty);
  EXPECT_EQ(newest({{thirty, twenty}, {ten}}), std::nullopt);
  EXPECT_EQ(newest({{ten}, {}}), std::nullopt);
  EXPECT_EQ(newest({}), std::nullopt);
  EXPECT_EQ(CommonPoints(Points{{ten, twenty, thirty}, {thirty, ten}}).size(), 2u);
}

}  // namespace
}  // namespace zeroshard
