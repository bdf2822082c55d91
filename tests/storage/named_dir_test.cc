#include "storage/named_dir.h"

#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/file_io.h"
#include "tests/storage/temp_dir.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

TEST(NamedDirTest, NamesAreOneComponentOfHarmlessCharacters) {
  for (const char* name : {"a", "step-100", "Model_v1.2", "0", "a..b", "-"}) {
    EXPECT_TRUE(ValidateName(name).ok()) << name;
  }
  EXPECT_TRUE(ValidateName(std::string(128, 'x')).ok());
  for (const char* name :
       {"", ".", "..", ".hidden", "a/b", "/a", "a b", "a\n", "\xC3\xBC", "a\\b", "a:b", "~"}) {
    EXPECT_EQ(ValidateName(name).code(), absl::StatusCode::kInvalidArgument) << name;
  }
  EXPECT_FALSE(ValidateName(std::string(129, 'x')).ok());
  EXPECT_FALSE(ValidateName(std::string("a\0b", 3)).ok());
  EXPECT_THAT(std::string(ValidateName("a/b").message()), HasSubstr("\"a/b\" is not a name"));
}

TEST(NamedDirTest, NothingOutsideIsReached) {
  TempDir dir;
  std::filesystem::create_symlink("/etc/passwd", dir.Path("link"));
  std::filesystem::create_symlink("/", dir.Path("root"));
  EXPECT_FALSE(OpenBeneath(dir.fd(), "link", O_RDONLY).ok());
  EXPECT_FALSE(OpenBeneath(dir.fd(), "root", O_RDONLY | O_DIRECTORY).ok());
  EXPECT_FALSE(OpenBeneath(dir.fd(), "root/etc", O_RDONLY | O_DIRECTORY).ok());
  EXPECT_FALSE(OpenBeneath(dir.fd(), "..", O_RDONLY | O_DIRECTORY).ok());
  EXPECT_FALSE(OpenBeneath(dir.fd(), "/etc/passwd", O_RDONLY).ok());
  EXPECT_EQ(OpenBeneath(dir.fd(), "missing", O_RDONLY).status().code(),
            absl::StatusCode::kNotFound);
}

TEST(NamedDirTest, AFileAppearsWholeOrNotAtAll) {
  TempDir dir;
  {
    auto file = TemporaryFile::Create(dir.fd(), "export", Existing::kRefuse);
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_TRUE(WriteAllAt(file->fd(), AsBytes("half"), 0, "export").ok());
    EXPECT_EQ(dir.Count(), 1u);
  }
  EXPECT_EQ(dir.Count(), 0u);
  auto file = TemporaryFile::Create(dir.fd(), "export", Existing::kRefuse);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE(WriteAllAt(file->fd(), AsBytes("whole"), 0, "export").ok());
  ASSERT_TRUE((*std::move(file)).Commit().ok());
  EXPECT_EQ(dir.Read("export"), "whole");
  EXPECT_EQ(dir.Count(), 1u);
}

TEST(NamedDirTest, AnExistingFileIsReplacedOnlyWhenAsked) {
  TempDir dir;
  dir.Write("export", "old");
  EXPECT_EQ(TemporaryFile::Create(dir.fd(), "export", Existing::kRefuse).status().code(),
            absl::StatusCode::kAlreadyExists);
  auto file = TemporaryFile::Create(dir.fd(), "export", Existing::kReplace);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE(WriteAllAt(file->fd(), AsBytes("new"), 0, "export").ok());
  EXPECT_EQ(dir.Read("export"), "old");
  ASSERT_TRUE((*std::move(file)).Commit().ok());
  EXPECT_EQ(dir.Read("export"), "new");
}

TEST(NamedDirTest, TheLoserOfARaceIsRefusedAtCommit) {
  TempDir dir;
  auto file = TemporaryFile::Create(dir.fd(), "x", Existing::kRefuse);
  auto directory = TemporaryDirectory::Create(dir.fd(), "x");
  ASSERT_TRUE(file.ok() && directory.ok());
  ASSERT_TRUE((*std::move(file)).Commit().ok());
  EXPECT_EQ((*std::move(directory)).Commit().code(), absl::StatusCode::kAlreadyExists);
}

