// What happens to a checkpoint on a bad disk, in the wrong place, or in the hands of a failing
// writer.
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/fault_point.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/checkpoint.h"
#include "storage/shard_writer.h"
#include "tests/storage/checkpoint_fixture.h"
#include "tests/storage/temp_dir.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

// Opens the checkpoint and reads everything.
absl::Status ReadAll(const TempDir& dir, const TestJob& job, const std::string& name = "c") {
  absl::StatusOr<CheckpointReader> reader = CheckpointReader::OpenByName(dir.fd(), name);
  if (!reader.ok()) return reader.status();
  return job.Compare(*reader, 2);
}

std::vector<std::string> FilesOf(const TempDir& dir, const std::string& name) {
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(dir.Path(name))) {
    files.push_back(name + "/" + entry.path().filename().string());
  }
  std::sort(files.begin(), files.end());
  return files;
}

void ExpectLossNames(const absl::Status& status, const std::string& file) {
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << file << ": " << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(file + " at offset "));
}

// A flip is found, or lies in a hole between records and changes nothing that is read: ReadAll
// compares every byte.
TEST(CheckpointDamageTest, AFlipAnywhereIsFoundOrHarmless) {
  TempDir dir;
  const TestJob job = TestJob::OfLengths({300, 20});
  ASSERT_TRUE(job.Save(dir.fd(), "c", 2).ok());
  for (const std::string& file : FilesOf(dir, "c")) {
    const std::string bytes = dir.Read(file);
    size_t found = 0;
    for (size_t i = 0; i < bytes.size(); i += file.ends_with(".zsc") ? 13 : 1) {
      std::string damaged = bytes;
      damaged[i] = static_cast<char>(damaged[i] ^ (1 << (i % 8)));
      dir.Write(file, damaged);
      const absl::Status status = ReadAll(dir, job);
      if (status.ok()) continue;
      ++found;
      ExpectLossNames(status, file);
    }
    EXPECT_GT(found, file.ends_with(".zsc") ? 650u : bytes.size() - 1) << file;
    dir.Write(file, bytes);
  }
  EXPECT_TRUE(ReadAll(dir, job).ok());
}

TEST(CheckpointDamageTest, ACutAnywhereIsFound) {
  TempDir dir;
  const TestJob job = TestJob::OfLengths({300, 20});
  ASSERT_TRUE(job.Save(dir.fd(), "c", 2).ok());
  for (const std::string& file : FilesOf(dir, "c")) {
    const std::string bytes = dir.Read(file);
    for (size_t size = 0; size < bytes.size(); size += file.ends_with(".zsc") ? 61 : 1) {
      dir.Write(file, bytes.substr(0, size));
      ExpectLossNames(ReadAll(dir, job), file);
    }
    dir.Write(file, bytes + '\0');
    ExpectLossNames(ReadAll(dir, job), file);
    dir.Write(file, bytes);
  }
}

TEST(CheckpointDamageTest, AMissingFileIsNamed) {
  TempDir dir;
  const TestJob job = TestJob::OfLengths({600});
  ASSERT_TRUE(job.Save(dir.fd(), "c", 2).ok());
  for (const std::string& file : FilesOf(dir, "c")) {
    const std::string bytes = dir.Read(file);
    std::filesystem::remove(dir.Path(file));
    const absl::Status status = ReadAll(dir, job);
    if (file.ends_with("COMMIT")) {
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(status.message()), HasSubstr("no COMMIT"));
    } else {
      ExpectLossNames(status, file);
    }
    dir.Write(file, bytes);
  }
}

