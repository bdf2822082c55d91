#include "storage/io_backend.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/strings.h"
#include "storage/file_system_kind.h"
#include "storage/io_uring_queue.h"
#include "tests/conformance/small_file_system.h"
#include "tests/storage/denied_syscalls.h"
#include "tests/storage/temp_dir.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

const std::vector<int> kAllOfUring = {SYS_io_uring_setup, SYS_io_uring_enter,
                                      SYS_io_uring_register};

std::string Describe(IoBackend wanted, const std::string& directory) {
  const absl::StatusOr<IoBackendChoice> choice = ChooseIoBackend(wanted, directory);
  if (!choice.ok()) return choice.status().ToString();
  return absl::StrCat(Abs(NameOf(choice->backend)), "|", choice->reason);
}

bool UringWorks() { return MakeIoUringQueue({}).ok(); }

TEST(IoBackend, NamesAreThoseOfTheConfig) {
  for (const char* name : {"auto", "uring", "threads"}) {
    EXPECT_EQ(NameOf(ParseIoBackend(name).value()), name);
  }
  EXPECT_EQ(std::string(ParseIoBackend("aio").status().message()),
            "\"aio\" is no I/O backend; there are auto, uring, threads");
}

TEST(IoBackend, AutoTakesIoUringWhereItWorksAndLeavesNoFile) {
  if (!UringWorks()) GTEST_SKIP() << "io_uring is forbidden here";
  const TempDir directory;
  EXPECT_EQ(Describe(IoBackend::kAuto, directory.path()).substr(0, 16), "uring|io_uring: ");
  EXPECT_EQ(directory.Count(), 0u);
}

TEST(IoBackend, ThreadsOnRequest) {
  const TempDir directory;
  EXPECT_THAT(Describe(IoBackend::kThreads, directory.path()),
              StartsWith("threads|threads, as io.backend says: write, sync and read"));
}

TEST(IoBackend, FallsBackToThreadsWhereIoUringIsForbidden) {
  const TempDir directory;
  const std::string text = RunWithDeniedCalls(
      kAllOfUring, EPERM, [&] { return Describe(IoBackend::kAuto, directory.path()); });
  EXPECT_THAT(text, StartsWith("threads|threads, because io_uring does not work: "));
  EXPECT_THAT(text, HasSubstr("io_uring_setup a ring: Operation not permitted"));
  EXPECT_THAT(text, HasSubstr("a seccomp filter (containers) or the sysctl "));
  EXPECT_EQ(directory.Count(), 0u);
}

TEST(IoBackend, FallsBackToThreadsOnKernelsWithoutIoUring) {
  const TempDir directory;
  const std::string text = RunWithDeniedCalls(
      kAllOfUring, ENOSYS, [&] { return Describe(IoBackend::kAuto, directory.path()); });
  EXPECT_THAT(text, StartsWith("threads|threads, because io_uring does not work: "));
  EXPECT_THAT(text, HasSubstr("(errno 38)"));
}

// A ring that can be made but not used: only real I/O finds out.
TEST(IoBackend, FallsBackToThreadsWhereTransfersAreForbidden) {
  if (!UringWorks()) GTEST_SKIP() << "io_uring is forbidden here";
  const TempDir directory;
  for (const int error : {EPERM, ENOSYS}) {
    const std::string text = RunWithDeniedCalls(
        {SYS_io_uring_enter}, error, [&] { return Describe(IoBackend::kAuto, directory.path()); });
    EXPECT_THAT(text, StartsWith("threads|threads, because io_uring does not work: "));
    EXPECT_THAT(text, HasSubstr("io_uring_enter the I/O queue: "));
  }
}

