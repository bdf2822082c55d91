#include "storage/extent_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/file_io.h"
#include "tests/conformance/small_file_system.h"
#include "tests/storage/nvme_fixture.h"
#include "tests/storage/temp_dir.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

constexpr ExtentIdentity kIdentity{.job_id = 0x4d2,
                                   .layout_fingerprint = 7,
                                   .plan_fingerprint = 8,
                                   .worker = 3,
                                   .path = 1,
                                   .file_bytes = (4 << 20) + 40960};
constexpr const char* kName = "job-00000000000004d2.w3.p1.extent";

ExtentFile Adopt(const NvmePath& path, uint64_t generation) {
  auto file = ExtentFile::Adopt(path, kIdentity, generation);
  EXPECT_TRUE(file.ok()) << file.status();
  return *std::move(file);
}

TEST(ExtentFileTest, NamesHaveTheJobTheWorkerAndThePath) {
  EXPECT_EQ(ExtentFileName(0x4d2, 3, 1), kName);
  EXPECT_EQ(ManifestFileName(0x4d2, 3), "job-00000000000004d2.w3.manifest");
}

// On the disk with O_DIRECT where it is to be had, and in memory.
class ExtentFileDirTest : public ::testing::TestWithParam<const char*> {
 protected:
  DiskDir dir_{*GetParam() != '\0' ? GetParam() : std::filesystem::temp_directory_path().string()};
  NvmePath path_ = Admit(dir_.path());
};

INSTANTIATE_TEST_SUITE_P(Disk, ExtentFileDirTest, ::testing::Values(""));
INSTANTIATE_TEST_SUITE_P(Memory, ExtentFileDirTest, ::testing::Values("/dev/shm"));

TEST_P(ExtentFileDirTest, AFileHasAllItsSpaceWrittenBeforeItHasItsName) {
  ASSERT_TRUE(ExtentFile::Create(path_, kIdentity).ok());
  EXPECT_EQ(dir_.OwnCount(), 1u);
  struct stat info = {};
  ASSERT_EQ(::stat(dir_.Own(kName).c_str(), &info), 0);
  EXPECT_EQ(static_cast<uint64_t>(info.st_size), kIdentity.file_bytes);
  EXPECT_GE(static_cast<uint64_t>(info.st_blocks) * 512, kIdentity.file_bytes);
  EXPECT_EQ(ExtentFile::Create(path_, kIdentity).code(), absl::StatusCode::kAlreadyExists);
}

TEST_P(ExtentFileDirTest, CreatingShowsProgressAndWhatItLeftIsRemoved) {
  int calls = 0;
  ASSERT_TRUE(ExtentFile::Create(path_, kIdentity, [&calls] { ++calls; }).ok());
  EXPECT_EQ(calls, 2) << "a piece of 4 MiB and the rest";
  std::filesystem::copy_file(dir_.Own(kName),
                             dir_.Own(std::string(".tmp-") + kName + "-0123456789abcdef"));
  std::filesystem::copy_file(dir_.Own(kName), dir_.Own("other"));
  {
    const ExtentFile file = Adopt(path_, 1);
    const absl::Status used = ExtentFile::RemoveUnused(path_, kIdentity);
    EXPECT_EQ(used.code(), absl::StatusCode::kFailedPrecondition) << used;
  }
  EXPECT_TRUE(ExtentFile::RemoveUnused(path_, kIdentity).ok());
  EXPECT_EQ(dir_.OwnCount(), 1u);
  EXPECT_TRUE(ExtentFile::RemoveUnused(path_, kIdentity).ok()) << "nothing is there";
  EXPECT_TRUE(ExtentFile::Create(path_, kIdentity).ok());
}

TEST_P(ExtentFileDirTest, AnAbandonedFileIsFreeAndNotDrained) {
  ASSERT_TRUE(ExtentFile::Create(path_, kIdentity).ok());
  ExtentFile first = Adopt(path_, 1);
  const UniqueFd held(first.fd());  // ends with the test
  std::move(first).Abandon();
  const ExtentFile second = Adopt(path_, 2);
  EXPECT_FALSE(*second.Drained());
}

