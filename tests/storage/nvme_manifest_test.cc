#include "storage/nvme_manifest.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/storage/temp_dir.h"

namespace zeroshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr ManifestIdentity kIdentity{.job_id = 1,
                                     .layout_fingerprint = 2,
                                     .plan_fingerprint = 3,
                                     .worker = 4,
                                     .chunks = 3,
                                     .max_extra = 100};

NvmeManifest Manifest(uint64_t step) {
  return {.sequence = 0,
          .generation = 6,
          .attempt = step + 1,
          .step = step,
          .images = {{0, 6, step, step, 11}, {kNoSlot, 0, 0, 0, 0}, {4, 5, 3, 2, 22}},
          .extra = "numbers of step " + std::to_string(step)};
}

ManifestFile Open(const TempDir& dir) {
  auto file = ManifestFile::Open(dir.fd(), "m", kIdentity);
  EXPECT_TRUE(file.ok()) << file.status();
  return *std::move(file);
}

// Steps 1 and 2 are committed.
void MakeFile(const TempDir& dir) {
  auto file = ManifestFile::Create(dir.fd(), "m", kIdentity);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_TRUE(file->states().empty());
  for (uint64_t step : {1, 2}) {
    ASSERT_TRUE(file->Prepare(Manifest(step)).ok());
    file->Committed();
  }
}

TEST(NvmeManifestTest, ACopyComesBackAsItWas) {
  NvmeManifest manifest = Manifest(7);
  manifest.sequence = 12;
  auto copy = EncodeManifest(kIdentity, manifest);
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(copy->size(), ManifestCopyBytes(kIdentity));
  EXPECT_EQ(copy->size(), 4096u);
  auto back = DecodeManifest(*copy, kIdentity, "f", 0);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(*back, manifest);
}

TEST(NvmeManifestTest, NoFlippedBitGoesUnnoticed) {
  NvmeManifest manifest = Manifest(7);
  std::string copy = *EncodeManifest(kIdentity, manifest);
  const size_t used = 512 + 3 * 40 + manifest.extra.size();
  for (size_t byte = 0; byte < copy.size(); ++byte) {
    copy[byte] = static_cast<char>(copy[byte] ^ 1 << byte % 8);
    auto back = DecodeManifest(copy, kIdentity, "f", 4096);
    if (byte < used) {
      ASSERT_EQ(back.status().code(), absl::StatusCode::kDataLoss) << byte;
      ASSERT_THAT(std::string(back.status().message()), HasSubstr("f at offset ")) << byte;
    } else {
      ASSERT_EQ(*back, manifest) << "bytes after the entries mean nothing";
    }
    copy[byte] = static_cast<char>(copy[byte] ^ 1 << byte % 8);
  }
}

TEST(NvmeManifestTest, ManifestsOfOthersAreNamed) {
  const std::string copy = *EncodeManifest(kIdentity, Manifest(7));
  const auto message = [&](auto change) {
    ManifestIdentity other = kIdentity;
    change(other);
    auto back = DecodeManifest(copy, other, "f", 0);
    EXPECT_EQ(back.status().code(), absl::StatusCode::kDataLoss);
    return std::string(back.status().message());
  };
  EXPECT_THAT(message([](auto& i) { i.job_id = 9; }), HasSubstr("job of the manifest: 1, expec"));
  EXPECT_THAT(message([](auto& i) { i.layout_fingerprint = 9; }), HasSubstr("layout of the manif"));
  EXPECT_THAT(message([](auto& i) { i.plan_fingerprint = 9; }), HasSubstr("plan of the manifest"));
  EXPECT_THAT(message([](auto& i) { i.worker = 9; }), HasSubstr("worker of the manifest: 4"));
  EXPECT_THAT(message([](auto& i) { i.chunks = 2; }), HasSubstr("chunks of the manifest: 3"));
  EXPECT_THAT(message([](auto& i) { i.max_extra = 3; }), HasSubstr("17 extra bytes of 3"));
}

