#include "storage/nvme_path.h"

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
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

TEST(NvmePathTest, ReadOnlyAndFullFileSystemsAreRefused) {
  const TempDir dir;
  std::filesystem::create_directory(dir.Path("ro"));
  std::filesystem::create_directory(dir.Path("full"));
  if (!MountTmpfs(dir.Path("ro"), "size=1m", MS_RDONLY) ||
      !MountTmpfs(dir.Path("full"), "size=64k", 0)) {
    GTEST_SKIP() << "mounting is forbidden here";
  }
  const absl::Status read_only = Refusal(dir.Path("ro"));
  EXPECT_EQ(read_only.code(), absl::StatusCode::kFailedPrecondition) << read_only;
  EXPECT_THAT(std::string(read_only.message()), HasSubstr("is on a read-only file system"));
  dir.Write("full/user-data", std::string(64 * 1024, 'x'));
  const absl::Status full = Refusal(dir.Path("full"));
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_THAT(std::string(full.message()), HasSubstr(dir.Path("full")));
  EXPECT_EQ(dir.Read("full/user-data").size(), 64u * 1024);
  ::umount(dir.Path("ro").c_str());
  ::umount(dir.Path("full").c_str());
}

TEST(NvmePathTest, NetworkFileSystemsAreKnownByTheirNumbers) {
  for (const auto& [magic, name] :
       std::initializer_list<std::pair<uint64_t, const char*>>{{0x6969, "NFS"},
                                                               {0xff534d42, "CIFS"},
                                                               {0xfe534d42, "SMB"},
                                                               {0x65735546, "FUSE"},
                                                               {0x01021997, "9p"},
                                                               {0x00c36400, "Ceph"},
                                                               {0x0bd00bd0, "Lustre"}}) {
    EXPECT_EQ(FilesystemName(magic), name);
    EXPECT_TRUE(IsNetworkFilesystem(magic)) << name;
  }
  for (uint64_t magic : {0xef53u, 0x58465342u, 0x9123683eu, 0x01021994u, 0x794c7630u, 0x1234u}) {
    EXPECT_FALSE(IsNetworkFilesystem(magic)) << FilesystemName(magic);
  }
  EXPECT_EQ(FilesystemName(0x1234), "0x1234");
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