TEST_P(ExtentFileDirTest, WhatIsWrittenIsThereForTheSuccessor) {
  ASSERT_TRUE(ExtentFile::Create(path_, kIdentity).ok());
  const DirectBuffer out(8192);
  std::fill(out.span().begin(), out.span().end(), std::byte{0x5a});
  {
    const ExtentFile file = Adopt(path_, 1);
    EXPECT_EQ(file.direct(), path_.direct);
    EXPECT_EQ((::fcntl(file.fd(), F_GETFL) & O_DIRECT) != 0, path_.direct);
    EXPECT_EQ(file.name(), dir_.Own(kName));
    ASSERT_TRUE(WriteAllAt(file.fd(), out.span(), kIdentity.file_bytes - 8192, "f").ok());
    ASSERT_TRUE(file.Flush().ok());
  }
  const ExtentFile file = Adopt(path_, 2);
  const DirectBuffer in(8192);
  ASSERT_TRUE(ReadAllAt(file.fd(), in.span(), kIdentity.file_bytes - 8192, "f").ok());
  EXPECT_TRUE(std::equal(in.span().begin(), in.span().end(), out.span().begin()));
}

TEST_P(ExtentFileDirTest, OneProcessUsesAFile) {
  ASSERT_TRUE(ExtentFile::Create(path_, kIdentity).ok());
  const ExtentFile file = Adopt(path_, 1);
  auto other = ExtentFile::Adopt(path_, kIdentity, 2);
  EXPECT_EQ(other.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("is used by another process"));
}