TEST(NvmeManifestTest, WhatDoesNotFitIsRefused) {
  NvmeManifest manifest = Manifest(1);
  manifest.images.pop_back();
  EXPECT_EQ(EncodeManifest(kIdentity, manifest).status().code(),
            absl::StatusCode::kInvalidArgument);
  manifest = Manifest(1);
  manifest.extra.assign(101, 'x');
  EXPECT_EQ(EncodeManifest(kIdentity, manifest).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(NvmeManifestTest, TheFileHoldsTheLastTwoStepsNewestFirst) {
  TempDir dir;
  MakeFile(dir);
  EXPECT_EQ(ManifestFile::Create(dir.fd(), "m", kIdentity).status().code(),
            absl::StatusCode::kAlreadyExists);
  const ManifestFile file = Open(dir);
  EXPECT_THAT(file.states(), ElementsAre(ManifestState{2, 3}, ManifestState{1, 2}));
  EXPECT_EQ(file.copies()[0].extra, "numbers of step 2");
  EXPECT_TRUE(file.problem().ok());
}

TEST(NvmeManifestTest, APreparedStepReplacesTheOlderOneEveryTime) {
  TempDir dir;
  MakeFile(dir);
  ManifestFile file = Open(dir);
  EXPECT_EQ(file.Prepare(Manifest(3)).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(file.Adopt({2, 3}).ok());
  ASSERT_TRUE(file.Prepare(Manifest(3)).ok());
  NvmeManifest again = Manifest(3);  // the first attempt at step 3 was dropped
  again.attempt = 9;
  ASSERT_TRUE(file.Prepare(again).ok());
  EXPECT_THAT(Open(dir).states(), ElementsAre(ManifestState{3, 9}, ManifestState{2, 3}))
      << "the committed one was not touched";
}

TEST(NvmeManifestTest, AdoptingChangesNothing) {
  TempDir dir;
  MakeFile(dir);
  const std::string before = dir.Read("m");
  ManifestFile file = Open(dir);
  // The predecessor prepared 2; the board says that 1 is committed.
  ASSERT_TRUE(file.Adopt({1, 2}).ok());
  EXPECT_EQ(dir.Read("m"), before);
  file.Committed();  // now the job commits 2
  ASSERT_TRUE(file.Prepare(Manifest(3)).ok());
  EXPECT_THAT(Open(dir).states(), ElementsAre(ManifestState{3, 4}, ManifestState{2, 3}));
  ManifestFile third = Open(dir);
  const absl::Status lost = third.Adopt({1, 2});
  EXPECT_EQ(lost.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(lost.message()), HasSubstr("step 1 (attempt 2), which is committed"));
}

TEST(NvmeManifestTest, ResumingForgetsTheOtherState) {
  TempDir dir;
  MakeFile(dir);
  ManifestFile file = Open(dir);
  EXPECT_EQ(file.Resume({5, 5}, 7).status().code(), absl::StatusCode::kNotFound);
  auto manifest = file.Resume({1, 2}, 7);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_EQ(manifest->generation, 7u);
  EXPECT_EQ(manifest->images, Manifest(1).images);
  EXPECT_THAT(Open(dir).states(), ElementsAre(ManifestState{1, 2}, ManifestState{1, 2}));
  EXPECT_EQ(Open(dir).copies()[0].generation, 7u);
  ASSERT_TRUE(file.Prepare(Manifest(2)).ok());
  EXPECT_EQ(Open(dir).copies()[1].generation, 7u) << "the resumed copy is the committed one";
}

TEST(NvmeManifestTest, RevokingLeavesOnlyTheCommittedState) {
  TempDir dir;
  MakeFile(dir);
  ManifestFile file = Open(dir);
  EXPECT_EQ(file.Revoke().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(file.Adopt({1, 2}).ok());  // the predecessor prepared 2, and the job drops it
  ASSERT_TRUE(file.Revoke().ok());
  EXPECT_THAT(Open(dir).states(), ElementsAre(ManifestState{1, 2}, ManifestState{1, 2}));
  ASSERT_TRUE(file.Prepare(Manifest(2)).ok());
  EXPECT_THAT(Open(dir).states(), ElementsAre(ManifestState{2, 3}, ManifestState{1, 2}));
}

TEST(NvmeManifestTest, ATornCopyIsLeftOutAndNamed) {
  TempDir dir;
  MakeFile(dir);
  std::string bytes = dir.Read("m");
  bytes[4096 + 520] ^= 1;
  dir.Write("m", bytes);
  const ManifestFile file = Open(dir);
  EXPECT_THAT(file.states(), ElementsAre(ManifestState{1, 2}));
  EXPECT_THAT(std::string(file.problem().message()),
              HasSubstr("m at offset 4608: torn or flipped entries"));
  bytes.resize(5000);
  dir.Write("m", bytes);
  EXPECT_EQ(ManifestFile::Open(dir.fd(), "m", kIdentity).status().code(),
            absl::StatusCode::kDataLoss);
}

TEST(NvmeManifestTest, TheNewestStateThatAllHaveIsChosen) {
  using States = std::vector<std::vector<ManifestState>>;
  const auto choose = [](const States& states) { return ChooseState(states); };
  EXPECT_EQ(*choose({{{3, 4}, {2, 2}}}), (ManifestState{3, 4}));
  EXPECT_EQ(*choose({{{3, 4}, {2, 2}}, {{2, 2}}}), (ManifestState{2, 2}));
  EXPECT_EQ(*choose({{{3, 4}, {2, 2}}, {{2, 2}, {3, 4}}}), (ManifestState{3, 4}));
  EXPECT_EQ(*choose({{{3, 4}, {2, 2}}, {{3, 5}, {2, 2}}}), (ManifestState{2, 2}))
      << "the same step of another attempt is another state";
  const auto none = choose({{{3, 4}}, {{2, 2}}, {}});
  EXPECT_EQ(none.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(none.status().message()),
              HasSubstr("worker 0 has step 3 (attempt 4); worker 1 has step 2 (attempt 2); worker "
                        "2 has none; restore a checkpoint"));
  EXPECT_FALSE(choose({}).ok());
}

}  // namespace
}  // namespace zeroshard
