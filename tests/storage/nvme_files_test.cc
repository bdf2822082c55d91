#include "storage/nvme_files.h"

#include <filesystem>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/extent_file.h"
#include "storage/nvme_manifest.h"
#include "tests/storage/nvme_fixture.h"
#include "tests/storage/temp_dir.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kAlive = 0xa;
constexpr uint64_t kDead = 0xd;

class NvmeFilesTest : public ::testing::Test {
 protected:
  void Create(uint64_t job, uint32_t worker) {
    const ExtentIdentity identity{.job_id = job, .worker = worker, .file_bytes = 16384};
    ASSERT_TRUE(ExtentFile::Create(path_, identity).ok());
    const ManifestIdentity manifest{.job_id = job, .worker = worker, .chunks = 2, .max_extra = 9};
    ASSERT_TRUE(
        ManifestFile::Create(path_.directory.get(), ManifestFileName(job, worker), manifest).ok());
  }
  std::vector<NvmeFile> List() {
    auto files = ListNvmeFiles(path_, [](uint64_t job) { return job == kAlive; });
    EXPECT_TRUE(files.ok()) << files.status();
    return *std::move(files);
  }
  NvmeFile Find(const std::string& name) {
    for (const NvmeFile& file : List()) {
      if (file.name == name) return file;
    }
    ADD_FAILURE() << name << " is not listed";
    return {};
  }
  std::string Own(const std::string& name) const { return "zeroshard/" + name; }

  TempDir dir_;
  NvmePath path_ = Admit(dir_.path());
};

TEST_F(NvmeFilesTest, FilesOfDeadJobsAreStaleThoseOfOthersLive) {
  Create(kAlive, 0);
  Create(kDead, 1);
  ASSERT_EQ(List().size(), 4u);
  for (const std::string& name : {ExtentFileName(kAlive, 0, 0), ManifestFileName(kAlive, 0)}) {
    EXPECT_EQ(Find(name).kind, NvmeFileKind::kLive);
    EXPECT_EQ(Find(name).reason, "job 000000000000000a exists");
    EXPECT_EQ(RemoveNvmeFile(path_, Find(name)).code(), absl::StatusCode::kFailedPrecondition);
  }
  for (const std::string& name : {ExtentFileName(kDead, 1, 0), ManifestFileName(kDead, 1)}) {
    const NvmeFile file = Find(name);
    EXPECT_EQ(file.kind, NvmeFileKind::kStale);
    EXPECT_EQ(file.job_id, kDead);
    EXPECT_GE(file.bytes, 8192u);
    EXPECT_EQ(file.reason, "job 000000000000000d does not exist");
    EXPECT_TRUE(RemoveNvmeFile(path_, file).ok());
  }
  EXPECT_EQ(List().size(), 2u);
}

TEST_F(NvmeFilesTest, AFileInUseLivesWhateverTheDaemonKnows) {
  Create(kDead, 1);
  const NvmeFile stale = Find(ExtentFileName(kDead, 1, 0));
  auto user = ExtentFile::Adopt(path_, {.job_id = kDead, .worker = 1, .file_bytes = 16384}, 1);
  ASSERT_TRUE(user.ok()) << user.status();
  EXPECT_EQ(Find(stale.name).kind, NvmeFileKind::kLive);
  EXPECT_EQ(Find(stale.name).reason, "a worker of job 000000000000000d uses it");
  const absl::Status refused = RemoveNvmeFile(path_, stale);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << "found before it was in use";
  EXPECT_EQ(RemoveNvmeFilesOfJob(path_, kDead).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(NvmeFilesTest, WhatIsNotOursIsNeverTouched) {
  const std::string extent = ExtentFileName(kDead, 1, 0);
  Create(kDead, 1);
  const std::string bytes = dir_.Read(Own(extent));
  std::string other_version = bytes;
  other_version[8] = 2;
  dir_.Write(Own(ExtentFileName(kDead, 2, 0)), bytes);
  dir_.Write(Own(ExtentFileName(kDead, 3, 0)), other_version);
  dir_.Write(Own(ExtentFileName(kDead, 4, 0)), "short");
  dir_.Write(Own(ManifestFileName(kDead, 5)), "The user's own notes, longer than a number.");
  dir_.Write(Own("notes.txt"), "precious");
  dir_.Write(Own("job-d.w1.p0.extent"), bytes);
  dir_.Write(Own(extent + ".bak"), bytes);
  std::filesystem::create_directory(dir_.Path(Own("directory")));
  std::filesystem::create_symlink("/etc/passwd", dir_.Path(Own("link")));
  std::filesystem::create_symlink(extent, dir_.Path(Own(ExtentFileName(kDead, 6, 0))));

  const std::vector<std::pair<std::string, std::string>> foreign = {
      {ExtentFileName(kDead, 2, 0), "its superblock is that of " + extent},
      {ExtentFileName(kDead, 3, 0), "extent file of version 2, 1 expected"},
      {ExtentFileName(kDead, 4, 0), "the file ends before the end of its superblock"},
      {ManifestFileName(kDead, 5), "no manifest"},
      {"notes.txt", "its name is not one of this format"},
      {"job-d.w1.p0.extent", "its name is not one of this format"},
      {extent + ".bak", "its name is not one of this format"},
      {"directory", "not a regular file"},
      {"link", "not a regular file"},
      {ExtentFileName(kDead, 6, 0), "not a regular file"}};
  for (const auto& [name, reason] : foreign) {
    const NvmeFile file = Find(name);
    EXPECT_EQ(file.kind, NvmeFileKind::kForeign) << name;
    EXPECT_THAT(file.reason, HasSubstr(reason)) << name;
    EXPECT_FALSE(RemoveNvmeFile(path_, file).ok()) << name;
    NvmeFile claimed = file;
    claimed.kind = NvmeFileKind::kStale;
    EXPECT_FALSE(RemoveNvmeFile(path_, claimed).ok()) << name;
  }
  auto freed = RemoveNvmeFilesOfJob(path_, kDead);
  ASSERT_TRUE(freed.ok()) << freed.status();
  EXPECT_EQ(List().size(), foreign.size()) << "its two own files are gone, nothing else";
}

TEST_F(NvmeFilesTest, LeftoversOfACreationMayBeRemoved) {
  dir_.Write(Own(".tmp-" + ExtentFileName(kDead, 1, 0) + "-0123456789abcdef"), "half");
  ASSERT_EQ(List().size(), 1u);
  const NvmeFile file = List()[0];
  EXPECT_EQ(file.kind, NvmeFileKind::kTemporary);
  EXPECT_TRUE(RemoveNvmeFile(path_, file).ok());
  EXPECT_TRUE(List().empty());
}

TEST_F(NvmeFilesTest, TheFilesOfOneJobAreRemovedTogether) {
  Create(kAlive, 0);
  Create(kDead, 0);
  Create(kDead, 1);
  auto lock = LockNvmePath(path_);
  ASSERT_TRUE(lock.ok());
  auto freed = RemoveNvmeFilesOfJob(path_, kDead);
  ASSERT_TRUE(freed.ok()) << freed.status();
  EXPECT_EQ(*freed, 2u * (16384 + 8192));
  EXPECT_EQ(List().size(), 2u);
  EXPECT_EQ(*RemoveNvmeFilesOfJob(path_, kDead), 0u);
  EXPECT_TRUE(std::filesystem::exists(dir_.Path(Own("lock"))));
}

}  // namespace
}  // namespace zeroshard
