#include "base/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <utility>

#include "base/status.h"

namespace zeroshard {
namespace {

constexpr size_t kPage = 4096;

TEST(SharedMemoryTest, SizeIsFixedForGood) {
  const absl::StatusOr<UniqueFd> fd = CreateSealedMemfd("region", 10 * kPage);
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_EQ(FileBytes(fd->get()).value(), 10 * kPage);
  EXPECT_NE(::ftruncate(fd->get(), kPage), 0);
  EXPECT_NE(::ftruncate(fd->get(), 20 * kPage), 0);
  EXPECT_TRUE(VerifySealed(fd->get(), 10 * kPage).ok());
  EXPECT_FALSE(VerifySealed(fd->get(), 10 * kPage + 1).ok());
  EXPECT_EQ(::fcntl(fd->get(), F_GETFD), FD_CLOEXEC);
  EXPECT_EQ(CreateSealedMemfd("empty", 0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(SharedMemoryTest, UnsealedOrOrdinaryDescriptorsAreRefused) {
  const UniqueFd unsealed(::memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(unsealed.get(), kPage), 0);
  EXPECT_EQ(VerifySealed(unsealed.get(), 1).code(), absl::StatusCode::kInvalidArgument);
  const UniqueFd null(::open("/dev/null", O_RDONLY));
  EXPECT_EQ(VerifySealed(null.get(), 1).code(), absl::StatusCode::kInvalidArgument);
}

TEST(SharedMemoryTest, TwoMappingsShareBytes) {
  const UniqueFd fd = CreateSealedMemfd("shared", 2 * kPage).value();
  const MappedRegion writer = MappedRegion::Map(fd.get(), 2 * kPage, Access::kReadWrite).value();
  const MappedRegion reader =
      MappedRegion::Map(fd.get(), kPage, Access::kReadOnly, {.offset = kPage}).value();
  writer.As<uint32_t>(kPage)[3] = 77;
  EXPECT_EQ(reader.As<uint32_t>()[3], 77u);
  EXPECT_EQ(reader.bytes().size(), kPage);
}

TEST(SharedMemoryTest, MappingPastTheEndIsRefused) {
  const UniqueFd fd = CreateSealedMemfd("short", kPage).value();
  for (const auto& [offset, bytes] :
       {std::pair<size_t, size_t>{0, kPage + 1}, {kPage, 1}, {kPage, ~size_t{0}}, {0, 0}}) {
    EXPECT_EQ(
        MappedRegion::Map(fd.get(), bytes, Access::kReadOnly, {.offset = offset}).status().code(),
        absl::StatusCode::kInvalidArgument);
  }
}

TEST(SharedMemoryTest, ReadOnlyDescriptorCannotWrite) {
  const UniqueFd fd = CreateSealedMemfd("readers", kPage).value();
  const UniqueFd reader = ReopenReadOnly(fd.get()).value();
  struct stat info = {};
  ASSERT_EQ(::fstat(reader.get(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0400u);
  EXPECT_FALSE(MappedRegion::Map(reader.get(), kPage, Access::kReadWrite).ok());
  EXPECT_TRUE(MappedRegion::Map(reader.get(), kPage, Access::kReadOnly).ok());
  EXPECT_TRUE(MappedRegion::Map(fd.get(), kPage, Access::kReadWrite).ok());
}

TEST(SharedMemoryTest, AnotherUserCannotReopenForWriting) {
  if (::geteuid() != 0) GTEST_SKIP() << "needs root to become another user";
  const UniqueFd fd = CreateSealedMemfd("readers", kPage).value();
  const UniqueFd reader = ReopenReadOnly(fd.get()).value();
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setuid(65534) != 0) ::_exit(3);
    const std::string path = "/proc/self/fd/" + std::to_string(reader.get());
    ::_exit(::open(path.c_str(), O_RDWR) >= 0 ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(SharedMemoryTest, ReserveAndPunchHoleChangeWhatIsAllocated) {
  const UniqueFd fd = CreateSealedMemfd("holes", 16 * kPage).value();
  EXPECT_EQ(AllocatedBytes(fd.get()).value(), 0u);
  ASSERT_TRUE(Reserve(fd.get(), 0, 16 * kPage).ok());
  EXPECT_EQ(AllocatedBytes(fd.get()).value(), 16 * kPage);
  const MappedRegion region = MappedRegion::Map(fd.get(), 16 * kPage, Access::kReadWrite).value();
  std::memset(region.data(), 1, region.size());
  ASSERT_TRUE(PunchHole(fd.get(), kPage, 4 * kPage).ok());
  EXPECT_EQ(AllocatedBytes(fd.get()).value(), 12 * kPage);
  EXPECT_EQ(std::to_integer<int>(region.data()[kPage]), 0);
  EXPECT_EQ(std::to_integer<int>(region.data()[0]), 1);
  EXPECT_TRUE(PunchHole(fd.get(), 0, 0).ok());
}

TEST(SharedMemoryTest, AForkedChildDoesNotGetAPrivateWindow) {
  const UniqueFd fd = CreateSealedMemfd("window", kPage).value();
  const MappedRegion region =
      MappedRegion::Map(fd.get(), kPage, Access::kReadWrite, {.dont_fork = true}).value();
  const pid_t child = ::fork();
  if (child == 0) {
    unsigned char resident = 0;
    ::_exit(::mincore(region.data(), kPage, &resident) == 0 ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(SharedMemoryTest, MoveLeavesAnEmptyRegion) {
  const UniqueFd fd = CreateSealedMemfd("moved", kPage).value();
  MappedRegion region = MappedRegion::Map(fd.get(), kPage, Access::kReadWrite).value();
  MappedRegion other;
  other = std::move(region);
  EXPECT_EQ(region.data(), nullptr);  // NOLINT(bugprone-use-after-move)
  EXPECT_EQ(other.size(), kPage);
}

}  // namespace
}  // namespace zeroshard
