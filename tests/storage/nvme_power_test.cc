// Power loss at every point of several steps, with every subset of the sectors that were written
// and not flushed: the job has exactly the committed step, or the one after it, whole.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "storage/nvme_manifest.h"
#include "storage/slot_table.h"
#include "tests/storage/power_log.h"
#include "tests/storage/slot_model.h"
#include "tests/storage/temp_dir.h"

namespace zeroshard {
namespace {

constexpr size_t kSlots = 0;  // files of the log
constexpr size_t kManifest = 1;
constexpr ManifestIdentity kIdentity{.job_id = 77,
                                     .layout_fingerprint = 88,
                                     .plan_fingerprint = 5,
                                     .worker = 0,
                                     .chunks = kModelChunks,
                                     .max_extra = 1000};

// More than one sector, and different in each attempt.
std::string Extra(uint64_t step, uint64_t salt) {
  return absl::StrCat(step, "/", salt, std::string(600, static_cast<char>('a' + salt % 26)));
}

std::string Text(std::span<const std::byte> bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

enum class Flushes { kAll, kNotBeforeTheManifest };

// One worker with a region, a disk and a manifest file, whose writes are logged.
class Worker {
 public:
  // A fresh job: step 0 is committed and on disk.
  Worker() {
    // The slots have held images before, which keeps the sectors that differ few.
    for (uint32_t slot = 0; slot < world_.slots(); ++slot) {
      SlotImage old{slot, 0, 0, 0, 0};
      world_.disk.Land({slot, ModelImage(slot / 2, old, 99)}, kAllModelUnits);
    }
    EXPECT_EQ(FormatModel(world_), "");
    auto file = ManifestFile::Create(dir_.fd(), "manifest", kIdentity);
    EXPECT_TRUE(file.ok()) << file.status();
    file_.emplace(*std::move(file));
    auto table = SlotTable::Adopt(world_.region(), world_.shape());
    EXPECT_TRUE(table.ok()) << table.status();
    table_.emplace(*std::move(table));
    EXPECT_TRUE(file_->Prepare(Manifest(0, 0, 0)).ok());
    file_->Committed();
    StartLog();
  }
  // After a power loss that left `files`.
  Worker(const PowerFiles& files, const ManifestState& state) {
    dir_.Write("manifest", files[kManifest]);
    std::transform(files[kSlots].begin(), files[kSlots].end(), world_.disk.bytes.begin(),
                   [](char c) { return static_cast<std::byte>(c); });
    auto file = ManifestFile::Open(dir_.fd(), "manifest", kIdentity);
    EXPECT_TRUE(file.ok()) << file.status();
    file_.emplace(*std::move(file));
    StartLog();
    EXPECT_EQ(file_->Prepare({}).code(), absl::StatusCode::kFailedPrecondition);
    auto manifest = file_->Resume(state, 9);
    EXPECT_TRUE(manifest.ok()) << manifest.status();
    LogManifest();
    auto table = SlotTable::Format(world_.region(), world_.shape(), 9, manifest->attempt);
    EXPECT_TRUE(table.ok()) << table.status();
    table_.emplace(*std::move(table));
    for (uint32_t chunk = 0; chunk < kModelChunks; ++chunk) {
      EXPECT_TRUE(table_->Restore(chunk, manifest->images[chunk]).ok());
    }
    world_.committed = {state.step, 0};
  }

  // Everything up to a manifest on disk.
  void PrepareStep(uint64_t attempt, uint64_t salt, Flushes flushes = Flushes::kAll) {
    const uint64_t step = world_.committed.step + 1;
    EXPECT_TRUE(table_->Begin(attempt).ok());
    for (uint32_t chunk = 0; chunk < kModelChunks; ++chunk) {
      auto slot = table_->Reserve(chunk);
      ASSERT_TRUE(slot.ok()) << slot.status();
      SlotImage image{*slot, table_->generation(), attempt, step, 0};
      const std::vector<std::byte> bytes = ModelImage(chunk, image, salt);
      world_.disk.Land({*slot, bytes}, kAllModelUnits);
      log_->Write(kSlots, *slot * kModelImageBytes, Text(bytes));
      EXPECT_TRUE(table_->Complete(chunk, image).ok());
    }
    if (flushes == Flushes::kAll) log_->Flush(kSlots);
    EXPECT_TRUE(file_->Prepare(Manifest(step, attempt, salt)).ok());
    LogManifest();
    if (flushes != Flushes::kAll) log_->Flush(kSlots);
    next_ = {step, salt};
    attempt_ = attempt;
  }
  // The job drops what was prepared.
  void RevokeStep() {
    EXPECT_TRUE(file_->Revoke().ok());
    LogManifest();
  }
  // What the job does when all workers have prepared.
  void CommitStep() {
    log_->Mark(next_.step);
    world_.committed = next_;
    EXPECT_TRUE(table_->Commit(attempt_).ok());
    file_->Committed();
  }

  const PowerLog& log() const { return *log_; }
  PowerFiles files() const { return {Text(world_.disk.bytes), dir_.Read("manifest")}; }

 private:
  void StartLog() { log_.emplace(files()); }
  void LogManifest() {
    log_->Write(kManifest, 0, dir_.Read("manifest"));
    log_->Flush(kManifest);
  }
  NvmeManifest Manifest(uint64_t step, uint64_t attempt, uint64_t salt) const {
    NvmeManifest manifest{0, table_->generation(), attempt, step, 0, {}, Extra(step, salt)};
    for (uint32_t chunk = 0; chunk < kModelChunks; ++chunk) {
      auto image = table_->Prepared(chunk);
      manifest.images.push_back(image.has_value() ? *image : *table_->Current(chunk));
    }
    return manifest;
  }

  TempDir dir_;
  ModelWorld world_{0};
  std::optional<SlotTable> table_;
  std::optional<ManifestFile> file_;
  std::optional<PowerLog> log_;
  ModelState next_;
  uint64_t attempt_ = 0;
};

// What is found after one power loss.
struct Found {
  uint64_t mark = 0;  // the last step that the job committed
  PowerFiles files;
  std::vector<ManifestState> states;
  std::vector<bool> whole;  // all images of the state are there
};

// The salt of an attempt is its number.
Found Inspect(const TempDir& dir, const PowerFiles& files, uint64_t mark) {
  dir.Write("found", files[kManifest]);
  auto file = ManifestFile::Open(dir.fd(), "found", kIdentity);
  EXPECT_TRUE(file.ok()) << file.status();
  ModelDisk disk(2 * kModelChunks);
  std::transform(files[kSlots].begin(), files[kSlots].end(), disk.bytes.begin(),
                 [](char c) { return static_cast<std::byte>(c); });
  Found found{mark, files, file->states(), {}};
  for (const NvmeManifest& manifest : file->copies()) {
    EXPECT_EQ(manifest.extra, Extra(manifest.step, manifest.attempt));
    bool whole = true;
    for (uint32_t chunk = 0; chunk < kModelChunks; ++chunk) {
      const SlotImage& image = manifest.images[chunk];
      whole = whole && CheckModelImage(disk, chunk, image, {image.step, image.attempt}).empty();
    }
    found.whole.push_back(whole);
  }
  return found;
}

std::vector<Found> AllLosses(const PowerLog& log, uint64_t mark) {
  const TempDir dir;
  std::vector<Found> all;
  log.ForEachLoss(mark, [&](const PowerFiles& files, uint64_t last) {
    all.push_back(Inspect(dir, files, last));
  });
  return all;
}

// The job resumes at a step that is whole on all workers, the committed one or the next.
bool ResumesWell(std::span<const Found* const> workers) {
  std::vector<std::vector<ManifestState>> states;
  for (const Found* worker : workers) states.push_back(worker->states);
  auto chosen = ChooseState(states);
  if (!chosen.ok()) return false;
  const uint64_t mark = workers.front()->mark;
  if (chosen->step != mark && chosen->step != mark + 1) return false;
  return std::all_of(workers.begin(), workers.end(), [&](const Found* worker) {
    const auto at = std::find(worker->states.begin(), worker->states.end(), *chosen);
    return worker->whole[at - worker->states.begin()];
  });
}

std::vector<Found> LossesInThreeSteps(Flushes flushes) {
  Worker worker;
  for (uint64_t step = 1; step <= 3; ++step) {
    worker.PrepareStep(step, step, flushes);
    worker.CommitStep();
  }
  return AllLosses(worker.log(), 0);
}

TEST(NvmePowerTest, OneWorkerHasTheCommittedStepOrTheNext) {
  const std::vector<Found> losses = LossesInThreeSteps(Flushes::kAll);
  EXPECT_GT(losses.size(), 400u);
  uint64_t next = 0;
  for (const Found& loss : losses) {
    const Found* const workers[] = {&loss};
    ASSERT_TRUE(ResumesWell(workers)) << "after step " << loss.mark;
    next += loss.states[0].step == loss.mark + 1 ? 1 : 0;
  }
  EXPECT_GT(next, 0u) << "also those in which the manifest came to disk before the commit";
}

TEST(NvmePowerTest, TwoWorkersResumeAtOneStep) {
  const std::vector<Found> losses = LossesInThreeSteps(Flushes::kAll);
  // Each class of losses once: what states are there, and which are whole.
  std::vector<const Found*> classes;
  for (const Found& loss : losses) {
    const bool seen = std::any_of(classes.begin(), classes.end(), [&](const Found* other) {
      return other->mark == loss.mark && other->states == loss.states && other->whole == loss.whole;
    });
    if (!seen) classes.push_back(&loss);
  }
  uint64_t pairs = 0, behind = 0;
  for (const Found* a : classes) {
    for (const Found* b : classes) {
      if (a->mark != b->mark) continue;  // the job's commit is one event for both
      ++pairs;
      behind += a->states[0] != b->states[0] ? 1 : 0;
      const Found* const workers[] = {a, b};
      ASSERT_TRUE(ResumesWell(workers)) << "after step " << a->mark;
    }
  }
  EXPECT_GT(pairs, 20u);
  EXPECT_GT(behind, 4u) << "also those in which one worker is a step ahead";
}

// The model is able to find what it looks for.
TEST(NvmePowerTest, AManifestBeforeTheFlushNamesImagesThatAreNotThere) {
  const std::vector<Found> losses = LossesInThreeSteps(Flushes::kNotBeforeTheManifest);
  EXPECT_TRUE(std::any_of(losses.begin(), losses.end(), [](const Found& loss) {
    const Found* const workers[] = {&loss};
    return !ResumesWell(workers);
  }));
}

// All ranks die when step 2 is prepared and not committed; the step is made again, otherwise.
std::vector<Found> LossesAroundADroppedStep(bool revoke) {
  Worker worker;
  worker.PrepareStep(1, 1);
  worker.CommitStep();
  worker.PrepareStep(2, 2);
  if (revoke) worker.RevokeStep();
  worker.PrepareStep(3, 3);
  worker.CommitStep();
  worker.PrepareStep(4, 4);
  return AllLosses(worker.log(), 0);
}

TEST(NvmePowerTest, AStepThatWasDroppedAfterItWasPreparedIsRevokedFirst) {
  const std::vector<Found> losses = LossesAroundADroppedStep(true);
  EXPECT_GT(losses.size(), 300u);
  for (const Found& loss : losses) {
    const Found* const workers[] = {&loss};
    ASSERT_TRUE(ResumesWell(workers)) << "after step " << loss.mark;
  }
  const std::vector<Found> without = LossesAroundADroppedStep(false);
  EXPECT_TRUE(std::any_of(without.begin(), without.end(), [](const Found& loss) {
    const Found* const workers[] = {&loss};
    return !ResumesWell(workers);
  })) << "the model is able to find what it looks for";
}

// This worker had prepared step 3 when the power went, another one had not: the job resumes at 2.
TEST(NvmePowerTest, AStateThatWasGivenUpIsNeverChosenAgain) {
  Worker first;
  for (uint64_t step = 1; step <= 2; ++step) {
    first.PrepareStep(step, step);
    first.CommitStep();
  }
  first.PrepareStep(3, 3);
  const PowerFiles files = first.files();

  Worker resumed(files, {2, 2});
  resumed.PrepareStep(4, 4);
  resumed.CommitStep();
  resumed.PrepareStep(5, 5);
  const std::vector<Found> losses = AllLosses(resumed.log(), 2);
  EXPECT_GT(losses.size(), 150u);
  uint64_t kept = 0;
  for (const Found& loss : losses) {
    Found selectable = loss;
    const auto given_up = std::find(loss.states.begin(), loss.states.end(), ManifestState{3, 3});
    if (given_up != loss.states.end()) {
      ++kept;
      ASSERT_EQ(loss.files[kSlots], files[kSlots]) << "it is gone before a slot is written";
      selectable.states = {ManifestState{2, 2}};  // what the others have, too
      selectable.whole = {loss.whole[1 - (given_up - loss.states.begin())]};
    }
    const Found* const workers[] = {&selectable};
    ASSERT_TRUE(ResumesWell(workers));
  }
  EXPECT_GT(kept, 0u);
}

}  // namespace
}  // namespace zeroshard
