// Device memory between processes: handed over by descriptor, and alive after its maker's end.
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "tests/device/cuda/fake_device.h"
#include "tests/device/cuda/owner_process.h"

namespace zeroshard {
namespace {

class SharingTest : public FakeDeviceTest {
 protected:
  OwnerProcess NewOwner(uint64_t bytes, uint8_t value) {
    absl::StatusOr<OwnerProcess> owner = OwnerProcess::Start(
        "tests/device/cuda/memory_owner", bytes, value, {"LD_LIBRARY_PATH=tests/fakes/cuda"});
    EXPECT_TRUE(owner.ok()) << owner.status();
    return *std::move(owner);
  }

  DeviceMemory Import(const OwnerProcess& owner, uint64_t bytes) {
    absl::StatusOr<DeviceMemory> memory =
        DeviceMemory::Import(device(), owner.fd(), bytes, Access::kReadWrite);
    EXPECT_TRUE(memory.ok()) << memory.status();
    return *std::move(memory);
  }

  // All bytes of the memory, when they are the same; else -1.
  int Value(const DeviceMemory& memory) {
    std::vector<uint8_t> bytes = Bytes(memory);
    for (const uint8_t byte : bytes) {
      if (byte != bytes.front()) return -1;
    }
    return bytes.front();
  }

  std::vector<uint8_t> Bytes(const DeviceMemory& memory) {
    std::vector<uint8_t> bytes(memory.bytes());
    CudaStream stream = NewStream();
    EXPECT_TRUE(stream.CopyToHost(bytes.data(), memory.address(), bytes.size()).ok());
    EXPECT_TRUE(stream.Synchronize(kLongEnough).ok());
    return bytes;
  }
};

TEST_F(SharingTest, MemorySurvivesTheKillOfItsMaker) {
  OwnerProcess owner = NewOwner(4 * kMiB, 0x61);
  const DeviceMemory memory = Import(owner, 4 * kMiB);
  EXPECT_EQ(Value(memory), 0x61);
  ASSERT_TRUE(owner.FillAgain().ok());
  EXPECT_EQ(Value(memory), 0x62);

  ASSERT_TRUE(owner.Kill().ok());
  EXPECT_EQ(Value(memory), 0x62);
  // A successor that gets the descriptor from whoever holds it.
  const DeviceMemory successor = Import(owner, 4 * kMiB);
  EXPECT_EQ(Value(successor), 0x62);
}

TEST_F(SharingTest, TheDescriptorAloneKeepsTheMemory) {
  OwnerProcess owner = NewOwner(2 * kMiB, 0x71);
  ASSERT_TRUE(owner.Kill().ok());
  EXPECT_EQ(Value(Import(owner, 2 * kMiB)), 0x71);
}

TEST_F(SharingTest, WorkOfADeadProcessEndsWithIt) {
  OwnerProcess owner = NewOwner(8 * kMiB, 1);
  const DeviceMemory memory = Import(owner, 8 * kMiB);
  ASSERT_TRUE(owner.KeepBusy().ok());
  ASSERT_TRUE(owner.Kill().ok());
  const std::vector<uint8_t> bytes = Bytes(memory);
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_EQ(Bytes(memory), bytes);
}

}  // namespace
}  // namespace zeroshard