TEST(NamedDirTest, ADirectoryAppearsWholeOrNotAtAll) {
  TempDir dir;
  {
    auto directory = TemporaryDirectory::Create(dir.fd(), "ckpt");
    ASSERT_TRUE(directory.ok()) << directory.status();
    ASSERT_TRUE(OpenBeneath(directory->fd(), "shard", O_WRONLY | O_CREAT).ok());
    EXPECT_EQ(dir.Count(), 1u);
  }
  EXPECT_EQ(dir.Count(), 0u);
  auto directory = TemporaryDirectory::Create(dir.fd(), "ckpt");
  ASSERT_TRUE(directory.ok());
  ASSERT_TRUE(OpenBeneath(directory->fd(), "shard", O_WRONLY | O_CREAT).ok());
  ASSERT_TRUE((*std::move(directory)).Commit().ok());
  EXPECT_TRUE(std::filesystem::exists(dir.Path("ckpt/shard")));
  EXPECT_EQ(TemporaryDirectory::Create(dir.fd(), "ckpt").status().code(),
            absl::StatusCode::kAlreadyExists);
}

TEST(NamedDirTest, LeftoversAreCollectedAndNothingElse) {
  TempDir dir;
  dir.Write("keep", "x");
  dir.Write(".hidden", "x");
  dir.Write(".tmp-export-0123456789abcdef", "x");
  std::filesystem::create_directory(dir.Path(".tmp-ckpt-0123456789abcdef"));
  dir.Write(".tmp-ckpt-0123456789abcdef/shard", "x");
  const auto removed = RemoveTemporaries(dir.fd());
  ASSERT_TRUE(removed.ok()) << removed.status();
  EXPECT_EQ(*removed, 2);
  EXPECT_EQ(dir.Count(), 2u);
}

TEST(NamedDirTest, LeftoversOfOneNameAreCollectedAndNothingElse) {
  TempDir dir;
  dir.Write("job.w1", "x");
  dir.Write(".tmp-job.w1-0123456789abcdef", "x");
  dir.Write(".tmp-job.w1-fedcba9876543210", "x");
  dir.Write(".tmp-job.w10-0123456789abcdef", "x");
  dir.Write(".tmp-job.w1-a-0123456789abcdef", "x");
  const auto removed = RemoveTemporariesOf(dir.fd(), "job.w1");
  ASSERT_TRUE(removed.ok()) << removed.status();
  EXPECT_EQ(*removed, 2);
  EXPECT_EQ(dir.Count(), 3u);
}

TEST(NamedDirTest, FilesAreReadAndWrittenWhole) {
  TempDir dir;
  auto fd = OpenBeneath(dir.fd(), "f", O_RDWR | O_CREAT);
  ASSERT_TRUE(fd.ok());
  ASSERT_TRUE(WriteAllAt(fd->get(), AsBytes("abcdef"), 10, "f").ok());
  std::string text(6, '\0');
  ASSERT_TRUE(ReadAllAt(fd->get(), std::as_writable_bytes(std::span(text)), 10, "f").ok());
  EXPECT_EQ(text, "abcdef");
  const absl::Status status =
      ReadAllAt(fd->get(), std::as_writable_bytes(std::span(text)), 12, "f");
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("f at offset 16"));
  EXPECT_EQ(RegularFileSize(dir.fd(), "d").status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(*RegularFileSize(fd->get(), "f"), 16u);
}

TEST(NamedDirTest, AFullDiskIsReported) {
  if (::access("/dev/full", W_OK) != 0) GTEST_SKIP() << "no /dev/full here";
  UniqueFd full(::open("/dev/full", O_WRONLY));
  EXPECT_EQ(WriteAllAt(full.get(), AsBytes("x"), 0, "/dev/full").code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace zeroshard
