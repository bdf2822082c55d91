#include "tests/conformance/io_queue_conformance.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "base/unique_fd.h"
#include "storage/file_io.h"
#include "tests/conformance/io_queue_fixture.h"
#include "tests/conformance/small_file_system.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

UniqueFd BufferedFile() {
  ScratchFile file = Scratch();
  const std::string path = absl::StrCat("/proc/self/fd/", file.fd.get());
  UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  EXPECT_TRUE(fd.valid());
  return fd;
}

void RoundTrip(IoQueue& queue, int fd, std::span<std::byte> memory, uint64_t offset,
               uint64_t seed) {
  Fill(memory, seed);
  ASSERT_TRUE(Do(queue, Write(fd, memory, offset, 1)).ok());
  ASSERT_TRUE(Do(queue, Sync(fd, 2)).ok());
  std::memset(memory.data(), 0, memory.size());
  const absl::Status read = Do(queue, Read(fd, memory, offset, 3));
  ASSERT_TRUE(read.ok()) << read;
  EXPECT_TRUE(IsFilled(memory, seed)) << memory.size() << " bytes at offset " << offset;
}

// Sanitizers keep freed memory for a while.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr size_t kSlackPages = 8192;
#else
constexpr size_t kSlackPages = 512;
#endif

size_t EntriesOf(const char* directory) {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(directory)) ++count;
  return count;
}

size_t ResidentPages() {
  std::ifstream file("/proc/self/statm");
  size_t total = 0;
  size_t resident = 0;
  file >> total >> resident;
  return resident;
}

}  // namespace

void TestDirectSizes(const IoQueueCase& test) {
  const auto queue = Made(test.make(4));
  const ScratchFile file = Scratch();
  const AlignedBuffer memory = Buffer(size_t{16} << 20);
  uint64_t seed = 1;
  for (const size_t pages : {1, 2, 3, 5, 31, 257, 1023, 4096}) {
    const uint64_t offset = (seed % 3) * 7 * kDirectIoAlignment;
    RoundTrip(*queue, file.fd.get(), memory.bytes().first(pages * kDirectIoAlignment), offset,
              seed++);
  }
}

void TestBufferedSizes(const IoQueueCase& test) {
  const auto queue = Made(test.make(4));
  const UniqueFd file = BufferedFile();
  const AlignedBuffer memory = Buffer((size_t{16} << 20) + 4096);
  uint64_t seed = 1;
  for (const size_t bytes : {1, 511, 512, 513, 4095, 4096, 4097, 65535, 1026000, 16 << 20}) {
    for (const size_t shift : {0, 1, 513}) {
      RoundTrip(*queue, file.get(), memory.bytes().subspan(shift, bytes), shift * 3, seed++);
    }
  }
}

void TestManyFilesAtEveryDepth(const IoQueueCase& test) {
  constexpr size_t kFiles = 16;
  constexpr size_t kBlocks = 24;  // of each file
  constexpr size_t kBlock = 3 * kDirectIoAlignment;
  std::vector<ScratchFile> files;
  for (size_t i = 0; i < kFiles; ++i) files.push_back(Scratch());
  const AlignedBuffer memory = Buffer(kFiles * kBlocks * kBlock);
  std::mt19937 random(7);
  std::vector<size_t> order(kFiles * kBlocks);
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  for (const size_t depth : {1, 2, 7, 32, 128}) {
    const auto queue = Made(test.make(depth));
    ASSERT_EQ(queue->depth(), depth);
    for (const IoOperation operation : {IoOperation::kWrite, IoOperation::kRead}) {
      std::shuffle(order.begin(), order.end(), random);
      std::multiset<uint64_t> done;
      auto collect = [&](size_t min) {
        for (const IoCompletion& completion : queue->Wait(min, Soon())) {
          EXPECT_TRUE(completion.status.ok()) << completion.status;
          done.insert(completion.tag);
        }
      };
      for (const size_t i : order) {
        const std::span<std::byte> block = memory.bytes().subspan(i * kBlock, kBlock);
        if (operation == IoOperation::kWrite) Fill(block, i + depth * 1000);
        if (operation == IoOperation::kRead) std::memset(block.data(), 0, kBlock);
        IoTransfer transfer = Write(files[i % kFiles].fd.get(), block, i / kFiles * kBlock, i);
        transfer.operation = operation;
        transfer.more = i % 3 != 0;
        if (queue->in_flight() == depth) collect(1);
        const absl::Status status = queue->Submit(transfer);
        ASSERT_TRUE(status.ok()) << status;
      }
      while (queue->in_flight() > 0) collect(queue->in_flight());
      collect(0);
      EXPECT_EQ(done.size(), order.size());
      EXPECT_EQ(std::set<uint64_t>(done.begin(), done.end()).size(), order.size());
    }
    for (size_t i = 0; i < order.size(); ++i) {
      ASSERT_TRUE(IsFilled(memory.bytes().subspan(i * kBlock, kBlock), i + depth * 1000)) << i;
    }
  }
}

