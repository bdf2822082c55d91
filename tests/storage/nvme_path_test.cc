#include "storage/nvme_path.h"

#include <sys/mount.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/conformance/small_file_system.h"
#include "tests/storage/nvme_fixture.h"
#include "tests/storage/temp_dir.h"

namespace zeroshard {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

absl::Status Refusal(const std::string& path) { return AdmitNvmePath(path, {}).status(); }

TEST(NvmePathTest, ADirectoryOnADiskIsTakenAndOurOwnIsMade) {
  const DiskDir dir;
  const NvmePath path = Admit(dir.path());
  EXPECT_EQ(path.path, dir.path());
  EXPECT_THAT(path.filesystem, Not(IsEmpty()));
  EXPECT_EQ(path.warnings.size(), path.direct ? 0u : 1u);
  struct stat info = {};
  ASSERT_EQ(::stat((dir.path() + "/zeroshard").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700u);
  EXPECT_EQ(dir.OwnCount(), 0u) << "nothing is left of the probe";
  Admit(dir.path());
}

TEST(NvmePathTest, PathsThatAreNoneAreRefused) {
  const TempDir dir;
  dir.Write("file", "x");
  EXPECT_EQ(Refusal("").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(Refusal("").message()), HasSubstr("nvme_path \"\" is empty"));
  EXPECT_EQ(Refusal("local_nvme").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(Refusal("local_nvme").message()),
              HasSubstr("\"local_nvme\" is relative; give an absolute path"));
  EXPECT_EQ(Refusal(dir.Path("missing")).code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(Refusal(dir.Path("missing")).message()), HasSubstr("does not exist"));
  EXPECT_EQ(Refusal(dir.Path("file")).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(Refusal(dir.Path("file")).message()),
              HasSubstr("file\" is not a directory"));
  EXPECT_FALSE(Refusal(dir.Path("file/below")).ok());
}

TEST(NvmePathTest, MemoryIsTakenWithAWarning) {
  const TempDir dir;
  if (!dir.path().starts_with("/dev/shm")) GTEST_SKIP() << "no tmpfs here";
  const NvmePath path = Admit(dir.path());
  EXPECT_EQ(path.filesystem, "tmpfs");
  EXPECT_FALSE(path.direct);
  EXPECT_THAT(path.warnings, ElementsAre(HasSubstr("is on tmpfs without O_DIRECT")));
}

TEST(NvmePathTest, ADirectoryThatOthersCanChangeIsRefused) {
  const TempDir dir;
  std::filesystem::create_directory(dir.Path("zeroshard"));
  ASSERT_EQ(::chmod(dir.Path("zeroshard").c_str(), 0777), 0);
  const absl::Status status = Refusal(dir.path());
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("with mode 0777; it must belong to"));
}

TEST(NvmePathTest, ALinkInPlaceOfOurDirectoryIsRefused) {
  const TempDir dir;
  const TempDir other;
  std::filesystem::create_directory_symlink(other.path(), dir.Path("zeroshard"));
  EXPECT_FALSE(Refusal(dir.path()).ok());
  EXPECT_EQ(other.Count(), 0u);
}

TEST(NvmePathTest, AFullFileSystemIsRefused) {
  const int result = RunOnSmallFileSystem([](const std::string& directory) {
    std::ofstream(directory + "/data") << std::string(2 << 20, 'x');
    const absl::Status full = Refusal(directory);
    EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
    EXPECT_THAT(std::string(full.message()), HasSubstr(directory));
    EXPECT_GT(std::filesystem::file_size(directory + "/data"), 1000000u);
    return !::testing::Test::HasFailure();
  });
  if (result == kNotAllowed) GTEST_SKIP() << "this process may not mount file systems";
  EXPECT_EQ(result, 0);
}

TEST(NvmePathTest, AReadOnlyFileSystemIsRefused) {
  const int result = RunOnSmallFileSystem([](const std::string& directory) {
    EXPECT_EQ(::mount(nullptr, directory.c_str(), nullptr, MS_REMOUNT | MS_RDONLY, nullptr), 0);
    const absl::Status read_only = Refusal(directory);
    EXPECT_EQ(read_only.code(), absl::StatusCode::kFailedPrecondition) << read_only;
    EXPECT_THAT(std::string(read_only.message()), HasSubstr("is on a read-only file system"));
    return !::testing::Test::HasFailure();
  });
  if (result == kNotAllowed) GTEST_SKIP() << "this process may not mount file systems";
  EXPECT_EQ(result, 0);
}

TEST(NvmePathTest, ANetworkFileSystemIsRefusedUnlessItIsAllowed) {
  const FileSystemKind nfs{FileSystemPlace::kNetwork, "nfs"};
  const absl::StatusOr<std::string> refused = JudgeFileSystem("/data", nfs, {});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("nvme_path \"/data\" is on nfs, a network file system: "));
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("allow_network_path: true"));
  const auto allowed = JudgeFileSystem("/data", nfs, {.allow_network_path = true});
  ASSERT_TRUE(allowed.ok()) << allowed.status();
  EXPECT_THAT(*allowed, HasSubstr("\"/data\" is on nfs, a network file system"));
  for (FileSystemPlace place : {FileSystemPlace::kLocal, FileSystemPlace::kMemory}) {
    EXPECT_EQ(*JudgeFileSystem("/data", {place, "x"}, {}), "");
  }
}

TEST(NvmePathTest, OneDaemonUsesAPath) {
  const TempDir dir;
  const NvmePath path = Admit(dir.path());
  {
    auto lock = LockNvmePath(path);
    ASSERT_TRUE(lock.ok()) << lock.status();
    const NvmePath again = Admit(dir.path());
    auto other = LockNvmePath(again);
    EXPECT_EQ(other.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(other.status().message()),
                HasSubstr("is used by another daemon, which holds " + dir.Path("zeroshard/lock")));
  }
  EXPECT_TRUE(LockNvmePath(path).ok());
}

TEST(NvmePathTest, BuffersAreAlignedAndZeroed) {
  const DirectBuffer buffer(12288);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.span().data()) % 4096, 0u);
  for (std::byte b : buffer.span()) ASSERT_EQ(b, std::byte{0});
}

}  // namespace
}  // namespace zeroshard