// Kernels differ in whether rings count as locked memory; where they do, threads need none.
TEST(IoBackend, FallsBackToThreadsWithoutLockedMemory) {
  if (!UringWorks()) GTEST_SKIP() << "io_uring is forbidden here";
  const std::string text = RunWithDeniedCalls({}, 0, []() -> std::string {
    const rlimit none = {0, 0};
    if (::setrlimit(RLIMIT_MEMLOCK, &none) != 0) return "setrlimit";
    // Root is not held to the limit.
    if (::geteuid() == 0 && ::setresuid(65534, 65534, 65534) != 0) return "setresuid";
    return Describe(IoBackend::kAuto, "/tmp");
  });
  EXPECT_THAT(text, AnyOf(StartsWith("uring|"),
                          AllOf(StartsWith("threads|threads, because io_uring does not work: "),
                                HasSubstr("may have 0 bytes (RLIMIT_MEMLOCK)"))));
}

TEST(IoBackend, SaysWhereODirectIsRefused) {
  const int result = RunOnSmallFileSystem(
      [](const std::string& directory) {
        const absl::StatusOr<IoBackendChoice> choice =
            ChooseIoBackend(IoBackend::kThreads, directory);
        return choice.ok() && !choice->direct &&
               choice->reason.find("(O_DIRECT is refused there)") != std::string::npos;
      },
      "ramfs");
  if (result == kNotAllowed) GTEST_SKIP() << "this process may not mount file systems";
  EXPECT_EQ(result, 0);
}

TEST(IoBackend, RequiredIoUringIsNotReplaced) {
  const TempDir directory;
  const std::string text = RunWithDeniedCalls(
      kAllOfUring, EPERM, [&] { return Describe(IoBackend::kUring, directory.path()); });
  EXPECT_THAT(text, StartsWith("FAILED_PRECONDITION: io.backend is uring, but io_uring does not"));
}

TEST(IoBackend, ThePathIsBlamedWhenThePathIsWrong) {
  const TempDir directory;
  directory.Write("file", "x");
  for (const std::string& path : {directory.Path("missing"), directory.Path("file")}) {
    EXPECT_THAT(Describe(IoBackend::kAuto, path), HasSubstr("make a file in " + path));
  }
  EXPECT_THAT(Describe(IoBackend::kAuto, "/proc"), HasSubstr("make a file in /proc"));
}

TEST(IoBackend, RingsAndThreadsHaveBounds) {
  EXPECT_TRUE(absl::IsInvalidArgument(MakeIoQueue(IoBackend::kUring, {.depth = 0}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(MakeIoQueue(IoBackend::kUring, {.depth = 4097}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(MakeIoQueue(IoBackend::kThreads, {.depth = 0}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(MakeIoQueue(IoBackend::kThreads, {.threads = 0}).status()));
}

TEST(ScratchFile, HasNoName) {
  const TempDir directory;
  const absl::StatusOr<ScratchFile> file = OpenScratchFile(directory.path());
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(directory.Count(), 0u);
  struct stat info = {};
  ASSERT_EQ(::fstat(file->fd.get(), &info), 0);
  EXPECT_EQ(info.st_nlink, 0u);
  EXPECT_EQ((::fcntl(file->fd.get(), F_GETFL) & O_DIRECT) != 0, file->direct);
}

TEST(FileSystemKind, NetworksAndMemoryAreTold) {
  EXPECT_EQ(FileSystemKindOf(0x6969).name, "nfs");
  EXPECT_EQ(FileSystemKindOf(0x6969).place, FileSystemPlace::kNetwork);
  EXPECT_EQ(FileSystemKindOf(0x0bd00bd0).place, FileSystemPlace::kNetwork);
  EXPECT_EQ(FileSystemKindOf(0x65735546).place, FileSystemPlace::kNetwork);
  EXPECT_EQ(FileSystemKindOf(0x58465342).place, FileSystemPlace::kLocal);
  EXPECT_EQ(FileSystemKindOf(0x1234).name, "type 0x1234");
  EXPECT_EQ(FileSystemKindOf(0x1234).place, FileSystemPlace::kLocal);
  if (::access("/dev/shm", F_OK) == 0) {
    EXPECT_EQ(FileSystemKindAt("/dev/shm")->place, FileSystemPlace::kMemory);
  }
  EXPECT_TRUE(absl::IsNotFound(FileSystemKindAt("/no/such/path").status()));
}

}  // namespace
}  // namespace zeroshard