TEST(CheckpointDamageTest, ForeignShardsAreFound) {
  TempDir dir;
  const TestJob job = TestJob::OfLengths({600});
  ASSERT_TRUE(job.Save(dir.fd(), "c", 2).ok());
  TestJob other_job = job;
  other_job.job_id ^= 1;
  TestJob other_step = job;
  other_step.step = 8;
  const TestJob other_layout = TestJob::OfLengths({601});
  ASSERT_TRUE(other_job.Save(dir.fd(), "job", 2).ok());
  ASSERT_TRUE(other_step.Save(dir.fd(), "step", 2).ok());
  ASSERT_TRUE(other_layout.Save(dir.fd(), "layout", 2).ok());
  const std::string good = dir.Read("c/shard-1.zsc");
  for (const char* from : {"job", "step", "layout"}) {
    dir.Write("c/shard-1.zsc", dir.Read(absl::StrCat(from, "/shard-1.zsc")));
    const absl::Status status = ReadAll(dir, job);
    ExpectLossNames(status, "c/shard-1.zsc");
    EXPECT_THAT(std::string(status.message()), HasSubstr(from));
  }
  dir.Write("c/shard-1.zsc", dir.Read("c/shard-0.zsc"));
  EXPECT_THAT(std::string(ReadAll(dir, job).message()), HasSubstr("is of worker 0"));
  dir.Write("c/shard-1.zsc", good);
  dir.Write("c/manifest.pb", dir.Read("step/manifest.pb"));
  ExpectLossNames(ReadAll(dir, job), "c/manifest.pb");
}

// The same job saved twice at one step: shards of both have the same header, but only one footer is
// in the manifest.
TEST(CheckpointDamageTest, AShardOfAnotherSaveOfTheSameStepIsFound) {
  TempDir dir;
  const TestJob job = TestJob::OfLengths({600});
  ASSERT_TRUE(job.Save(dir.fd(), "c", 2).ok());
  ASSERT_TRUE(job.Save(dir.fd(), "three", 3).ok());
  dir.Write("c/shard-1.zsc", dir.Read("three/shard-1.zsc"));
  EXPECT_THAT(std::string(ReadAll(dir, job).message()), HasSubstr("not the one that the manifest"));
}

TEST(CheckpointDamageTest, AWriterThatRunsOutOfSpaceFailsForGood) {
  TempDir dir;
  const TestJob job = TestJob::OfLengths({5000});
  ASSERT_NE(std::signal(SIGXFSZ, SIG_IGN), SIG_ERR);
  rlimit saved = {};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &saved), 0);
  auto checkpoint = CheckpointWriter::Create(dir.fd(), "c");
  auto writer = ShardWriter::Create(checkpoint->dir_fd(), 0, job.Identity(), 0);
  ASSERT_TRUE(writer.ok());
  rlimit small = saved;
  small.rlim_cur = 9000;
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  const GrainRange range = {0, 20};
  const std::vector<std::byte> bytes = job.Bytes(0, {"master"}, range);
  const absl::Status first = writer->Append(0, range, "master", DType::kFloat32, bytes);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &saved), 0);
  EXPECT_FALSE(first.ok());
  EXPECT_THAT(std::string(first.message()), HasSubstr("shard-0.zsc at offset"));
  EXPECT_EQ(writer->Append(0, range, "master", DType::kFloat32, bytes), first);
  EXPECT_EQ((*std::move(writer)).Finish().status(), first);
}

TEST(CheckpointDamageTest, AShardLargerThanTheDiskIsRefusedAtOnce) {
  TempDir dir;
  const auto writer = ShardWriter::Create(dir.fd(), 0, {}, uint64_t{1} << 60);
  EXPECT_EQ(writer.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(writer.status().message()), HasSubstr("are free on its file system"));
}

#ifdef ZEROSHARD_FAULTS
// Every write, sync and rename fails once: either the checkpoint is there and right, or nothing is.
TEST(CheckpointDamageTest, FailAtEveryPointUntilClean) {
  const TestJob job = TestJob::OfLengths({5, 7, 0, 1});
  for (const char* point : {"storage.file.write", "storage.file.sync", "storage.named_dir.rename",
                            "storage.checkpoint.commit"}) {
    bool clean = false;
    for (int k = 1; !clean && k < 60; ++k) {
      TempDir dir;
      ResetFaultPoints();
      ASSERT_TRUE(ArmFaultPoints(absl::StrCat(point, "=return:", k)).ok());
      clean = job.Save(dir.fd(), "c", 2).ok();
      ResetFaultPoints();
      if (dir.Count() == 0) {
        EXPECT_FALSE(clean);
        continue;
      }
      EXPECT_EQ(ReadAll(dir, job), absl::OkStatus()) << point << " " << k;
      EXPECT_EQ(dir.Count(), 1u);
    }
    EXPECT_TRUE(clean) << point;
  }
}
#endif

}  // namespace
}  // namespace zeroshard
