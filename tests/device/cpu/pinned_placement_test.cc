// Where pinned memory lies: its NUMA node, and huge pages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <string>

#include "base/huge_page.h"
#include "base/shared_memory.h"
#include "device/cpu/affinity.h"
#include "device/cpu/memory_node.h"
#include "device/cpu/pinned_memory.h"
#include "storage/aligned_buffer.h"
#include "tests/storage/denied_syscalls.h"
#include "tests/storage/temp_dir.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

constexpr size_t kPage = 4096;

// Node of the page at `address`, which is brought in; -1 where the kernel does not say.
int NodeOfPage(std::byte* address) {
  *address = std::byte{1};
  int node = -1;
  const long result =
      ::syscall(SYS_get_mempolicy, &node, nullptr, 0, address, MPOL_F_NODE | MPOL_F_ADDR);
  return result == 0 ? node : -1;
}

TEST(PinnedPlacement, MemoryLiesOnTheNodeOfAProcessor) {
  const auto node = NodeOfCpu(AllowedCpus().back());
  if (!node.ok()) GTEST_SKIP() << node.status();
  AlignedBuffer buffer = AlignedBuffer::Make(16 * kPage).value();
  auto file = CreateSealedMemfd("placed", 16 * kPage).value();
  auto region = MappedRegion::Map(file.get(), 16 * kPage, Access::kReadWrite).value();
  for (const std::span<std::byte> memory : {buffer.bytes(), region.bytes()}) {
    memory[0] = std::byte{1};  // touched before
    PinOptions options;
    options.kind =
        memory.data() == region.data() ? MemoryKind::kMemoryFile : MemoryKind::kAnonymous;
    options.node = *node;
    options.on_touch = true;
    const auto result = PinMemory(memory, options);
    ASSERT_TRUE(result.ok()) << result.status();
    if (!result->node_reason.empty()) GTEST_SKIP() << result->node_reason;
    EXPECT_EQ(result->node, *node);
    EXPECT_EQ(result->locked_bytes, memory.size());
    EXPECT_EQ(NodeOfPage(memory.data()), *node);
    EXPECT_EQ(NodeOfPage(memory.data() + 9 * kPage), *node);
  }
}

TEST(PinnedPlacement, ThereIsNoNodeForNoProcessor) {
  EXPECT_EQ(NodeOfCpu(1 << 20).status().code(), absl::StatusCode::kNotFound);
}

TEST(PinnedPlacement, MemoryOfANodeThatIsNotThereIsLockedElsewhere) {
  AlignedBuffer buffer = AlignedBuffer::Make(kPage).value();
  for (const int node : {1023, 1024}) {
    PinOptions options;
    options.node = node;
    const auto result = PinMemory(buffer.bytes(), options);
    ASSERT_TRUE(result.ok());
    EXPECT_EQ(result->node, -1);
    EXPECT_THAT(result->node_reason, HasSubstr("NUMA node 102"));
    EXPECT_EQ(result->locked_bytes, kPage);
  }
}

TEST(PinnedPlacement, ContainersThatForbidPlacingDoNotStopIt) {
  auto describe = [] {
    AlignedBuffer buffer = AlignedBuffer::Make(kPage).value();
    PinOptions options;
    options.node = 0;
    const PinnedResult result = PinMemory(buffer.bytes(), options).value();
    return std::to_string(result.locked_bytes) + " " + std::to_string(result.node) + " " +
           result.node_reason;
  };
  EXPECT_THAT(RunWithDeniedCalls({SYS_mbind}, EPERM, describe),
              ::testing::StartsWith("4096 -1 mbind memory of NUMA node 0: Operation not"));
  // A kernel without NUMA has one node.
  EXPECT_EQ(RunWithDeniedCalls({SYS_mbind}, ENOSYS, describe), "4096 0 ");
}

