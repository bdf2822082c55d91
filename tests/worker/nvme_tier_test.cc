#include "worker/nvme_tier.h"

#include <fcntl.h>

#include <atomic>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/extent_file.h"
#include "storage/slot_table.h"
#include "tests/worker/tier_fixture.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

// Every combination of the aio block on both backends: the same bytes.
using Aio = std::tuple<IoBackend, bool, bool, bool, bool, uint64_t, uint32_t>;

class NvmeTierAioTest : public ::testing::TestWithParam<Aio> {
 protected:
  void SetUp() override {
    if (!IsToBeHad(std::get<IoBackend>(GetParam()))) GTEST_SKIP() << "io_uring is denied here";
  }
};

INSTANTIATE_TEST_SUITE_P(
    All, NvmeTierAioTest,
    ::testing::Combine(::testing::Values(IoBackend::kUring, IoBackend::kThreads), ::testing::Bool(),
                       ::testing::Bool(), ::testing::Bool(), ::testing::Bool(),
                       ::testing::Values(4096, 1 << 20), ::testing::Values(1, 4)));

TEST_P(NvmeTierAioTest, StepsGiveTheSameBytes) {
  TierJob job({.paths = 2, .parent = "/dev/shm"});
  const auto& [backend, read, write, submit, overlap, block, depth] = GetParam();
  job.options().backend = backend;
  job.options().config.set_pipeline_read(read);
  job.options().config.set_pipeline_write(write);
  job.options().config.set_single_submit(submit);
  job.options().config.set_overlap_events(overlap);
  job.options().config.set_block_bytes(block);
  job.options().config.set_queue_depth(depth);
  ASSERT_EQ(job.Open(), absl::OkStatus());
  ASSERT_EQ(job.Fill(), absl::OkStatus());
  ASSERT_EQ(job.Check(), absl::OkStatus());
  for (uint64_t attempt = 1; attempt < 4; ++attempt) {
    ASSERT_EQ(job.StepAndCommit(attempt), absl::OkStatus());
    ASSERT_EQ(job.Check(), absl::OkStatus());
  }
  EXPECT_EQ(job.Open(/*recover=*/true, 3), absl::OkStatus());
  EXPECT_EQ(job.Check(), absl::OkStatus());
}

class NvmeTierTest : public ::testing::TestWithParam<IoBackend> {
 protected:
  void SetUp() override {
    if (!IsToBeHad(GetParam())) GTEST_SKIP() << "io_uring is denied here";
  }
  static std::unique_ptr<TierJob> Started(TierJobShape shape = {}) {
    auto job = std::make_unique<TierJob>(shape);
    job->options().backend = GetParam();
    EXPECT_EQ(job->Open(), absl::OkStatus());
    EXPECT_EQ(job->Fill(), absl::OkStatus());
    return job;
  }
};

INSTANTIATE_TEST_SUITE_P(All, NvmeTierTest,
                         ::testing::Values(IoBackend::kUring, IoBackend::kThreads));

// On the disk, with O_DIRECT where it is to be had.
TEST_P(NvmeTierTest, OddSizesAndWholeChunks) {
  TierJobShape shape{.elements = {1, 255, 256, 257, 65536, 70000, 3, 131073}, .paths = 3};
  shape.chunk_elements = 65536;
  for (const uint64_t block : {4096, 12288, 1 << 20}) {
    TierJob job(shape);
    job.options().backend = GetParam();
    job.options().config.set_block_bytes(block);
    ASSERT_EQ(job.Open(), absl::OkStatus());
    ASSERT_EQ(job.Fill(), absl::OkStatus());
    for (uint64_t attempt = 1; attempt < 3; ++attempt) {
      ASSERT_EQ(job.StepAndCommit(attempt), absl::OkStatus());
    }
    ASSERT_EQ(job.Check(), absl::OkStatus());
    uint64_t read = 0;
    for (const TierPathCounters& path : job.tier().counters().paths) {
      EXPECT_GT(path.read_bytes, 0u);
      EXPECT_GT(path.written_bytes, 0u);
      EXPECT_GT(path.busy, absl::ZeroDuration());
      EXPECT_EQ(path.errors, 0u);
      read += path.read_bytes;
    }
    uint64_t expected = 0;
    for (const uint32_t image : job.Images()) {
      const uint64_t bytes = job.plan().shape(image).image_bytes();
      expected += (job.plan().images()[image].parameters ? 1 : 3) * bytes;
    }
    EXPECT_EQ(read, expected) << "each image once a step";
  }
}