TEST_P(ExtentFileDirTest, FilesOfOthersAreNotAdopted) {
  ASSERT_TRUE(ExtentFile::Create(path_, kIdentity).ok());
  const auto refusal = [&](auto change) {
    ExtentIdentity other = kIdentity;
    change(other);
    const std::string name = dir_.Own(ExtentFileName(other.job_id, other.worker, other.path));
    if (!std::filesystem::exists(name)) std::filesystem::copy_file(dir_.Own(kName), name);
    const absl::Status status = ExtentFile::Adopt(path_, other, 1).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(refusal([](auto& i) { i.job_id = 1; }), HasSubstr("of job 4d2, 1 is expected"));
  EXPECT_THAT(refusal([](auto& i) { i.worker = 1; }), HasSubstr("of worker 3, 1 is expected"));
  EXPECT_THAT(refusal([](auto& i) { i.path = 0; }), HasSubstr("of path 1, 0 is expected"));
  EXPECT_THAT(refusal([](auto& i) { i.layout_fingerprint = 1; }), HasSubstr("of layout 7, 1"));
  EXPECT_THAT(refusal([](auto& i) { i.plan_fingerprint = 1; }), HasSubstr("of plan 8, 1"));
  EXPECT_THAT(refusal([](auto& i) { i.file_bytes += 4096; }), HasSubstr("of length"));
  EXPECT_EQ(ExtentFile::Adopt(path_, {.job_id = 99, .file_bytes = 8192}, 1).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(ExtentFile::Adopt(path_, kIdentity, 0).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_P(ExtentFileDirTest, DamageIsNamedWithFileAndOffset) {
  ASSERT_TRUE(ExtentFile::Create(path_, kIdentity).ok());
  const auto damage = [&](uint64_t offset) {
    const UniqueFd fd(::open(dir_.Own(kName).c_str(), O_RDWR));
    char byte = 0;
    EXPECT_EQ(::pread(fd.get(), &byte, 1, static_cast<off_t>(offset)), 1);
    byte ^= 4;
    EXPECT_EQ(::pwrite(fd.get(), &byte, 1, static_cast<off_t>(offset)), 1);
  };
  const auto message = [&] {
    const absl::Status status = ExtentFile::Adopt(path_, kIdentity, 1).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(dir_.Own(kName) + " at offset "));
    return std::string(status.message());
  };
  for (const auto& [offset, text] : std::initializer_list<std::pair<uint64_t, const char*>>{
           {3, "the magic number differs"},
           {8, "extent file of version 5, 1 expected"},
           {40, "torn or flipped superblock"},
           {2000, "torn or flipped superblock"},
           {4095, "torn or flipped superblock"}}) {
    damage(offset);
    EXPECT_THAT(message(), HasSubstr(text)) << offset;
    damage(offset);
  }
  EXPECT_TRUE(ExtentFile::Adopt(path_, kIdentity, 1).ok());
  ASSERT_EQ(::truncate(dir_.Own(kName).c_str(), 8192), 0);
  EXPECT_THAT(message(), HasSubstr("at offset 8192: the file has 8192 bytes, its superblock says"));
  ASSERT_EQ(::truncate(dir_.Own(kName).c_str(), 100), 0);
  EXPECT_THAT(message(), HasSubstr("at offset 100: the file ends before"));
}

// The descriptor of a dead worker lives as long as a request that uses it; here a child holds it.
TEST_P(ExtentFileDirTest, FilesAreDrainedWhenNoDescriptorOfAnEarlierGenerationIsLeft) {
  ASSERT_TRUE(ExtentFile::Create(path_, kIdentity).ok());
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  pid_t child = -1;
  {
    const ExtentFile dead = Adopt(path_, 3);
    EXPECT_TRUE(*dead.Drained()) << "its own descriptor does not count";
    child = ::fork();
    if (child == 0) {
      // Everything but the descriptor for transfers is closed, as when a process died.
      for (int fd = 3; fd < 256; ++fd) {
        if (fd != dead.fd() && fd != ready[1]) ::close(fd);
      }
      if (::write(ready[1], "x", 1) != 1) ::_exit(1);
      for (;;) ::pause();
    }
    char byte = 0;
    ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  }
  EXPECT_FALSE(*Adopt(path_, 2).Drained()) << "a table that was lost may have been further on";
  EXPECT_EQ(ExtentFile::Adopt(path_, kIdentity, 3).status().code(), absl::StatusCode::kUnavailable);
  const ExtentFile successor = Adopt(path_, 4);
  EXPECT_FALSE(*successor.Drained());
  EXPECT_FALSE(*successor.Drained()) << "asking changes nothing";
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(*successor.Drained());
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(ExtentFileTest, WithoutRoomNothingIsLeftAndTheNumbersAreTold) {
  const int result = RunOnSmallFileSystem([](const std::string& directory) {
    const NvmePath path = Admit(directory);
    const absl::Status status = ExtentFile::Create(path, kIdentity);
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(
        std::string(status.message()),
        HasSubstr(absl::StrCat("needs ", kIdentity.file_bytes, " bytes, 1048576 are free")));
    EXPECT_TRUE(std::filesystem::is_empty(directory + "/zeroshard"));
    ExtentIdentity fits = kIdentity;
    fits.file_bytes = 512 * 1024;
    EXPECT_TRUE(ExtentFile::Create(path, fits).ok());
    return !::testing::Test::HasFailure();
  });
  if (result == kNotAllowed) GTEST_SKIP() << "this process may not mount file systems";
  EXPECT_EQ(result, 0);
}

TEST(ExtentFileTest, LengthsThatCannotBeAreRefused) {
  const TempDir dir;
  const NvmePath path = Admit(dir.path());
  for (uint64_t bytes : {0u, 100u, 4097u}) {
    ExtentIdentity odd = kIdentity;
    odd.file_bytes = bytes;
    EXPECT_EQ(ExtentFile::Create(path, odd).code(), absl::StatusCode::kInvalidArgument) << bytes;
  }
}

}  // namespace
}  // namespace zeroshard