void TestFullQueueRefuses(const IoQueueCase& test) {
  const std::unique_ptr<StalledRead> first = test.stall();
  const std::unique_ptr<StalledRead> second = test.stall();
  if (first == nullptr || second == nullptr) GTEST_SKIP() << "no stalled reads here";
  const auto queue = Made(test.make(2));
  ASSERT_TRUE(queue->Submit(first->Transfer(1)).ok());
  ASSERT_TRUE(queue->Submit(second->Transfer(2)).ok());
  const UniqueFd file = BufferedFile();
  const absl::Status refused = queue->Submit(Sync(file.get(), 3));
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("2 transfers are in flight"));
  first->Release();
  const std::vector<IoCompletion> done = queue->Wait(1, Soon());
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].tag, 1u);
  EXPECT_TRUE(queue->Submit(Sync(file.get(), 3)).ok());
  second->Release();
  EXPECT_EQ(queue->Wait(2, Soon()).size(), 2u);
}

void TestWaitReturns(const IoQueueCase& test) {
  const auto queue = Made(test.make(4));
  EXPECT_TRUE(queue->Wait(3, Soon()).empty()) << "nothing is in flight";
  const std::unique_ptr<StalledRead> stall = test.stall();
  if (stall == nullptr) GTEST_SKIP() << "no stalled reads here";
  const UniqueFd file = BufferedFile();
  ASSERT_TRUE(queue->Submit(stall->Transfer(1)).ok());
  EXPECT_TRUE(queue->Wait(0, Soon()).empty()) << "does not wait when it need not";
  EXPECT_TRUE(queue->Wait(1, Deadline::After(absl::Milliseconds(5))).empty());
  ASSERT_TRUE(queue->Submit(Sync(file.get(), 2)).ok());
  std::vector<IoCompletion> done = queue->Wait(1, Soon());
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].tag, 2u);
  stall->Release();
  done = queue->Wait(100, Soon());  // as many as can come
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].tag, 1u);
  EXPECT_TRUE(done[0].status.ok()) << done[0].status;
  EXPECT_EQ(queue->in_flight(), 0u);
}

void TestErrors(const IoQueueCase& test) {
  const auto queue = Made(test.make(4));
  const AlignedBuffer memory = Buffer(2 * kDirectIoAlignment);
  const UniqueFd file = BufferedFile();
  const std::string name = DescribeFd(file.get());
  const std::string path = absl::StrCat("/proc/self/fd/", file.get());
  const UniqueFd read_only(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  absl::Status status = Do(*queue, Write(read_only.get(), memory.bytes(), 8192));
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("write ", name)));
  EXPECT_THAT(std::string(status.message()), HasSubstr("at offset 8192"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("Bad file descriptor"));
  const int closed = 1000;  // beyond what this process has open
  for (const IoTransfer& transfer :
       {Read(closed, memory.bytes(), 4096), Write(closed, memory.bytes(), 0), Sync(closed)}) {
    status = Do(*queue, transfer);
    EXPECT_THAT(std::string(status.message()), HasSubstr("descriptor 1000"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("errno 9"));
  }
  const UniqueFd directory(::open("/", O_RDONLY | O_CLOEXEC | O_DIRECTORY));
  status = Do(*queue, Read(directory.get(), memory.bytes(), 0));
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  RoundTrip(*queue, file.get(), memory.bytes(), 0, 5);  // the queue goes on
}

void TestEndOfFile(const IoQueueCase& test) {
  const auto queue = Made(test.make(4));
  const AlignedBuffer memory = Buffer(size_t{1} << 20);
  for (const bool direct : {true, false}) {
    const ScratchFile file = Scratch();
    const UniqueFd buffered = BufferedFile();
    const int fd = direct ? file.fd.get() : buffered.get();
    for (const off_t size : {0, 4096, 12288, 13000}) {
      ASSERT_EQ(::ftruncate(fd, size), 0);
      for (const uint64_t offset : {0, 4096, 65536}) {
        const absl::Status status = Do(*queue, Read(fd, memory.bytes(), offset));
        EXPECT_TRUE(absl::IsDataLoss(status)) << status;
        EXPECT_THAT(std::string(status.message()), HasSubstr("the file ends inside a read of "));
        EXPECT_THAT(std::string(status.message()), HasSubstr(DescribeFd(fd)));
        const uint64_t end = std::max<uint64_t>(offset, static_cast<uint64_t>(size));
        EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat("at offset ", end, ":")));
      }
    }
  }
}

