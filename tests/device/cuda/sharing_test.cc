// Device memory between processes: handed over by descriptor, and alive after its maker's end.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/fd_passing.h"
#include "tests/device/cuda/fake_device.h"

extern char** environ;

namespace zeroshard {
namespace {

constexpr char kOwner[] = "tests/device/cuda/memory_owner";
constexpr char kFakeDriver[] = "LD_LIBRARY_PATH=tests/fakes/cuda";

// A process that has made device memory. Killed at the latest with this object.
class Owner {
 public:
  Owner(uint64_t bytes, uint8_t value) {
    auto sockets = UnixSocketPair();
    EXPECT_TRUE(sockets.ok()) << sockets.status();
    socket_ = std::move(sockets->first);
    fcntl(sockets->second.get(), F_SETFD, 0);
    const std::string fd = std::to_string(sockets->second.get());
    const std::string size = std::to_string(bytes);
    const std::string fill = std::to_string(value);
    const char* arguments[] = {kOwner, fd.c_str(), size.c_str(), fill.c_str(), nullptr};
    std::vector<char*> environment;
    for (char** variable = environ; *variable != nullptr; ++variable) {
      if (strncmp(*variable, "LD_LIBRARY_PATH=", 16) != 0) environment.push_back(*variable);
    }
    environment.push_back(const_cast<char*>(kFakeDriver));
    environment.push_back(nullptr);
    EXPECT_EQ(posix_spawn(&pid_, kOwner, nullptr, nullptr, const_cast<char**>(arguments),
                          environment.data()),
              0);
  }
  ~Owner() { Kill(); }

  Message Receive() {
    absl::StatusOr<Message> message = ReceiveMessage(socket_.get(), kLongEnough);
    EXPECT_TRUE(message.ok()) << message.status();
    return message.ok() ? *std::move(message) : Message();
  }

  // The memory is filled with the next value when this returns.
  void FillAgain() {
    ASSERT_TRUE(SendMessage(socket_.get(), "again", {}, kLongEnough).ok());
    EXPECT_EQ(Receive().bytes, "done");
  }

  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    EXPECT_TRUE(WIFSIGNALED(status)) << "it ended by itself with status " << status;
    pid_ = 0;
  }

 private:
  UniqueFd socket_;
  pid_t pid_ = 0;
};

class SharingTest : public FakeDeviceTest {
 protected:
  // All bytes of the memory, when they are the same; else -1.
  int Value(const DeviceMemory& memory) {
    std::vector<uint8_t> bytes(memory.bytes());
    CudaStream stream = NewStream();
    EXPECT_TRUE(stream.CopyToHost(bytes.data(), memory.address(), bytes.size()).ok());
    EXPECT_TRUE(stream.Synchronize(kLongEnough).ok());
    for (const uint8_t byte : bytes) {
      if (byte != bytes.front()) return -1;
    }
    return bytes.front();
  }
};

TEST_F(SharingTest, MemorySurvivesTheKillOfItsMaker) {
  Owner owner(4 * kMiB, 0x61);
  Message message = owner.Receive();
  ASSERT_EQ(message.bytes, "ready");
  ASSERT_EQ(message.fds.size(), 1u);
  absl::StatusOr<DeviceMemory> memory =
      DeviceMemory::Import(device(), message.fds[0].get(), 4 * kMiB, Access::kReadWrite);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(Value(*memory), 0x61);
  owner.FillAgain();
  EXPECT_EQ(Value(*memory), 0x62);

  owner.Kill();
  EXPECT_EQ(Value(*memory), 0x62);
  // A successor that gets the descriptor from whoever holds it.
  absl::StatusOr<DeviceMemory> successor =
      DeviceMemory::Import(device(), message.fds[0].get(), 4 * kMiB, Access::kReadWrite);
  ASSERT_TRUE(successor.ok()) << successor.status();
  EXPECT_EQ(Value(*successor), 0x62);
}

TEST_F(SharingTest, TheDescriptorAloneKeepsTheMemory) {
  Owner owner(2 * kMiB, 0x71);
  Message message = owner.Receive();
  ASSERT_EQ(message.bytes, "ready");
  owner.Kill();
  absl::StatusOr<DeviceMemory> memory =
      DeviceMemory::Import(device(), message.fds.at(0).get(), 2 * kMiB, Access::kReadWrite);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(Value(*memory), 0x71);
}

}  // namespace
}  // namespace zeroshard
