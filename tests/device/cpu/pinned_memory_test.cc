#include "device/cpu/pinned_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/shared_memory.h"
#include "storage/aligned_buffer.h"
#include "tests/device/cpu/locked_bytes.h"
#include "tests/storage/denied_syscalls.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr size_t kPage = 4096;

size_t Pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

struct File {
  UniqueFd fd;
  MappedRegion region;
};

File MakeFile(size_t bytes, Access access = Access::kReadWrite) {
  File file;
  file.fd = CreateSealedMemfd("pinned", bytes).value();
  file.region = MappedRegion::Map(file.fd.get(), bytes, access).value();
  return file;
}

PinOptions OfFile() {
  PinOptions options;
  options.kind = MemoryKind::kMemoryFile;
  return options;
}

// "locked N", or what went wrong.
std::string Describe(const absl::StatusOr<PinnedResult>& result) {
  if (!result.ok()) return result.status().ToString();
  if (result->unlocked_bytes > 0)
    return absl::StrCat("unlocked ", result->unlocked_bytes, "|", result->warning);
  return absl::StrCat("locked ", result->locked_bytes, result->warning);
}

TEST(PinnedMemory, LocksWholePagesAndNoMore) {
  for (const size_t bytes : {size_t{1}, kPage, kPage + 1, (size_t{3} << 20) + 5}) {
    const uint64_t before = LockedBytes();
    {
      AlignedBuffer buffer = AlignedBuffer::Make(bytes).value();
      const auto result = PinMemory(buffer.bytes(), {});
      EXPECT_EQ(Describe(result), absl::StrCat("locked ", Pages(bytes)));
      EXPECT_EQ(LockedBytes(), before + Pages(bytes));
      // Again takes nothing more.
      EXPECT_TRUE(PinMemory(buffer.bytes(), {}).ok());
      EXPECT_EQ(LockedBytes(), before + Pages(bytes));
    }
    EXPECT_EQ(LockedBytes(), before);
    File file = MakeFile(bytes);
    EXPECT_EQ(Describe(PinMemory(file.region.bytes(), OfFile())),
              absl::StrCat("locked ", Pages(bytes)));
    EXPECT_EQ(LockedBytes(), before + Pages(bytes));
    EXPECT_EQ(AllocatedBytes(file.fd.get()).value(), Pages(bytes));
  }
}

TEST(PinnedMemory, BringsInAllOfItAndShowsProgress) {
  AlignedBuffer buffer = AlignedBuffer::Make(64 * kPage).value();
  std::atomic<uint64_t> progress = 0;
  PinOptions options;
  options.progress = &progress;
  ASSERT_TRUE(PinMemory(buffer.bytes(), options).ok());
  unsigned char there[64] = {};
  ASSERT_EQ(::mincore(buffer.data(), buffer.size(), there), 0);
  for (const unsigned char page : there) EXPECT_EQ(page & 1, 1);
  EXPECT_GT(progress.load(), 0u);
}

TEST(PinnedMemory, MemoryThatMayOnlyBeReadIsLockedToo) {
  File file = MakeFile(10 * kPage, Access::kReadOnly);
  EXPECT_EQ(Describe(PinMemory(file.region.bytes(), OfFile())),
            absl::StrCat("locked ", 10 * kPage));
}

TEST(PinnedMemory, SparseMemoryStaysSparse) {
  const uint64_t before = LockedBytes();
  File file = MakeFile(1000 * kPage);
  std::byte* const data = file.region.data();
  data[7 * kPage] = std::byte{1};
  PinOptions options = OfFile();
  options.on_touch = true;
  EXPECT_EQ(Describe(PinMemory(file.region.bytes(), options)),
            absl::StrCat("locked ", 1000 * kPage));
  EXPECT_EQ(LockedBytes(), before + 1000 * kPage);
  EXPECT_EQ(AllocatedBytes(file.fd.get()).value(), kPage);
  data[500 * kPage] = data[501 * kPage] = std::byte{2};
  EXPECT_EQ(AllocatedBytes(file.fd.get()).value(), 3 * kPage);
  // What is given back is gone, and can come again, any number of times.
  for (int round = 0; round < 100; ++round) {
    ASSERT_TRUE(PunchHole(file.fd.get(), 400 * kPage, 200 * kPage).ok());
    EXPECT_EQ(AllocatedBytes(file.fd.get()).value(), kPage);
    EXPECT_EQ(data[500 * kPage], std::byte{0});
    std::memset(data + 400 * kPage, round, 200 * kPage);
    EXPECT_EQ(AllocatedBytes(file.fd.get()).value(), 201 * kPage);
  }
  EXPECT_EQ(data[7 * kPage], std::byte{1});
  EXPECT_EQ(LockedBytes(), before + 1000 * kPage);
}

TEST(PinnedMemory, MemoryLockedAsAWholeCanBeGivenBackToo) {
  File file = MakeFile(100 * kPage);
  ASSERT_TRUE(PinMemory(file.region.bytes(), OfFile()).ok());
  ASSERT_TRUE(PunchHole(file.fd.get(), 10 * kPage, 50 * kPage).ok());
  EXPECT_EQ(AllocatedBytes(file.fd.get()).value(), 50 * kPage);
}

