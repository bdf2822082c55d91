#include "tests/fakes/faulty_io_queue.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "base/unique_fd.h"
#include "storage/file_io.h"
#include "storage/io_thread_queue.h"
#include "tests/conformance/io_queue_fixture.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

constexpr size_t kBlock = 8192;

class FaultyIoQueueTest : public ::testing::Test {
 protected:
  FaultyIoQueueTest()
      : file_(::memfd_create("target", MFD_CLOEXEC)), memory_(Buffer(kBlock)), old_(kBlock) {
    // Four blocks of known old contents.
    for (uint64_t i = 0; i < 4; ++i) {
      Fill(old_, i);
      EXPECT_TRUE(WriteAllAt(file_.get(), old_, i * kBlock, "target").ok());
    }
    Fill(old_, 1);
    Fill(memory_.bytes(), 50);
  }

  std::unique_ptr<FaultyIoQueue> Make(IoFault fault, uint64_t seed = 1) {
    auto inner = Made(MakeIoThreadQueue({.depth = 8, .threads = 1}));
    return std::make_unique<FaultyIoQueue>(std::move(inner), std::vector<IoFault>{fault}, seed);
  }

  std::vector<std::byte> Contents(uint64_t offset, size_t bytes = kBlock) const {
    std::vector<std::byte> contents(bytes);
    EXPECT_TRUE(ReadAllAt(file_.get(), contents, offset, "target").ok());
    return contents;
  }

  std::vector<std::byte> New() const { return {memory_.bytes().begin(), memory_.bytes().end()}; }

  UniqueFd file_;
  AlignedBuffer memory_;
  std::vector<std::byte> old_;  // of block 1
};

TEST_F(FaultyIoQueueTest, ErrorsAreOfTheChosenOperationAlone) {
  for (const int error : {EIO, ENOSPC, EAGAIN}) {
    const auto queue = Make({.at = 1, .kind = IoFaultKind::kError, .error = error});
    EXPECT_TRUE(Do(*queue, Read(file_.get(), memory_.bytes(), 0)).ok());
    Fill(memory_.bytes(), 50);
    const absl::Status status = Do(*queue, Write(file_.get(), memory_.bytes(), kBlock));
    EXPECT_EQ(ErrnoOf(status), error);
    EXPECT_THAT(std::string(status.message()), HasSubstr("at offset 8192"));
    EXPECT_EQ(queue->injected(), 1u);
    EXPECT_EQ(Contents(kBlock), old_);
  }
  const auto queue = Make({.at = 0, .kind = IoFaultKind::kError});
  EXPECT_THAT(std::string(Do(*queue, Sync(file_.get())).message()), HasSubstr("fdatasync"));
  EXPECT_TRUE(Do(*queue, Write(file_.get(), memory_.bytes(), kBlock)).ok());
  EXPECT_EQ(Contents(kBlock), New());
  EXPECT_EQ(queue->operations(), 2u);
}

TEST_F(FaultyIoQueueTest, ShortDelayedAndReorderedOperationsStillSucceed) {
  for (const IoFaultKind kind : {IoFaultKind::kShort, IoFaultKind::kDelay, IoFaultKind::kReorder}) {
    for (uint64_t seed = 0; seed < 8; ++seed) {
      const auto queue = Make({.at = 0, .kind = kind}, seed);
      Fill(memory_.bytes(), 100 + seed);
      ASSERT_TRUE(Do(*queue, Write(file_.get(), memory_.bytes(), kBlock)).ok());
      EXPECT_EQ(Contents(kBlock), New());
      EXPECT_EQ(queue->injected(), 1u);
      const auto reader = Make({.at = 0, .kind = kind}, seed);
      Fill(memory_.bytes(), 1);
      ASSERT_TRUE(Do(*reader, Read(file_.get(), memory_.bytes(), kBlock)).ok());
      EXPECT_TRUE(IsFilled(memory_.bytes(), 100 + seed));
      EXPECT_EQ(reader->injected(), 1u);
    }
  }
}

TEST_F(FaultyIoQueueTest, AReorderedOperationRunsAfterTheNextOne) {
  const auto queue = Make({.at = 0, .kind = IoFaultKind::kReorder});
  const AlignedBuffer other = Buffer(kBlock);
  Fill(other.bytes(), 60);
  ASSERT_TRUE(queue->Submit(Write(file_.get(), memory_.bytes(), 0, 1)).ok());
  ASSERT_TRUE(queue->Submit(Write(file_.get(), other.bytes(), 0, 2)).ok());
  std::vector<uint64_t> order;
  while (queue->in_flight() > 0) {
    for (const IoCompletion& done : queue->Wait(1, Soon())) order.push_back(done.tag);
  }
  EXPECT_EQ(order, (std::vector<uint64_t>{2, 1}));
  EXPECT_EQ(Contents(0), New()) << "with one thread the first one was written last";
}

TEST_F(FaultyIoQueueTest, ADelayedOperationIsOvertaken) {
  const auto queue = Make({.at = 0, .kind = IoFaultKind::kDelay});
  ASSERT_TRUE(queue->Submit(Write(file_.get(), memory_.bytes(), 0, 1)).ok());
  ASSERT_TRUE(queue->Submit(Sync(file_.get(), 2)).ok());
  const std::vector<IoCompletion> first = queue->Wait(1, Soon());
  ASSERT_EQ(first.size(), 1u);
  EXPECT_EQ(first[0].tag, 2u);
  EXPECT_EQ(queue->in_flight(), 1u);
  EXPECT_EQ(queue->Wait(1, Soon()).size(), 1u);
}

