// Several processes on one fake device: this program again, as `peer`.

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <string>

#include "base/fd_passing.h"
#include "tests/fakes/cuda/fixture.h"

namespace zeroshard::fake_cuda {
namespace {

constexpr uint64_t kBytes = 4 * kMiB;
constexpr absl::Duration kPatience = absl::Seconds(20);

// Runs this program as a peer on the same node.
class Peer {
 public:
  Peer(const std::string& what, int argument, const std::string& settings) {
    pid_ = fork();
    if (pid_ != 0) return;
    fcntl(argument, F_SETFD, 0);
    setenv("ZEROSHARD_FAKE_CUDA", settings.c_str(), 1);
    const std::string number = std::to_string(argument);
    execl("/proc/self/exe", "peer", what.c_str(), number.c_str(), nullptr);
    _exit(127);
  }
  ~Peer() {
    if (pid_ > 0) Kill();
  }

  void Kill() {
    kill(pid_, SIGKILL);
    Wait();
  }
  int Wait() {
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
};

class ProcessTest : public FakeCudaTest {
 protected:
  void SetUp() override {
    node_ = testing::TempDir() + "/node-" + std::to_string(getpid());
    settings_ = "devices=2,memory=64M,node=" + node_;
    Start(settings_);
  }
  void TearDown() override {
    ResetFakeCuda("");
    std::filesystem::remove_all(node_);
  }

