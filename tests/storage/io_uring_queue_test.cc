#include "storage/io_uring_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "tests/conformance/io_queue_fixture.h"
#include "tests/storage/denied_syscalls.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class IoUringQueueTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const absl::Status status = MakeIoUringQueue({}).status();
    if (!status.ok()) GTEST_SKIP() << status;
  }
};

TEST_F(IoUringQueueTest, TransfersInsideAndOutsideOfRegisteredBuffers) {
  const AlignedBuffer first = Buffer(1 << 20);
  const AlignedBuffer second = Buffer(1 << 20);
  const AlignedBuffer other = Buffer(1 << 20);
  const auto queue =
      Made(MakeIoUringQueue({.depth = 4, .buffers = {first.bytes(), second.bytes()}}));
  EXPECT_THAT(queue->description(), HasSubstr(", depth 4, 2 buffers registered"));
  const ScratchFile file = Scratch();
  uint64_t seed = 0;
  for (const AlignedBuffer* from : {&first, &second, &other}) {
    for (const AlignedBuffer* to : {&first, &second, &other}) {
      Fill(from->bytes(), ++seed);
      ASSERT_TRUE(Do(*queue, Write(file.fd.get(), from->bytes().subspan(4096), 8192)).ok());
      Fill(to->bytes(), 99);
      ASSERT_TRUE(Do(*queue, Read(file.fd.get(), to->bytes().subspan(4096, 1 << 19), 8192)).ok());
      Fill(other.bytes(), seed);
      EXPECT_TRUE(std::equal(to->bytes().begin() + 4096, to->bytes().begin() + 4096 + (1 << 19),
                             other.bytes().begin() + 4096));
    }
  }
}

TEST_F(IoUringQueueTest, DoesWithoutBuffersThatMayNotBeLocked) {
  const std::string text = RunWithDeniedCalls({}, 0, []() -> std::string {
    const rlimit limit = {8 << 20, 8 << 20};
    if (::setrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "setrlimit";
    // Root is not held to the limit.
    if (::geteuid() == 0 && ::setresuid(65534, 65534, 65534) != 0) return "setresuid";
    const AlignedBuffer memory = Buffer(64 << 20);
    const auto queue = MakeIoUringQueue({.depth = 4, .buffers = {memory.bytes()}});
    if (!queue.ok()) return queue.status().ToString();
    const UniqueFd file(::memfd_create("target", MFD_CLOEXEC));
    const absl::Status written = Do(**queue, Write(file.get(), memory.bytes(), 0));
    return written.ok() ? (*queue)->description() : written.ToString();
  });
  EXPECT_THAT(text, HasSubstr("no buffers registered (io_uring_register buffers: "));
  EXPECT_THAT(text, HasSubstr("they need 67108864 bytes of locked memory, the limit is 8388608"));
}

TEST_F(IoUringQueueTest, DoesWithoutBuffersWhereRegistrationIsForbidden) {
  const std::string text = RunWithDeniedCalls({SYS_io_uring_register}, EPERM, [] {
    const AlignedBuffer memory = Buffer(4096);
    const auto queue = Made(MakeIoUringQueue({.depth = 4, .buffers = {memory.bytes()}}));
    const UniqueFd file(::memfd_create("target", MFD_CLOEXEC));
    return Do(*queue, Write(file.get(), memory.bytes(), 0)).ToString() + queue->description();
  });
  EXPECT_THAT(text, StartsWith("OKio_uring ("));
  EXPECT_THAT(text, HasSubstr("no buffers registered"));
}

// The kernel never saw the transfers, so their memory is free and the queue can be destroyed.
TEST_F(IoUringQueueTest, ARingThatIsRefusedReportsAllAndHoldsNothing) {
  const std::string text = RunWithDeniedCalls({SYS_io_uring_enter}, EPERM, [] {
    const AlignedBuffer memory = Buffer(4096);
    const auto queue = Made(MakeIoUringQueue({.depth = 4}));
    const UniqueFd file(::memfd_create("target", MFD_CLOEXEC));
    std::string out = queue->Submit(Write(file.get(), memory.bytes(), 0, 7)).ToString();
    for (const IoCompletion& completion : queue->Wait(5, Soon())) {
      out += " " + std::to_string(completion.tag) + " " + completion.status.ToString();
    }
    out += " " + std::to_string(queue->in_flight());
    return out + " " + queue->Submit(Sync(file.get())).ToString();
  });
  EXPECT_THAT(text, StartsWith("OK 7 PERMISSION_DENIED: io_uring_enter the I/O queue: "));
  EXPECT_THAT(text, HasSubstr(" 0 PERMISSION_DENIED: the I/O queue has failed: "));
}

}  // namespace
}  // namespace zeroshard