TEST_F(FaultyIoQueueTest, ANeverEndingOperationIsLateAndHoldsItsMemory) {
  const auto queue = Make({.at = 0, .kind = IoFaultKind::kNever});
  IoTransfer transfer = Write(file_.get(), memory_.bytes(), kBlock, 9);
  transfer.deadline = Deadline::After(absl::Milliseconds(10));
  const absl::Status status = Do(*queue, transfer);
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_EQ(queue->in_flight(), 1u);
  EXPECT_TRUE(absl::IsDeadlineExceeded(queue->Submit(Sync(file_.get()))));
  EXPECT_EQ(queue->Close(Soon()), std::vector<uint64_t>{9});
  EXPECT_EQ(Contents(kBlock), old_);
}

TEST_F(FaultyIoQueueTest, AFlippedBitIsOneBit) {
  auto bits = [](std::span<const std::byte> a, std::span<const std::byte> b) {
    int count = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      count += __builtin_popcount(std::to_integer<unsigned>(a[i] ^ b[i]));
    }
    return count;
  };
  ASSERT_TRUE(
      Do(*Make({.kind = IoFaultKind::kFlip}), Write(file_.get(), memory_.bytes(), kBlock)).ok());
  EXPECT_TRUE(IsFilled(memory_.bytes(), 50)) << "the caller's memory is not touched";
  EXPECT_EQ(bits(Contents(kBlock), New()), 1);
  ASSERT_TRUE(Do(*Make({.kind = IoFaultKind::kFlip}), Read(file_.get(), memory_.bytes(), 0)).ok());
  EXPECT_EQ(bits(Contents(0), New()), 1);
}

TEST_F(FaultyIoQueueTest, ATornWriteIsNewAtFirstAndOldFromSomeSectorOn) {
  std::vector<size_t> cuts;
  for (uint64_t seed = 0; seed < 20; ++seed) {
    ASSERT_TRUE(WriteAllAt(file_.get(), old_, kBlock, "target").ok());
    const auto queue = Make({.kind = IoFaultKind::kTorn}, seed);
    ASSERT_TRUE(Do(*queue, Write(file_.get(), memory_.bytes(), kBlock)).ok());
    const std::vector<std::byte> now = Contents(kBlock);
    size_t cut = 0;
    while (cut < kBlock && now[cut] == memory_.data()[cut]) ++cut;
    cut = cut / kSectorBytes * kSectorBytes;
    ASSERT_LT(cut, kBlock);
    EXPECT_TRUE(std::equal(now.begin() + cut, now.end(), old_.begin() + cut)) << cut;
    cuts.push_back(cut);
  }
  EXPECT_GT(*std::max_element(cuts.begin(), cuts.end()),
            *std::min_element(cuts.begin(), cuts.end()));
}

TEST_F(FaultyIoQueueTest, AMisdirectedWriteLandsBesideItsPlace) {
  const std::vector<std::byte> before = Contents(0);
  ASSERT_TRUE(
      Do(*Make({.kind = IoFaultKind::kMisdirect}), Write(file_.get(), memory_.bytes(), kBlock))
          .ok());
  EXPECT_EQ(Contents(kDirectIoAlignment), New());
  EXPECT_TRUE(std::equal(before.begin(), before.begin() + 4096, Contents(0).begin()));
  ASSERT_TRUE(
      Do(*Make({.kind = IoFaultKind::kMisdirect}), Read(file_.get(), memory_.bytes(), 0)).ok());
  EXPECT_EQ(Contents(kDirectIoAlignment), New());
}

TEST_F(FaultyIoQueueTest, ALostWriteChangesNothing) {
  const auto queue = Make({.kind = IoFaultKind::kLost});
  ASSERT_TRUE(Do(*queue, Write(file_.get(), memory_.bytes(), kBlock)).ok());
  EXPECT_EQ(Contents(kBlock), old_);
  EXPECT_EQ(queue->injected(), 1u);
}

TEST_F(FaultyIoQueueTest, FaultsThatMeanNothingToAnOperationAreNotInjected) {
  for (const IoFaultKind kind : {IoFaultKind::kTorn, IoFaultKind::kLost}) {
    const auto queue = Make({.kind = kind});
    EXPECT_TRUE(Do(*queue, Read(file_.get(), memory_.bytes(), kBlock)).ok());
    EXPECT_EQ(New(), old_);
    EXPECT_EQ(queue->injected(), 0u);
  }
  for (const IoFaultKind kind :
       {IoFaultKind::kShort, IoFaultKind::kFlip, IoFaultKind::kMisdirect}) {
    const auto queue = Make({.kind = kind});
    EXPECT_TRUE(Do(*queue, Sync(file_.get())).ok());
    EXPECT_EQ(queue->injected(), 0u);
  }
}

// The loop that sweeps use: a fault at each operation in turn until there is none.
TEST_F(FaultyIoQueueTest, ASweepEnds) {
  uint64_t k = 0;
  for (;; ++k) {
    const auto queue = Make({.at = k, .kind = IoFaultKind::kError});
    int failures = 0;
    for (int i = 0; i < 5; ++i) {
      failures += Do(*queue, Write(file_.get(), memory_.bytes(), 0)).ok() ? 0 : 1;
    }
    EXPECT_EQ(failures, static_cast<int>(queue->injected()));
    if (queue->injected() == 0) break;
    ASSERT_LT(k, 100u);
  }
  EXPECT_EQ(k, 5u);
}

}  // namespace
}  // namespace zeroshard
