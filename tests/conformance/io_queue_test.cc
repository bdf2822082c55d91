// The conformance suite of IoQueue over each implementation, and over the faulty decorator with its
// faults off.
#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <string>
#include <utility>

#include "base/status.h"
#include "storage/io_thread_queue.h"
#include "storage/io_uring_queue.h"
#include "tests/conformance/io_queue_conformance.h"
#include "tests/fakes/faulty_io_queue.h"

namespace zeroshard {
namespace {

using Made = absl::StatusOr<std::unique_ptr<IoQueue>>;

Made MakeUring(size_t depth) { return MakeIoUringQueue({.depth = depth}); }
Made MakeThreads(size_t depth) { return MakeIoThreadQueue({.depth = depth, .threads = 4}); }

Made Decorated(Made inner) {
  if (!inner.ok()) return inner;
  return std::make_unique<FaultyIoQueue>(*std::move(inner), std::vector<IoFault>{}, 1);
}

class IoQueueTest : public ::testing::TestWithParam<IoQueueCase> {
 protected:
  void SetUp() override {
    // Why io_uring may be missing is tested in tests/storage/io_backend_test.cc.
    const absl::Status status = GetParam().make(1).status();
    if (ErrnoOf(status) == EPERM || ErrnoOf(status) == ENOSYS) GTEST_SKIP() << status;
    ASSERT_TRUE(status.ok()) << status;
  }
};

TEST_P(IoQueueTest, DirectSizes) { TestDirectSizes(GetParam()); }
TEST_P(IoQueueTest, BufferedSizes) { TestBufferedSizes(GetParam()); }
TEST_P(IoQueueTest, ManyFilesAtEveryDepth) { TestManyFilesAtEveryDepth(GetParam()); }
TEST_P(IoQueueTest, FullQueueRefuses) { TestFullQueueRefuses(GetParam()); }
TEST_P(IoQueueTest, WaitReturns) { TestWaitReturns(GetParam()); }
TEST_P(IoQueueTest, Errors) { TestErrors(GetParam()); }
TEST_P(IoQueueTest, EndOfFile) { TestEndOfFile(GetParam()); }
TEST_P(IoQueueTest, ImpossibleTransfers) { TestImpossibleTransfers(GetParam()); }
TEST_P(IoQueueTest, NoSpace) { TestNoSpace(GetParam()); }
TEST_P(IoQueueTest, FailingDevice) { TestFailingDevice(GetParam()); }
TEST_P(IoQueueTest, Deadline) { TestDeadline(GetParam()); }
TEST_P(IoQueueTest, DestructionInFlight) { TestDestructionInFlight(GetParam()); }
TEST_P(IoQueueTest, CloseNamesWhatIsHeld) { TestCloseNamesWhatIsHeld(GetParam()); }
TEST_P(IoQueueTest, NothingLeaks) { TestNothingLeaks(GetParam()); }

INSTANTIATE_TEST_SUITE_P(
    All, IoQueueTest,
    ::testing::Values(IoQueueCase{"Uring", MakeUring, StallOnPipe, true},
                      IoQueueCase{"Threads", MakeThreads, StallOnPageFault, false},
                      IoQueueCase{"FaultyUring",
                                  [](size_t depth) { return Decorated(MakeUring(depth)); },
                                  StallOnPipe, true},
                      IoQueueCase{"FaultyThreads",
                                  [](size_t depth) { return Decorated(MakeThreads(depth)); },
                                  StallOnPageFault, false}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace zeroshard
