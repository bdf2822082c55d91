// What a tier with durability power leaves on disk (docs/nvme.md, "Power loss").
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/extent_file.h"
#include "storage/nvme_manifest.h"
#include "tests/worker/tier_fixture.h"

namespace zeroshard {
namespace {

using ::testing::ElementsAre;

class TierPowerTest : public ::testing::Test {
 protected:
  TierPowerTest() {
    job_.options().config.set_durability(model::v1::DURABILITY_POWER);
    EXPECT_EQ(job_.Open(), absl::OkStatus());
    EXPECT_EQ(job_.Fill(), absl::OkStatus());
  }

  ManifestFile Manifest() {
    const NvmePath path = Admit(job_.directory(0).path());
    auto file = ManifestFile::Open(path.directory.get(), ManifestFileName(0x4d2, 0),
                                   {.job_id = 0x4d2,
                                    .layout_fingerprint = 7,
                                    .plan_fingerprint = job_.plan().extents().fingerprint(),
                                    .worker = 0,
                                    .chunks = static_cast<uint32_t>(job_.plan().images().size()),
                                    .max_extra = job_.options().manifest_extra});
    EXPECT_TRUE(file.ok()) << file.status();
    return *std::move(file);
  }
  std::vector<uint64_t> Attempts() {
    std::vector<uint64_t> attempts;
    for (const ManifestState& state : Manifest().states()) attempts.push_back(state.attempt);
    return attempts;
  }

  TierJob job_{{.elements = {1000, 700}, .parent = "/dev/shm"}};
};

TEST_F(TierPowerTest, TheStatesThatAStepBeginsWithAreSealed) {
  ASSERT_EQ(job_.Step(1), absl::OkStatus());
  const absl::Status status = job_.tier().Seal("");
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
}

TEST_F(TierPowerTest, TheManifestNamesWhatTheStepWrote) {
  ASSERT_EQ(job_.tier().Seal("zero"), absl::OkStatus());
  EXPECT_THAT(Attempts(), ElementsAre(0));
  ASSERT_EQ(job_.StepAndCommit(1), absl::OkStatus());
  EXPECT_THAT(Attempts(), ElementsAre(1, 0));
  ASSERT_EQ(job_.StepAndCommit(2), absl::OkStatus());
  const ManifestFile file = Manifest();
  ASSERT_EQ(file.states().size(), 2u);
  const NvmeManifest& last = file.copies()[0];
  EXPECT_EQ(last.step, 2u);
  EXPECT_EQ(last.extra, "extra");
  std::set<uint32_t> slots;
  for (const uint32_t image : job_.Images()) {
    EXPECT_EQ(last.images[image].attempt, 2u);
    slots.insert(last.images[image].slot);
    EXPECT_NE(last.images[image].slot, file.copies()[1].images[image].slot);
  }
  EXPECT_EQ(slots.size(), job_.Images().size());
}

TEST_F(TierPowerTest, ASealOfADroppedAttemptIsRevokedBeforeItsSlotsAreWritten) {
  ASSERT_EQ(job_.tier().Seal(""), absl::OkStatus());
  ASSERT_EQ(job_.StepAndCommit(1), absl::OkStatus());
  ASSERT_EQ(job_.Step(2), absl::OkStatus());
  ASSERT_EQ(job_.tier().Seal("two"), absl::OkStatus());
  EXPECT_THAT(Attempts(), ElementsAre(2, 1));
  ASSERT_EQ(job_.tier().Begin(3, 2), absl::OkStatus());
  EXPECT_THAT(Attempts(), ElementsAre(1, 1));
  ASSERT_EQ(job_.StepAndCommit(3), absl::OkStatus());
  EXPECT_THAT(Attempts(), ElementsAre(3, 1));
  ASSERT_EQ(job_.Check(), absl::OkStatus());
}

TEST_F(TierPowerTest, ASealIsNotWrittenAgainByASuccessor) {
  ASSERT_EQ(job_.tier().Seal(""), absl::OkStatus());
  ASSERT_EQ(job_.Step(1), absl::OkStatus());
  ASSERT_EQ(job_.tier().Seal("first"), absl::OkStatus());
  // The worker dies; the job has not committed, and goes on with the attempt.
  ASSERT_EQ(job_.Open(/*recover=*/true, 0), absl::OkStatus());
  ASSERT_EQ(job_.StepAndCommit(1), absl::OkStatus());
  EXPECT_EQ(Manifest().copies()[0].extra, "first");
  ASSERT_EQ(job_.StepAndCommit(2), absl::OkStatus());
  EXPECT_THAT(Attempts(), ElementsAre(2, 1));
  // Or the job had committed it.
  ASSERT_EQ(job_.Step(3), absl::OkStatus());
  ASSERT_EQ(job_.tier().Seal("third"), absl::OkStatus());
  job_.Expect(3);
  ASSERT_EQ(job_.Open(/*recover=*/true, 3), absl::OkStatus());
  ASSERT_EQ(job_.Check(), absl::OkStatus());
  ASSERT_EQ(job_.StepAndCommit(4), absl::OkStatus());
  EXPECT_THAT(Attempts(), ElementsAre(4, 3));
  ASSERT_EQ(job_.Check(), absl::OkStatus());
}

// Puts and moves of the committed attempt.
TEST_F(TierPowerTest, WhatIsWrittenIntoTheCommittedAttemptIsSealedAtOnce) {
  ASSERT_EQ(job_.tier().Seal(""), absl::OkStatus());
  ASSERT_EQ(job_.StepAndCommit(1), absl::OkStatus());
  ASSERT_EQ(job_.Fill(1), absl::OkStatus());
  ASSERT_EQ(job_.tier().Seal("again"), absl::OkStatus());
  EXPECT_EQ(Manifest().copies()[0].extra, "again");
  EXPECT_THAT(Attempts(), ElementsAre(1, 1));
  ASSERT_EQ(job_.Open(/*recover=*/true, 1), absl::OkStatus());
  ASSERT_EQ(job_.StepAndCommit(2), absl::OkStatus());
  EXPECT_THAT(Attempts(), ElementsAre(2, 1));
  EXPECT_EQ(Manifest().copies()[1].extra, "again");
  ASSERT_EQ(job_.Check(), absl::OkStatus());
}

}  // namespace
}  // namespace zeroshard