TEST_P(NvmeTierTest, WithoutAPoolAndWithManyLanes) {
  for (const int lanes : {0, 1, 7}) {
    TierJob job({.elements = {9000, 70, 5000}, .parent = "/dev/shm"});
    job.options().backend = GetParam();
    job.UsePool(lanes);
    ASSERT_EQ(job.Open(), absl::OkStatus());
    ASSERT_EQ(job.Fill(), absl::OkStatus());
    ASSERT_EQ(job.StepAndCommit(1), absl::OkStatus());
    ASSERT_EQ(job.Check(), absl::OkStatus());
  }
}

TEST_P(NvmeTierTest, WhatIsPreparedIsNotDoneAgain) {
  auto job = Started();
  ASSERT_EQ(job->Step(1), absl::OkStatus());
  std::atomic<int> calls{0};
  const auto count = [&](const TierItem&, const TierBuffers&) {
    ++calls;
    return absl::OkStatus();
  };
  ASSERT_EQ(job->tier().Run(job->StepItems(), count), absl::OkStatus());
  EXPECT_EQ(calls, 0);
  // Another attempt begins anew.
  ASSERT_EQ(job->StepAndCommit(2), absl::OkStatus());
  ASSERT_EQ(job->Check(), absl::OkStatus());
}

// States were rewritten, their parameters were not: the work is done again on what is committed.
TEST_P(NvmeTierTest, OfAnItemThatIsHalfDoneTheRestIsWritten) {
  auto job = Started();
  ASSERT_EQ(job->tier().Begin(1, 1), absl::OkStatus());
  std::vector<TierItem> states = job->StepItems();
  const uint32_t parameters = states[0].write;
  ASSERT_NE(parameters, kNoImage);
  states.resize(1);
  states[0].write = kNoImage;
  ASSERT_EQ(job->RunStep(states, 1), absl::OkStatus());
  ASSERT_TRUE(job->tier().Prepared(states[0].read));
  ASSERT_FALSE(job->tier().Prepared(parameters));
  const uint64_t written = job->tier().counters().paths[0].written_bytes;
  states[0].write = parameters;
  ASSERT_EQ(job->RunStep(states, 1), absl::OkStatus());
  EXPECT_EQ(job->tier().counters().paths[0].written_bytes - written,
            job->plan().shape(parameters).image_bytes());
  ASSERT_EQ(job->StepAndCommit(1), absl::OkStatus());
  ASSERT_EQ(job->Check(), absl::OkStatus());
}

TEST_P(NvmeTierTest, AnErrorOfTheWorkEndsThePassAndChangesNothing) {
  auto job = Started();
  ASSERT_EQ(job->tier().Begin(1, 1), absl::OkStatus());
  std::atomic<int> calls{0};
  const absl::Status status =
      job->tier().Run(job->StepItems(), [&](const TierItem&, const TierBuffers& buffers) {
        buffers.read[5000] ^= std::byte{1};
        return ++calls == 3 ? absl::InternalError("third") : absl::OkStatus();
      });
  EXPECT_EQ(status, absl::InternalError("third"));
  EXPECT_LE(calls, 4) << "no batch is begun after an error";
  ASSERT_EQ(job->Check(), absl::OkStatus());
  ASSERT_EQ(job->StepAndCommit(2), absl::OkStatus());
  ASSERT_EQ(job->Check(), absl::OkStatus());
}