class PinnedHugePages : public ::testing::Test {
 protected:
  void Write(const std::string& name, const std::string& line) {
    const std::filesystem::path path = std::filesystem::path(settings_.path()) / name;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << line << "\n";
  }
  PinnedResult Pin(std::span<std::byte> memory, MemoryKind kind) {
    PinOptions options;
    options.kind = kind;
    options.lock = false;
    options.huge_pages = true;
    options.huge_page_settings = settings_.path();
    return PinMemory(memory, options).value();
  }
  // The reason, or "huge".
  std::string PinBuffer(size_t bytes = 2 * kHugePageBytes + kPage) {
    AlignedBuffer buffer = AlignedBuffer::Make(bytes).value();
    const PinnedResult result = Pin(buffer.bytes(), MemoryKind::kAnonymous);
    return result.huge ? "huge" + result.huge_reason : result.huge_reason;
  }
  std::string PinFile(size_t skipped = 0) {
    const size_t bytes = 4 * kHugePageBytes;
    auto file = CreateSealedMemfd("huge", bytes).value();
    auto region = MappedRegion::Map(file.get(), bytes, Access::kReadWrite).value();
    const PinnedResult result = Pin(region.bytes().subspan(skipped), MemoryKind::kMemoryFile);
    return result.huge ? "huge" + result.huge_reason : result.huge_reason;
  }

  TempDir settings_;
};

TEST_F(PinnedHugePages, AreNotGivenWithAReason) {
  EXPECT_EQ(PinBuffer(), "this kernel has no transparent huge pages");
  Write("enabled", "always madvise [never]");
  Write("shmem_enabled", "always within_size advise never [deny] force");
  EXPECT_EQ(PinBuffer(), settings_.path() +
                             "/enabled is \"never\"; \"madvise\" would give them to memory that "
                             "asks");
  EXPECT_THAT(PinFile(), HasSubstr("/shmem_enabled is \"deny\"; \"advise\" would"));
  EXPECT_EQ(PinBuffer(kHugePageBytes - kPage), "it is smaller than a huge page");
  EXPECT_EQ(PinFile(kPage), "its address is not a huge page's");
}

TEST_F(PinnedHugePages, AreTakenWhereTheyMayBe) {
  Write("enabled", "always [madvise] never");
  Write("shmem_enabled", "always within_size [advise] never deny force");
  if (PinBuffer().find("madvise huge pages") == 0) GTEST_SKIP() << PinBuffer();
  EXPECT_EQ(PinBuffer(), "huge");
  EXPECT_EQ(PinFile(), "huge");
}

TEST_F(PinnedHugePages, FollowTheSettingOfTheirSize) {
  Write("enabled", "always [madvise] never");
  Write("hugepages-2048kB/enabled", "always inherit madvise [never]");
  EXPECT_THAT(PinBuffer(), HasSubstr("hugepages-2048kB/enabled is \"never\""));
  Write("enabled", "always madvise [never]");
  Write("hugepages-2048kB/enabled", "always [inherit] madvise never");
  EXPECT_THAT(PinBuffer(), HasSubstr("/enabled is \"never\""));
}

TEST_F(PinnedHugePages, AreNotMentionedWhenNobodyAsked) {
  AlignedBuffer buffer = AlignedBuffer::Make(2 * kHugePageBytes).value();
  PinOptions options;
  options.lock = false;
  const PinnedResult result = PinMemory(buffer.bytes(), options).value();
  EXPECT_FALSE(result.huge);
  EXPECT_EQ(result.huge_reason, "");
}

// Whatever this kernel does with the advice, no byte beyond the memory is taken.
TEST(PinnedPlacement, HugePagesHoldNoMoreThanWasAskedFor) {
  const size_t bytes = 2 * kHugePageBytes + 3 * kPage;
  auto file = CreateSealedMemfd("huge", bytes).value();
  auto region = MappedRegion::Map(file.get(), bytes, Access::kReadWrite).value();
  PinOptions options;
  options.kind = MemoryKind::kMemoryFile;
  options.huge_pages = true;
  const PinnedResult result = PinMemory(region.bytes(), options).value();
  EXPECT_EQ(result.huge, result.huge_reason.empty());
  EXPECT_EQ(AllocatedBytes(file.get()).value(), bytes);
  ASSERT_TRUE(PunchHole(file.get(), kPage, 100 * kPage).ok());
  EXPECT_EQ(AllocatedBytes(file.get()).value(), bytes - 100 * kPage);
}

}  // namespace
}  // namespace zeroshard