  std::string node_;
  std::string settings_;
};

TEST_F(ProcessTest, MemoryOutlivesTheProcessThatMadeIt) {
  auto sockets = UnixSocketPair();
  ASSERT_TRUE(sockets.ok());
  Peer owner("create", sockets->second.get(), settings_);
  auto message = ReceiveMessage(sockets->first.get(), kPatience);
  ASSERT_TRUE(message.ok()) << message.status();
  ASSERT_EQ(message->fds.size(), 1u);
  EXPECT_EQ(FreeBytes(), 64 * kMiB - kBytes) << "of one GPU for all processes";
  CUdeviceptr full = 0;
  EXPECT_EQ(cuMemAlloc(&full, 62 * kMiB), CUDA_ERROR_OUT_OF_MEMORY);
  owner.Kill();
  EXPECT_EQ(FreeBytes(), 64 * kMiB - kBytes);
  CUmemGenericAllocationHandle handle;
  CU_OK(cuMemImportFromShareableHandle(&handle,
                                       reinterpret_cast<void*>(intptr_t{message->fds[0].get()}),
                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  message->fds.clear();
  CUdeviceptr address = 0;
  MapNew(handle, kBytes, &address);
  CU_OK(cuMemRelease(handle));
  unsigned char byte = 0;
  CU_OK(cuMemcpyDtoH(&byte, address + kBytes - 1, 1));
  EXPECT_EQ(byte, 0x5a);
  CU_OK(cuMemUnmap(address, kBytes));
  EXPECT_EQ(FreeBytes(), 64 * kMiB) << "nobody holds it any more";
}

TEST_F(ProcessTest, MemoryOfAKilledProcessIsFree) {
  auto sockets = UnixSocketPair();
  ASSERT_TRUE(sockets.ok());
  Peer owner("create", sockets->second.get(), settings_);
  ASSERT_TRUE(ReceiveMessage(sockets->first.get(), kPatience).ok());  // and closes the descriptor
  EXPECT_EQ(FreeBytes(), 64 * kMiB - kBytes);
  owner.Kill();
  EXPECT_EQ(FreeBytes(), 64 * kMiB);
}

TEST_F(ProcessTest, ValuesInSharedMemoryOrderProcesses) {
  const int fd = memfd_create("counters", 0);
  ASSERT_EQ(ftruncate(fd, 4096), 0);
  void* const page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CU_OK(cuMemHostRegister(page, 4096, CU_MEMHOSTREGISTER_DEVICEMAP));
  CUdeviceptr address = 0;
  CU_OK(cuMemHostGetDevicePointer(&address, page, 0));
  Peer peer("answer", fd, settings_);
  const CUstream stream = NewStream();
  CU_OK(cuStreamWriteValue64(stream, address, 5, 0));
  CU_OK(cuStreamWaitValue64(stream, address + 8, 7, CU_STREAM_WAIT_VALUE_GEQ));
  CU_OK(cuStreamSynchronize(stream));
  EXPECT_EQ(peer.Wait(), 0);
  EXPECT_EQ(static_cast<uint64_t*>(page)[1], 7u);
  CU_OK(cuMemHostUnregister(page));
  munmap(page, 4096);
  close(fd);
}

TEST_F(ProcessTest, ALostDeviceIsLostForAllProcessesUntilItIsRepaired) {
  Start(settings_ + ",lost:1");
  CUdeviceptr memory = 0;
  CU_OK(cuMemAlloc(&memory, 64));
  const CUstream stream = NewStream();
  CU_OK(cuMemsetD8Async(memory, 0, 64, stream));
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_ERROR_ECC_UNCORRECTABLE);
  EXPECT_EQ(Peer("works", 0, settings_).Wait(), 10 + 1);
  std::filesystem::remove(node_ + "/lost-0");
  EXPECT_EQ(Peer("works", 0, settings_).Wait(), 0);
}

TEST_F(ProcessTest, AFaultOfTheNodeHitsOnce) {
  const std::string settings =
      settings_ + ",once=1,only=peer,fault=cuStreamCreate:1:CUDA_ERROR_UNKNOWN";
  EXPECT_EQ(Peer("works", 0, settings).Wait(), 10 + 2);
  EXPECT_EQ(Peer("works", 0, settings).Wait(), 0);
}

TEST_F(ProcessTest, AChildByForkHasNoDriver) {
  const pid_t pid = fork();
  if (pid == 0) {
    int count = 0;
    _exit(cuInit(0) == CUDA_ERROR_NOT_INITIALIZED &&
                  cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED
              ? 0
              : 1);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  EXPECT_EQ(status, 0);
}

// --- What peers do; the result is the exit status ---

bool Open(CUstream* stream, int* error) {
  CUcontext context;
  *error = 10;
  if (cuInit(0) != CUDA_SUCCESS) return false;
  *error = 11;
  if (cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS) return false;
  cuCtxSetCurrent(context);
  *error = 12;
  return cuStreamCreate(stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS;
}

// Makes device memory, hands it over and waits to be killed.
int Create(int socket) {
  CUmemAllocationProp prop = {};
  prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  CUmemAccessDesc access = {};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  CUmemGenericAllocationHandle handle;
  CUdeviceptr address = 0;
  int fd = -1;
  if (cuMemCreate(&handle, kBytes, &prop, 0) != CUDA_SUCCESS) return 20;
  cuMemAddressReserve(&address, kBytes, 0, 0, 0);
  cuMemMap(address, kBytes, 0, handle, 0);
  cuMemSetAccess(address, kBytes, &access, 1);
  cuMemsetD8(address, 0x5a, kBytes);
  if (cuCtxSynchronize() != CUDA_SUCCESS) return 21;
  cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (!SendMessage(socket, "memory", std::array<int, 1>{fd}, kPatience).ok()) return 22;
  for (;;) pause();
}

// Waits for 5 in the first counter of a shared page, then makes the second one 7.
int Answer(int fd, CUstream stream) {
  void* const page = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CUdeviceptr address = 0;
  if (cuMemHostRegister(page, 4096, CU_MEMHOSTREGISTER_DEVICEMAP) != CUDA_SUCCESS) return 30;
  cuMemHostGetDevicePointer(&address, page, 0);
  cuStreamWaitValue64(stream, address, 5, CU_STREAM_WAIT_VALUE_GEQ);
  cuStreamWriteValue64(stream, address + 8, 7, 0);
  return cuStreamSynchronize(stream) == CUDA_SUCCESS ? 0 : 31;
}

// By name; the argument is a descriptor.
int RunPeer(const std::string& what, int argument) {
  alarm(60);
  CUstream stream = nullptr;
  int error = 0;
  if (!Open(&stream, &error)) return error;
  if (what == "create") return Create(argument);
  if (what == "answer") return Answer(argument, stream);
  return what == "works" ? 0 : 40;
}

}  // namespace
}  // namespace zeroshard::fake_cuda

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[0]) == "peer") {
    return zeroshard::fake_cuda::RunPeer(argv[1], std::atoi(argv[2]));
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