TEST_P(NvmeTierTest, TheCallersMistakesAreRefused) {
  TierJob job;
  job.options().backend = GetParam();
  ASSERT_EQ(job.Open(), absl::OkStatus());
  const auto nothing = [](const TierItem&, const TierBuffers&) { return absl::OkStatus(); };
  const auto run = [&](const TierItem& item) {
    const TierItem items[] = {item};
    return job.tier().Run(items, nothing);
  };
  EXPECT_EQ(run({.write = 0}).code(), absl::StatusCode::kFailedPrecondition) << "no attempt";
  EXPECT_EQ(job.tier().Seal("").code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_EQ(job.tier().Begin(0, 0), absl::OkStatus());
  EXPECT_EQ(run({.read = 0}).code(), absl::StatusCode::kFailedPrecondition) << "not there";
  EXPECT_EQ(run({.rewrite = true, .write = 0}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(run({}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(run({.write = 10000}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(job.tier().Run({}, nothing), absl::OkStatus());
  NvmeTierOptions options = job.options();
  options.paths.push_back({"/tmp"});
  EXPECT_EQ(NvmeTier::Open(job.plan(), options).status().code(),
            absl::StatusCode::kInvalidArgument);
  options = job.options();
  options.config.set_block_bytes(1000);
  EXPECT_EQ(NvmeTier::Open(job.plan(), options).status().code(),
            absl::StatusCode::kInvalidArgument);
  options = job.options();
  options.table = options.table.first(64);
  EXPECT_EQ(NvmeTier::Open(job.plan(), options).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_P(NvmeTierTest, ImagesAreForgottenAndComeBackAndTargetsAreKept) {
  auto job = Started();
  NvmeTier& tier = job->tier();
  const uint32_t image = job->Images()[1];
  EXPECT_TRUE(tier.AtHome(image));
  tier.SetTarget(image, NvmeTarget::kHost);
  ASSERT_EQ(tier.Forget(image), absl::OkStatus());
  EXPECT_FALSE(tier.Holds(image));
  ASSERT_EQ(job->Open(/*recover=*/true, 0), absl::OkStatus());
  EXPECT_FALSE(job->tier().Holds(image));
  EXPECT_FALSE(job->tier().AtHome(image));
  EXPECT_TRUE(job->tier().AtHome(job->Images()[0]));
  job->tier().SetTarget(image, NvmeTarget::kNvme);
  EXPECT_TRUE(job->tier().AtHome(image));
  ASSERT_EQ(job->Fill(), absl::OkStatus());
  EXPECT_TRUE(job->tier().Holds(image));
  ASSERT_EQ(job->Check(), absl::OkStatus());
}

TEST_P(NvmeTierTest, AStartAfterAStartThatDiedBeginsAnew) {
  TierJob job;
  job.options().backend = GetParam();
  ASSERT_EQ(job.Open(/*recover=*/true), absl::OkStatus()) << "nothing to recover";
  job.Close();
  // The predecessor died before it formatted its table.
  std::fill(job.table().begin(), job.table().end(), std::byte{0});
  std::ofstream(job.directory(0).Own(".tmp-" + ExtentFileName(0x4d2, 0, 0) + "-0123456789abcdef"))
      << "half";
  ASSERT_EQ(job.Open(/*recover=*/true), absl::OkStatus());
  EXPECT_EQ(job.directory(0).OwnCount(), 1u);
  ASSERT_EQ(job.Fill(), absl::OkStatus());
  ASSERT_EQ(job.Check(), absl::OkStatus());
  TierJob other;
  other.options().paths = job.options().paths;
  EXPECT_THAT(MessageOf(other.Open()), HasSubstr("is used by another process"));
}

TEST_P(NvmeTierTest, ATableOfAnotherJobIsNotTaken) {
  auto job = Started();
  job->options().job_id = 5;
  EXPECT_EQ(job->Open(/*recover=*/true, 0).code(), absl::StatusCode::kDataLoss);
}

TEST_P(NvmeTierTest, DamageIsNamedAndItsSlotIsNotUsedAgain) {
  auto job = Started();
  const uint32_t image = job->Images()[2];
  const auto table = SlotTable::Adopt(job->table(), job->plan().table_shape(0x4d2, 7));
  const uint32_t slot = table->Current(image)->slot;
  const uint64_t offset = job->plan().extents().slot(slot).offset;
  ASSERT_EQ(job->Open(/*recover=*/true, 0), absl::OkStatus());
  {
    const std::string name = job->directory(0).Own(ExtentFileName(0x4d2, 0, 0));
    std::fstream file(name, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(static_cast<std::streamoff>(offset + kImageHeaderBytes + 7));
    file.put('\x55');
  }
  const absl::Status status = job->Step(1);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(MessageOf(status), HasSubstr(ExtentFileName(0x4d2, 0, 0) + " at offset " +
                                           std::to_string(offset + kImageHeaderBytes)));
  EXPECT_EQ(job->tier().counters().damaged_images, 1u);
  ASSERT_EQ(job->tier().Forget(image), absl::OkStatus());
  ASSERT_EQ(job->Fill(), absl::OkStatus());
  ASSERT_EQ(job->Check(), absl::OkStatus());
  const auto now = SlotTable::Adopt(job->table(), job->plan().table_shape(0x4d2, 7));
  EXPECT_NE(now->Current(image)->slot, slot);
}

// Slots of a predecessor that may still be written to: waited for, and not for ever.
TEST_P(NvmeTierTest, APassWaitsUntilThePredecessorIsDrained) {
  auto job = Started({.spares = 1, .parent = "/dev/shm"});
  job->Close();
  {
    auto dead = SlotTable::Adopt(job->table(), job->plan().table_shape(0x4d2, 7));
    ASSERT_TRUE(dead.ok());
    ASSERT_TRUE(dead->Begin(1).ok());
    while (dead->Reserve(job->Images()[0]).ok()) {
    }
  }
  UniqueFd held(::open(job->directory(0).Own(ExtentFileName(0x4d2, 0, 0)).c_str(), O_RDWR));
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_start = (off_t{1} << 32) + 1;
  lock.l_len = 1;
  ASSERT_EQ(::fcntl(held.get(), F_OFD_SETLK, &lock), 0);
  std::atomic<int> beats{0};
  job->options().beat = [&beats] { ++beats; };
  job->options().io_timeout = absl::Milliseconds(300);
  ASSERT_EQ(job->Open(/*recover=*/true, 0), absl::OkStatus());
  beats = 0;
  const absl::Status refused = job->Step(1);
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable) << refused;
  EXPECT_THAT(MessageOf(refused), HasSubstr("may still be written by a dead worker"));
  EXPECT_GE(beats, 3);
  ASSERT_EQ(job->Check(), absl::OkStatus());
  std::thread landing([&held] {
    absl::SleepFor(absl::Milliseconds(100));
    held.reset();
  });
  EXPECT_EQ(job->StepAndCommit(1), absl::OkStatus());
  landing.join();
  ASSERT_EQ(job->Check(), absl::OkStatus());
}

// Two transfers at a time, with a wait after each refusal.
class NarrowGate final : public IoGate {
 public:
  absl::Duration TryStart(uint32_t, IoOperation operation, uint64_t bytes) override {
    if (in_flight == 2) return absl::Milliseconds(1);
    ++in_flight;
    (operation == IoOperation::kWrite ? written : read) += bytes;
    return absl::ZeroDuration();
  }
  void Done(uint32_t) override { --in_flight; }
  void Withdraw(uint32_t, IoOperation) override {}
  int in_flight = 0;
  uint64_t read = 0;
  uint64_t written = 0;
};

TEST_P(NvmeTierTest, TransfersAskTheirGate) {
  NarrowGate gate;
  TierJob job({.paths = 2});
  job.options().backend = GetParam();
  job.options().gate = &gate;
  ASSERT_EQ(job.Open(), absl::OkStatus());
  ASSERT_EQ(job.Fill(), absl::OkStatus());
  ASSERT_EQ(job.StepAndCommit(1), absl::OkStatus());
  ASSERT_EQ(job.Check(), absl::OkStatus());
  EXPECT_EQ(gate.in_flight, 0);
  uint64_t read = 0;
  uint64_t written = 0;
  for (const TierPathCounters& path : job.tier().counters().paths) {
    read += path.read_bytes;
    written += path.written_bytes;
  }
  EXPECT_EQ(gate.read, read);
  EXPECT_EQ(gate.written, written);
  job.Close();
}

TEST_P(NvmeTierTest, StagingIsAsLargeAsTold) {
  TierJob job({.elements = {100000}});
  job.options().backend = GetParam();
  std::vector<size_t> pinned;
  job.options().pin = [&](std::span<std::byte> memory) {
    pinned.push_back(memory.size());
    return absl::OkStatus();
  };
  ASSERT_EQ(job.Open(), absl::OkStatus());
  EXPECT_THAT(pinned, ::testing::ElementsAre(NvmeTier::StagingBytes(job.plan(), job.options())));
  EXPECT_EQ(pinned[0], 8 * job.plan().max_image_bytes()) << "buffer_count * queue_depth";
  EXPECT_THAT(job.tier().description(), HasSubstr("8 buffers of"));
}

size_t Descriptors() {
  size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    ++count;
  }
  return count;
}

// Sanitizers keep freed memory for a while.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kSlackPages = 8192;
constexpr uint64_t kPasses = 500;
#else
constexpr uint64_t kSlackPages = 64;
constexpr uint64_t kPasses = 10000;
#endif

uint64_t ResidentPages() {
  uint64_t total = 0;
  uint64_t resident = 0;
  std::ifstream("/proc/self/statm") >> total >> resident;
  return resident;
}

TEST_P(NvmeTierTest, TenThousandPassesLeaveDescriptorsAndMemoryAsTheyWere) {
  auto job = Started({.elements = {700}, .parent = "/dev/shm"});
  const auto pass = [&](uint64_t attempt) {
    ASSERT_EQ(job->Step(attempt), absl::OkStatus());
    ASSERT_EQ(job->tier().Commit(attempt), absl::OkStatus());
    job->Expect(attempt);
  };
  uint64_t attempt = 1;
  for (; attempt < 500; ++attempt) pass(attempt);
  const size_t descriptors = Descriptors();
  const uint64_t resident = ResidentPages();
  for (; attempt < 500 + kPasses; ++attempt) pass(attempt);
  EXPECT_EQ(Descriptors(), descriptors);
  EXPECT_LE(ResidentPages(), resident + kSlackPages);
  ASSERT_EQ(job->Check(), absl::OkStatus());
}

}  // namespace
}  // namespace zeroshard