TEST(PinnedMemory, OnePageOverTheLimitIsUsedUnlocked) {
  const std::string text = RunWithLockLimit({16 * kPage, 16 * kPage}, [] {
    AlignedBuffer small = AlignedBuffer::Make(16 * kPage).value();
    AlignedBuffer large = AlignedBuffer::Make(17 * kPage).value();
    PinOptions options;
    options.what = "staging";
    options.later_bytes = 2048;
    std::string all = Describe(PinMemory(large.bytes(), options));
    absl::StrAppend(&all, "|", LockedBytes());
    large.bytes()[17 * kPage - 1] = std::byte{1};
    absl::StrAppend(&all, "|", Describe(PinMemory(small.bytes(), options)));
    return all;
  });
  EXPECT_THAT(text, StartsWith(absl::StrCat("unlocked ", 17 * kPage, "|staging: 69632 bytes ")));
  EXPECT_THAT(text, HasSubstr("RLIMIT_MEMLOCK is 65536 bytes, 0 of them used, and 71680 are "
                              "needed: start the daemon with LimitMEMLOCK=71680 in"));
  EXPECT_THAT(text, AllOf(HasSubstr("`ulimit -l 70`"), HasSubstr("may be swapped out|0|")));
  EXPECT_THAT(text, ::testing::EndsWith(absl::StrCat("|locked ", 16 * kPage)));
}

TEST(PinnedMemory, OverTheLimitIsAnErrorWhenRequired) {
  const std::string text = RunWithLockLimit({0, 0}, [] {
    File file = MakeFile(kPage);
    PinOptions options = OfFile();
    options.what = "states of worker 3";
    options.require = true;
    options.on_touch = true;
    return Describe(PinMemory(file.region.bytes(), options));
  });
  EXPECT_THAT(text, StartsWith("RESOURCE_EXHAUSTED: states of worker 3: 4096 bytes cannot be "
                               "locked in memory: RLIMIT_MEMLOCK is 0 bytes, 0 of them used, and "
                               "4096 are needed"));
}

TEST(PinnedMemory, ALimitThatThisProcessMayRaiseIsRaised) {
  EXPECT_EQ(RunWithLockLimit({kPage, 16 * kPage},
                             [] {
                               AlignedBuffer buffer = AlignedBuffer::Make(10 * kPage).value();
                               return Describe(PinMemory(buffer.bytes(), {}));
                             }),
            absl::StrCat("locked ", 10 * kPage));
}

// More than the usual limit of 8 MiB.
constexpr size_t kMuch = size_t{12} << 20;

std::string PinMuch() {
  AlignedBuffer buffer = AlignedBuffer::Make(kMuch).value();
  return Describe(PinMemory(buffer.bytes(), {}));
}

TEST(PinnedMemory, NoLimitIsNoLimit) {
  const std::string text = RunWithLockLimit({RLIM_INFINITY, RLIM_INFINITY}, PinMuch);
  if (text == "setrlimit") GTEST_SKIP() << "this user may not raise the limit";
  EXPECT_EQ(text, absl::StrCat("locked ", kMuch));
}

TEST(PinnedMemory, TheCapabilityGoesAboveTheLimit) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root has the capability";
  const std::string text = RunWithDeniedCalls({}, 0, []() -> std::string {
    const rlimit none = {0, 0};
    if (::setrlimit(RLIMIT_MEMLOCK, &none) != 0) return "setrlimit";
    return PinMuch();
  });
  if (text.find("RLIMIT_MEMLOCK") != std::string::npos) {
    GTEST_SKIP() << "root has no CAP_IPC_LOCK here";
  }
  EXPECT_EQ(text, absl::StrCat("locked ", kMuch));
}

TEST(PinnedMemory, AKernelThatForbidsItIsNoReasonToStop) {
  const std::string text = RunWithDeniedCalls({SYS_mlock2}, EPERM, [] {
    AlignedBuffer buffer = AlignedBuffer::Make(kPage).value();
    return Describe(PinMemory(buffer.bytes(), {}));
  });
  EXPECT_THAT(text, AllOf(StartsWith("unlocked 4096|memory: 4096 bytes cannot be locked"),
                          HasSubstr("Operation not permitted")));
}

TEST(PinnedMemory, WhatCannotBeBroughtInIsNotLocked) {
  const uint64_t before = LockedBytes();
  AlignedBuffer buffer = AlignedBuffer::Make(4 * kPage).value();
  ASSERT_EQ(::mprotect(buffer.data(), buffer.size(), PROT_NONE), 0);
  const auto result = PinMemory(buffer.bytes(), {});
  EXPECT_THAT(Describe(result), AllOf(StartsWith("unlocked 16384|"), HasSubstr("bring in")));
  EXPECT_EQ(LockedBytes(), before);
}

TEST(PinnedMemory, AForkedChildDoesNotGetIt) {
  File file = MakeFile(4 * kPage);
  ASSERT_TRUE(PinMemory(file.region.bytes(), OfFile()).ok());
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool mapped = ::msync(file.region.data(), kPage, MS_ASYNC) == 0;
    ::_exit(mapped ? 1 : LockedBytes() == 0 ? 0 : 2);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(PinnedMemory, OnlyWholePagesOfTheCallerAreTaken) {
  AlignedBuffer buffer = AlignedBuffer::Make(4 * kPage).value();
  EXPECT_EQ(PinMemory(buffer.bytes().subspan(8), {}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(PinMemory({}, {}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(PinnedMemory, NothingIsLockedThatWasNotAskedFor) {
  const uint64_t before = LockedBytes();
  AlignedBuffer buffer = AlignedBuffer::Make(4 * kPage).value();
  PinOptions options;
  options.lock = false;
  EXPECT_EQ(Describe(PinMemory(buffer.bytes(), options)), "locked 0");
  EXPECT_EQ(LockedBytes(), before);
}

}  // namespace
}  // namespace zeroshard
