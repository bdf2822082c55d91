#include "device/cuda/memory.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tests/device/cuda/fake_device.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string Text(const absl::Status& status) { return std::string(status.message()); }

class MemoryTest : public FakeDeviceTest {
 protected:
  void Fill(DeviceAddress address, uint8_t value, uint64_t bytes) {
    CudaStream stream = NewStream();
    ASSERT_TRUE(stream.Fill(address, value, bytes).ok());
    ASSERT_TRUE(stream.Synchronize(kLongEnough).ok());
  }
  uint8_t Read(DeviceAddress address) {
    CudaStream stream = NewStream();
    uint8_t value = 0;
    EXPECT_TRUE(stream.CopyToHost(&value, address, 1).ok());
    EXPECT_TRUE(stream.Synchronize(kLongEnough).ok());
    return value;
  }
  uint64_t Granule() { return device().granularity(); }
};

TEST_F(MemoryTest, SizesAreWholeGranules) {
  const auto memory = DeviceMemory::Create(device(), 1);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->bytes(), Granule());
  EXPECT_NE(memory->address(), 0u);
  Fill(memory->address(), 0x33, memory->bytes());
  EXPECT_EQ(Read(memory->address() + memory->bytes() - 1), 0x33);
  EXPECT_EQ(DeviceMemory::Create(device(), 0).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(MemoryTest, AFullDeviceIsRefusedWithFigures) {
  const auto memory = DeviceMemory::Create(device(), 48 * kMiB);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const absl::Status status = DeviceMemory::Create(device(), 32 * kMiB).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(Text(status), AllOf(HasSubstr("cuda:0"), HasSubstr("of 32 MiB (33554432 bytes)"),
                                  HasSubstr("of the device's 64 MiB 16 MiB are free")));
}

TEST_F(MemoryTest, ADescriptorIsTheSameMemory) {
  absl::StatusOr<DeviceMemory> made = DeviceMemory::Create(device(), 2 * Granule());
  ASSERT_TRUE(made.ok()) << made.status();
  Fill(made->address(), 0x44, made->bytes());
  absl::StatusOr<UniqueFd> fd = made->Export();
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_EQ(fcntl(fd->get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);

  absl::StatusOr<DeviceMemory> imported =
      DeviceMemory::Import(device(), fd->get(), made->bytes(), Access::kReadWrite);
  ASSERT_TRUE(imported.ok()) << imported.status();
  EXPECT_NE(imported->address(), made->address());
  Fill(imported->address(), 0x55, 16);
  EXPECT_EQ(Read(made->address()), 0x55);
  EXPECT_EQ(Read(made->address() + 16), 0x44);

  // Neither the maker nor the descriptor is needed any more.
  *made = DeviceMemory();
  fd->reset();
  EXPECT_EQ(Read(imported->address() + 16), 0x44);
  const DeviceMemory moved = *std::move(imported);
  EXPECT_EQ(Read(moved.address()), 0x55);
}

TEST_F(MemoryTest, MemoryGoesWithItsLastHolder) {
  const uint64_t before = device().Memory()->free;
  absl::StatusOr<DeviceMemory> made = DeviceMemory::Create(device(), 4 * kMiB);
  ASSERT_TRUE(made.ok()) << made.status();
  absl::StatusOr<UniqueFd> fd = made->Export();
  ASSERT_TRUE(fd.ok()) << fd.status();
  *made = DeviceMemory();
  EXPECT_EQ(device().Memory()->free, before - 4 * kMiB) << "the descriptor holds it";
  fd->reset();
  EXPECT_EQ(device().Memory()->free, before);
}

TEST_F(MemoryTest, ReadOnlyIsAskedFor) {
  const auto made = DeviceMemory::Create(device(), Granule());
  ASSERT_TRUE(made.ok()) << made.status();
  Fill(made->address(), 0x66, 16);
  const absl::StatusOr<UniqueFd> fd = made->Export();
  ASSERT_TRUE(fd.ok()) << fd.status();
  const auto imported = DeviceMemory::Import(device(), fd->get(), made->bytes(), Access::kReadOnly);
  ASSERT_TRUE(imported.ok()) << imported.status();
  EXPECT_EQ(imported->access(), Access::kReadOnly);
  EXPECT_EQ(Read(imported->address()), 0x66);
}

TEST_F(MemoryTest, WhereReadOnlyIsUnknownTheMappingIsWritableAndSaysSo) {
  // The second call is that of the import.
  Restart("memory=64M,fault=cuMemSetAccess:2:CUDA_ERROR_NOT_SUPPORTED");
  const auto made = DeviceMemory::Create(device(), Granule());
  ASSERT_TRUE(made.ok()) << made.status();
  const absl::StatusOr<UniqueFd> fd = made->Export();
  ASSERT_TRUE(fd.ok()) << fd.status();
  const auto imported = DeviceMemory::Import(device(), fd->get(), made->bytes(), Access::kReadOnly);
  ASSERT_TRUE(imported.ok()) << imported.status();
  EXPECT_EQ(imported->access(), Access::kReadWrite);
  Fill(imported->address(), 0x67, 16);
  EXPECT_EQ(Read(made->address()), 0x67);
}

TEST_F(MemoryTest, WhatIsNoDescriptorOfMemoryIsRefused) {
  const absl::StatusOr<UniqueFd> memfd = CreateSealedMemfd("test", 2 * kMiB);
  ASSERT_TRUE(memfd.ok());
  const UniqueFd null(open("/dev/null", O_RDWR | O_CLOEXEC));
  for (const int fd : {memfd->get(), null.get(), -1, 1000}) {
    const absl::Status status =
        DeviceMemory::Import(device(), fd, Granule(), Access::kReadWrite).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << fd << ": " << status;
  }
}

TEST_F(MemoryTest, MemoryThatIsShorterThanAskedForIsRefused) {
  const auto made = DeviceMemory::Create(device(), Granule());
  ASSERT_TRUE(made.ok()) << made.status();
  const absl::StatusOr<UniqueFd> fd = made->Export();
  ASSERT_TRUE(fd.ok()) << fd.status();
  const absl::Status status =
      DeviceMemory::Import(device(), fd->get(), 2 * Granule(), Access::kReadWrite).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(Text(status), HasSubstr(absl::StrCat(2 * Granule())));
}

TEST_F(MemoryTest, MemoryOfAnotherGpuIsRefusedByName) {
  Restart("devices=2,memory=64M");
  const auto made = DeviceMemory::Create(device(), Granule());
  ASSERT_TRUE(made.ok()) << made.status();
  const absl::StatusOr<UniqueFd> fd = made->Export();
  ASSERT_TRUE(fd.ok()) << fd.status();
  const auto other = CudaDevice::Open(1);
  ASSERT_TRUE(other.ok()) << other.status();
  const absl::Status status =
      DeviceMemory::Import(**other, fd->get(), Granule(), Access::kReadWrite).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(Text(status), AllOf(HasSubstr("lies on cuda:0"), HasSubstr("uses cuda:1"),
                                  HasSubstr("a trainer must run on the GPU of its worker")));
}

TEST_F(MemoryTest, WhatFailsHalfwayLeavesNothing) {
  for (const char* api : {"cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
                          "cuMemExportToShareableHandle"}) {
    Restart(absl::StrCat("memory=64M,fault=", api, ":1:CUDA_ERROR_NOT_PERMITTED"));
    absl::StatusOr<DeviceMemory> memory = DeviceMemory::Create(device(), Granule());
    const absl::Status status = memory.ok() ? memory->Export().status() : memory.status();
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << api;
    EXPECT_THAT(Text(status), AllOf(HasSubstr("cuda:0"), HasSubstr("CUDA_ERROR_NOT_PERMITTED")));
    memory = absl::UnavailableError("dropped");
    EXPECT_EQ(Leftovers(), "") << api;
    EXPECT_EQ(device().Memory()->free, 64 * kMiB) << api;
  }
}

TEST_F(MemoryTest, HostPagesAreKnownToTheDevice) {
  const PinnedPages pages(device(), 8192);
  const auto memory = DeviceMemory::Create(device(), Granule());
  ASSERT_TRUE(memory.ok()) << memory.status();
  Fill(memory->address(), 0x77, 8);
  CudaStream stream = NewStream();
  ASSERT_TRUE(stream.CopyOnDevice(pages.address() + 4096, memory->address(), 8).ok());
  ASSERT_TRUE(stream.Synchronize(kLongEnough).ok());
  EXPECT_EQ(pages.As<uint8_t>()[4096], 0x77);

  const absl::Status twice =
      RegisteredHost::Register(device(), pages.region.bytes().subspan(4096)).status();
  EXPECT_EQ(twice.code(), absl::StatusCode::kAlreadyExists) << twice;
  EXPECT_EQ(RegisteredHost::Register(device(), {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(MemoryTest, RegistrationThatFailsNamesTheSize) {
  for (const char* api : {"cuMemHostRegister", "cuMemHostGetDevicePointer"}) {
    Restart(absl::StrCat("memory=64M,fault=", api, ":1:CUDA_ERROR_OUT_OF_MEMORY"));
    const absl::StatusOr<UniqueFd> fd = CreateSealedMemfd("test", kMiB);
    const auto region = MappedRegion::Map(fd->get(), kMiB, Access::kReadWrite);
    ASSERT_TRUE(region.ok());
    const absl::Status status = RegisteredHost::Register(device(), region->bytes()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << api;
    EXPECT_THAT(Text(status), AllOf(HasSubstr("cuda:0"), HasSubstr(api)));
    if (std::string(api) == "cuMemHostRegister") {
      EXPECT_THAT(Text(status), HasSubstr("1 MiB (1048576 bytes) of host memory"));
      EXPECT_THAT(Text(status), testing::Not(HasSubstr("are free")));
    }
    EXPECT_EQ(Leftovers(), "") << api;
    EXPECT_TRUE(RegisteredHost::Register(device(), region->bytes()).ok()) << api;
  }
}

class RangeTest : public MemoryTest {
 protected:
  DeviceRange NewRange(uint64_t segments, const DeviceRangeOptions& options = {}) {
    absl::StatusOr<DeviceRange> range =
        DeviceRange::Reserve(device(), segments * Granule(), options);
    EXPECT_TRUE(range.ok()) << range.status();
    return *std::move(range);
  }
};

TEST_F(RangeTest, MemoryComesAndGoesAtFixedAddresses) {
  DeviceRange range = NewRange(8);
  EXPECT_EQ(range.bytes(), 8 * Granule());
  EXPECT_EQ(device().Memory()->free, 64 * kMiB) << "addresses cost no memory";
  ASSERT_TRUE(range.Map(Granule(), 2 * Granule()).ok());
  EXPECT_EQ(range.mapped_bytes(), 2 * Granule());
  Fill(range.address() + Granule(), 0x12, 2 * Granule());
  ASSERT_TRUE(range.Unmap(Granule(), 2 * Granule()).ok());
  EXPECT_EQ(range.mapped_bytes(), 0u);
  EXPECT_EQ(device().Memory()->free, 64 * kMiB);
  ASSERT_TRUE(range.Map(2 * Granule(), 1).ok());
  Fill(range.address() + 2 * Granule(), 0x13, Granule());
  EXPECT_EQ(Read(range.address() + 2 * Granule()), 0x13);
}

TEST_F(RangeTest, ASegmentStaysAsLongAsSomeRangeNeedsIt) {
  DeviceRange range = NewRange(4);
  const uint64_t half = Granule() / 2;
  ASSERT_TRUE(range.Map(0, Granule() + half).ok());
  Fill(range.address(), 0x21, 2 * Granule());
  ASSERT_TRUE(range.Map(Granule() + half, Granule()).ok());
  EXPECT_EQ(range.mapped_bytes(), 3 * Granule());
  EXPECT_EQ(Read(range.address() + Granule()), 0x21) << "a second map does not change it";
  ASSERT_TRUE(range.Unmap(0, Granule() + half).ok());
  EXPECT_EQ(range.mapped_bytes(), 2 * Granule());
  EXPECT_EQ(Read(range.address() + Granule() + half), 0x21);
  EXPECT_EQ(range.Unmap(0, Granule() + half).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(range.mapped_bytes(), 2 * Granule());
}

TEST_F(RangeTest, SparesAreUsedAgainAndGivenBackWhenAsked) {
  DeviceRange range = NewRange(8, {.segment_bytes = 2 * Granule(), .spare_segments = 2});
  ASSERT_TRUE(range.Map(0, 8 * Granule()).ok());
  EXPECT_EQ(range.mapped_bytes(), 8 * Granule());
  ASSERT_TRUE(range.Unmap(0, 8 * Granule()).ok());
  EXPECT_EQ(range.spare_bytes(), 4 * Granule());
  EXPECT_EQ(device().Memory()->free, 64 * kMiB - 4 * Granule());
  const uint64_t made = FakeCudaCalls("cuMemCreate");
  ASSERT_TRUE(range.Map(4 * Granule(), 4 * Granule()).ok());
  EXPECT_EQ(FakeCudaCalls("cuMemCreate"), made);
  ASSERT_TRUE(range.Unmap(4 * Granule(), 4 * Granule()).ok());
  range.Trim();
  EXPECT_EQ(range.spare_bytes(), 0u);
  EXPECT_EQ(device().Memory()->free, 64 * kMiB);
}

TEST_F(RangeTest, WhenMemoryRunsOutNothingHasChanged) {
  const uint64_t all = 64 * kMiB / Granule();
  DeviceRange range = NewRange(2 * all);
  ASSERT_TRUE(range.Map(0, 2 * Granule()).ok());
  Fill(range.address(), 0x31, 2 * Granule());
  const absl::Status status = range.Map(Granule(), all * Granule());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(Text(status), AllOf(HasSubstr("of a window of"), HasSubstr("are free")));
  EXPECT_EQ(range.mapped_bytes(), 2 * Granule());
  EXPECT_EQ(device().Memory()->free, 64 * kMiB - 2 * Granule());
  EXPECT_EQ(Read(range.address() + Granule()), 0x31);
  EXPECT_TRUE(range.Map(Granule(), 2 * Granule()).ok());
}

TEST_F(RangeTest, WhatFailsHalfwayIsUndone) {
  for (const char* api : {"cuMemCreate", "cuMemMap", "cuMemSetAccess"}) {
    for (int k = 1; k <= (std::string(api) == "cuMemSetAccess" ? 1 : 3); ++k) {
      Restart(absl::StrCat("memory=64M,fault=", api, ":", k, ":CUDA_ERROR_NOT_PERMITTED"));
      DeviceRange range = NewRange(4);
      EXPECT_EQ(range.Map(0, 3 * Granule()).code(), absl::StatusCode::kPermissionDenied)
          << api << k;
      EXPECT_EQ(range.mapped_bytes(), 0u);
      EXPECT_EQ(device().Memory()->free, 64 * kMiB) << api << k;
      ASSERT_TRUE(range.Map(0, 4 * Granule()).ok()) << api << k;
      Fill(range.address(), 1, 4 * Granule());
    }
  }
}

TEST_F(RangeTest, WhatLiesOutsideIsRefused) {
  DeviceRange range = NewRange(2);
  const uint64_t end = 2 * Granule();
  for (const auto& [offset, bytes] : std::vector<std::pair<uint64_t, uint64_t>>{
           {0, 0}, {end, 1}, {0, end + 1}, {1, end}, {UINT64_MAX, 2}, {1, UINT64_MAX}}) {
    EXPECT_EQ(range.Map(offset, bytes).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(range.Unmap(offset, bytes).code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(DeviceRange::Reserve(device(), 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DeviceRange::Reserve(device(), 1, {.segment_bytes = Granule() / 2}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(RangeTest, ARangeThatMovesTakesItsMemoryAlong) {
  DeviceRange range = NewRange(2);
  ASSERT_TRUE(range.Map(0, Granule()).ok());
  Fill(range.address(), 0x41, 16);
  DeviceRange moved = std::move(range);
  EXPECT_EQ(moved.mapped_bytes(), Granule());
  EXPECT_EQ(Read(moved.address()), 0x41);
  moved = NewRange(1);
  EXPECT_EQ(device().Memory()->free, 64 * kMiB);
}

}  // namespace
}  // namespace zeroshard
