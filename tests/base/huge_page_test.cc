#include "base/huge_page.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdint>

#include "base/shared_memory.h"

namespace zeroshard {
namespace {

constexpr size_t kPage = 4096;

size_t Remainder(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kHugePageBytes;
}

MapRequest Anonymous(size_t bytes) {
  return {
      .bytes = bytes, .protection = PROT_READ | PROT_WRITE, .flags = MAP_PRIVATE | MAP_ANONYMOUS};
}

TEST(HugePage, MappingsStartAtOne) {
  for (const size_t bytes : {kHugePageBytes, kHugePageBytes + 1, 3 * kHugePageBytes + 5 * kPage}) {
    void* memory = MapForHugePages(Anonymous(bytes));
    ASSERT_NE(memory, MAP_FAILED);
    EXPECT_EQ(Remainder(memory), 0u);
    static_cast<char*>(memory)[bytes - 1] = 1;
    // The page behind it is not ours.
    void* behind = static_cast<char*>(memory) + (bytes + kPage - 1) / kPage * kPage;
    EXPECT_EQ(::msync(behind, kPage, MS_ASYNC) == 0 ? 0 : errno, ENOMEM);
    ::munmap(memory, bytes);
  }
}

TEST(HugePage, MappingsFromAnOffsetKeepItsRemainder) {
  auto file = CreateSealedMemfd("huge", 4 * kHugePageBytes);
  ASSERT_TRUE(file.ok());
  auto region = MappedRegion::Map(file->get(), 2 * kHugePageBytes, Access::kReadWrite,
                                  {.offset = kHugePageBytes + 3 * kPage});
  ASSERT_TRUE(region.ok());
  EXPECT_EQ(Remainder(region->data()), 3 * kPage);
}

TEST(HugePage, SmallOnesLieAnywhere) {
  void* memory = MapForHugePages(Anonymous(kPage));
  ASSERT_NE(memory, MAP_FAILED);
  ::munmap(memory, kPage);
}

TEST(HugePage, WhatCannotBeMappedIsAnErrorOfMmap) {
  MapRequest request = Anonymous(kHugePageBytes);
  request.flags = MAP_SHARED;
  request.fd = 1 << 20;
  EXPECT_EQ(MapForHugePages(request), MAP_FAILED);
  EXPECT_EQ(errno, EBADF);
  EXPECT_EQ(MapForHugePages(Anonymous(SIZE_MAX)), MAP_FAILED);
  EXPECT_EQ(MapForHugePages(Anonymous(SIZE_MAX / 2)), MAP_FAILED);
}

TEST(HugePage, WholeOnesLieInside) {
  auto* const base = reinterpret_cast<std::byte*>(8 * kHugePageBytes);
  auto whole = [&](size_t from, size_t bytes) {
    const std::span<std::byte> part = WholeHugePages({base + from, bytes});
    return std::pair<size_t, size_t>(part.empty() ? 0 : part.data() - base, part.size());
  };
  using Part = std::pair<size_t, size_t>;
  EXPECT_EQ(whole(0, kHugePageBytes), Part(0, kHugePageBytes));
  EXPECT_EQ(whole(0, 2 * kHugePageBytes + kPage), Part(0, 2 * kHugePageBytes));
  EXPECT_EQ(whole(kPage, 2 * kHugePageBytes), Part(kHugePageBytes, kHugePageBytes));
  EXPECT_EQ(whole(kPage, 2 * kHugePageBytes - kPage), Part(kHugePageBytes, kHugePageBytes));
  EXPECT_EQ(whole(kPage, 2 * kHugePageBytes - 2 * kPage), Part(0, 0));
  EXPECT_EQ(whole(0, kHugePageBytes - 1), Part(0, 0));
  EXPECT_EQ(whole(0, 0), Part(0, 0));
}

}  // namespace
}  // namespace zeroshard