void TestImpossibleTransfers(const IoQueueCase& test) {
  const auto queue = Made(test.make(4));
  const AlignedBuffer memory = Buffer(4096);
  const UniqueFd file = BufferedFile();
  IoTransfer sync_of_bytes = Sync(file.get());
  sync_of_bytes.bytes = 1;
  for (const IoTransfer& transfer :
       {Read(-1, memory.bytes(), 0), Write(file.get(), {}, 0),
        Write(file.get(), {static_cast<std::byte*>(nullptr), 4096}, 0),
        Read(file.get(), memory.bytes(), (uint64_t{1} << 63) - 4096 + 1), sync_of_bytes}) {
    const absl::Status status = queue->Submit(transfer);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  }
  EXPECT_EQ(queue->in_flight(), 0u);
  EXPECT_TRUE(queue->Wait(1, Soon()).empty());
}

void TestNoSpace(const IoQueueCase& test) {
  const int result = RunOnSmallFileSystem([&](const std::string& directory) {
    const absl::StatusOr<std::unique_ptr<IoQueue>> queue = test.make(4);
    const absl::StatusOr<AlignedBuffer> memory = AlignedBuffer::Make(size_t{4} << 20);
    const UniqueFd file(::open((directory + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!queue.ok() || !memory.ok() || !file.valid()) return false;
    const IoTransfer transfer = Write(file.get(), memory->bytes(), 0);
    if (!(*queue)->Submit(transfer).ok()) return false;
    const std::vector<IoCompletion> done = (*queue)->Wait(1, Soon());
    // The first megabyte was written: the error is where there was no room.
    return done.size() == 1 && absl::IsResourceExhausted(done[0].status) &&
           done[0].status.message().find("No space left on device") != std::string::npos &&
           done[0].status.message().find("at offset 0:") == std::string::npos;
  });
  if (result == kNotAllowed) GTEST_SKIP() << "this process may not mount file systems";
  EXPECT_EQ(result, 0);
}

void TestFailingDevice(const IoQueueCase& test) {
  const int result = RunOnFailingDevice([&](int fd) {
    const absl::StatusOr<std::unique_ptr<IoQueue>> queue = test.make(4);
    const absl::StatusOr<AlignedBuffer> memory = AlignedBuffer::Make(size_t{4} << 20);
    if (!queue.ok() || !memory.ok()) return false;
    auto status_of = [&](const IoTransfer& transfer) {
      if (const absl::Status status = (*queue)->Submit(transfer); !status.ok()) return status;
      const std::vector<IoCompletion> done = (*queue)->Wait(1, Soon());
      return done.size() == 1 ? done[0].status : absl::InternalError("no completion");
    };
    const std::span<std::byte> good = memory->bytes().first(size_t{256} << 10);
    Fill(good, 5);
    if (!status_of(Write(fd, good, 0)).ok()) return false;
    const absl::Status read = status_of(Read(fd, memory->bytes().last(8192), size_t{8} << 20));
    // Older kernels say EIO here too.
    const absl::Status written = status_of(Write(fd, memory->bytes(), size_t{8} << 20));
    std::memset(good.data(), 0, good.size());
    return ErrnoOf(read) == EIO && absl::IsUnavailable(read) &&
           read.message().find("read /dev/loop") == 0 &&
           read.message().find("at offset 8388608") != std::string::npos &&
           (ErrnoOf(written) == ENOSPC || ErrnoOf(written) == EIO) &&
           status_of(Read(fd, good, 0)).ok() && IsFilled(good, 5);
  });
  if (result == kNotAllowed) GTEST_SKIP() << "this process may not make block devices";
  EXPECT_EQ(result, 0);
}

void TestDeadline(const IoQueueCase& test) {
  const std::unique_ptr<StalledRead> stall = test.stall();
  if (stall == nullptr) GTEST_SKIP() << "no stalled reads here";
  const std::unique_ptr<StalledRead> other = test.stall();
  const auto queue = Made(test.make(4));
  IoTransfer late = stall->Transfer(1);
  late.deadline = Deadline::After(absl::Milliseconds(20));
  ASSERT_TRUE(queue->Submit(late).ok());
  ASSERT_TRUE(queue->Submit(other->Transfer(2)).ok());
  std::vector<IoCompletion> done = queue->Wait(1, Soon());
  ASSERT_EQ(done.size(), 1u);
  EXPECT_EQ(done[0].tag, 1u);
  EXPECT_TRUE(absl::IsDeadlineExceeded(done[0].status)) << done[0].status;
  EXPECT_THAT(std::string(done[0].status.message()), HasSubstr("read "));
  EXPECT_THAT(std::string(done[0].status.message()), HasSubstr("at offset 0, 4096 bytes"));
  EXPECT_GE(queue->in_flight(), 1u);
  const UniqueFd file = BufferedFile();
  const absl::Status refused = queue->Submit(Sync(file.get()));
  EXPECT_TRUE(absl::IsDeadlineExceeded(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("the I/O queue has failed: read "));
  other->Release();
  done = queue->Wait(2, Soon());
  ASSERT_EQ(done.size(), 1u) << "the late one is not reported again";
  EXPECT_EQ(done[0].tag, 2u);
  EXPECT_TRUE(done[0].status.ok()) << done[0].status;
  stall->Release();
  const Deadline bound = Soon();
  while (queue->in_flight() > 0 && !bound.Passed()) {
    EXPECT_TRUE(queue->Wait(1, Soon()).empty());
    std::this_thread::yield();
  }
  EXPECT_EQ(queue->in_flight(), 0u);
}

void TestDestructionInFlight(const IoQueueCase& test) {
  constexpr size_t kTransfers = 32;
  constexpr size_t kBytes = size_t{1} << 20;
  const ScratchFile file = Scratch();
  const AlignedBuffer memory = Buffer(kTransfers * kBytes);
  Fill(memory.bytes(), 3);
  ASSERT_TRUE(Do(*Made(test.make(1)), Write(file.fd.get(), memory.bytes(), 0)).ok());
  for (int round = 0; round < 4; ++round) {
    auto queue = Made(test.make(kTransfers));
    for (size_t i = 0; i < kTransfers; ++i) {
      const auto part = memory.bytes().subspan(i * kBytes, kBytes);
      ASSERT_TRUE(queue->Submit(Read(file.fd.get(), part, i * kBytes)).ok());
    }
    if (round % 2 == 1) {
      EXPECT_TRUE(queue->Close(Soon()).empty());
      EXPECT_TRUE(absl::IsFailedPrecondition(queue->Submit(Sync(file.fd.get()))));
      EXPECT_TRUE(queue->Wait(1, Soon()).empty());
    }
    queue.reset();
    std::memset(memory.data(), round, memory.size());
    // A read that went on would show here; give it time to.
    ASSERT_EQ(::fsync(file.fd.get()), 0);
    for (const std::byte byte : memory.bytes()) ASSERT_EQ(byte, std::byte(round));
  }
}

void TestCloseNamesWhatIsHeld(const IoQueueCase& test) {
  std::unique_ptr<StalledRead> stall = test.stall();
  if (stall == nullptr) GTEST_SKIP() << "no stalled reads here";
  auto queue = Made(test.make(4));
  const ScratchFile file = Scratch();
  ASSERT_TRUE(queue->Submit(stall->Transfer(77)).ok());
  ASSERT_TRUE(queue->Submit(Sync(file.fd.get(), 78)).ok());
  // Both have begun: a transfer that waits for a thread would be dropped instead.
  ASSERT_EQ(queue->Wait(1, Soon()).size(), 1u);
  const absl::Duration patience = test.cancels ? absl::Seconds(30) : absl::Milliseconds(20);
  const std::vector<uint64_t> held = queue->Close(Deadline::After(patience));
  EXPECT_EQ(held, test.cancels ? std::vector<uint64_t>{} : std::vector<uint64_t>{77});
  EXPECT_TRUE(queue->Close(Soon()).empty());
  queue.reset();  // returns though the read has not
  // Its memory and its descriptor stay as they are until the process ends.
  static auto* const kept = new std::vector<std::unique_ptr<StalledRead>>;
  stall->Release();
  kept->push_back(std::move(stall));
}

void TestNothingLeaks(const IoQueueCase& test) {
  constexpr size_t kDepth = 16;
  const auto queue = Made(test.make(kDepth));
  const UniqueFd file(::memfd_create("target", MFD_CLOEXEC));
  const AlignedBuffer memory = Buffer(kDepth * 4096);
  auto transfer_many = [&](size_t count) {
    for (size_t i = 0; i < count; ++i) {
      if (queue->in_flight() == kDepth) queue->Wait(1, Soon());
      const auto block = memory.bytes().subspan(i % kDepth * 4096, 4096);
      ASSERT_TRUE(queue->Submit(Write(file.get(), block, i % 64 * 4096, i)).ok());
    }
    while (queue->in_flight() > 0) queue->Wait(kDepth, Soon());
  };
  transfer_many(1000);
  const size_t descriptors = EntriesOf("/proc/self/fd");
  const size_t threads = EntriesOf("/proc/self/task");
  const size_t pages = ResidentPages();
  transfer_many(10000);
  EXPECT_EQ(EntriesOf("/proc/self/fd"), descriptors);
  // Threads of the kernel's io_uring pool come and go by themselves, at most one more a core.
  EXPECT_LE(EntriesOf("/proc/self/task"), threads + std::thread::hardware_concurrency());
  EXPECT_LE(ResidentPages(), pages + kSlackPages);
}

}  // namespace zeroshard
