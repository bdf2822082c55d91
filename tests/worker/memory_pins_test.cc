#include "worker/memory_pins.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/shared_memory.h"
#include "storage/aligned_buffer.h"
#include "tests/device/cpu/locked_bytes.h"
#include "tests/fakes/local_job.h"

namespace zeroshard {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr size_t kPage = 4096;

internal::v1::WorkerStart Start() {
  internal::v1::WorkerStart start;
  start.set_worker(3);
  start.set_huge_pages(true);
  start.mutable_config()->mutable_nvme()->set_pin_memory(true);
  return start;
}

// Pins 16 pages of states and 2 of staging; returns what was counted, or the error.
std::string PinBoth(const internal::v1::WorkerStart& start) {
  const UniqueFd fd = CreateSealedMemfd("states", 16 * kPage).value();
  const MappedRegion states = MappedRegion::Map(fd.get(), 16 * kPage, Access::kReadWrite).value();
  const AlignedBuffer staging = AlignedBuffer::Make(2 * kPage).value();
  std::atomic<uint64_t> progress = 0;
  MemoryPins pins(start, std::nullopt);
  absl::Status status = pins.PinStates(states.bytes(), 2 * kPage);
  if (status.ok()) status = pins.PinStaging(staging.bytes(), progress);
  if (!status.ok()) return status.ToString();
  // Neither was brought in by it, but for staging.
  return absl::StrCat(pins.pinned_bytes() / kPage, " pinned, ", pins.unpinned_bytes() / kPage,
                      " not, ", AllocatedBytes(fd.get()).value(), " in memory");
}

TEST(MemoryPins, CountsStatesAndStaging) {
  EXPECT_EQ(PinBoth(Start()), "18 pinned, 0 not, 0 in memory");
}

TEST(MemoryPins, PinsNothingThatTheJobDoesNotWantPinned) {
  internal::v1::WorkerStart start = Start();
  start.mutable_config()->mutable_nvme()->set_pin_memory(false);
  start.set_require_pinned(true);
  const uint64_t before = LockedBytes();
  EXPECT_EQ(PinBoth(start), "0 pinned, 0 not, 0 in memory");
  EXPECT_EQ(LockedBytes(), before);
}

TEST(MemoryPins, WarnsOnceOfAllThatIsNotLocked) {
  const std::string text = RunWithLockLimit({kPage, kPage}, [] {
    testing::internal::CaptureStderr();
    const std::string counted = PinBoth(Start());
    return absl::StrCat(counted, "|", testing::internal::GetCapturedStderr());
  });
  EXPECT_THAT(text, StartsWith("0 pinned, 18 not, 0 in memory|"));
  EXPECT_THAT(text, AllOf(HasSubstr("states of worker 3: 65536 bytes cannot be locked"),
                          HasSubstr("LimitMEMLOCK=73728 ")));
  EXPECT_EQ(text.find("cannot be locked"), text.rfind("cannot be locked")) << text;
}

TEST(MemoryPins, PinsWhatFits) {
  EXPECT_EQ(RunWithLockLimit({3 * kPage, 3 * kPage}, [] { return PinBoth(Start()); }),
            "2 pinned, 16 not, 0 in memory");
}

TEST(MemoryPins, RefusesWhatMustBeLockedAndCannot) {
  internal::v1::WorkerStart start = Start();
  start.set_require_pinned(true);
  EXPECT_EQ(PinBoth(start), "18 pinned, 0 not, 0 in memory");
  EXPECT_THAT(RunWithLockLimit({kPage, kPage}, [&] { return PinBoth(start); }),
              StartsWith("RESOURCE_EXHAUSTED: states of worker 3: 65536 bytes cannot be locked in "
                         "memory: RLIMIT_MEMLOCK is 4096 bytes, 0 of them used, and 73728 are"));
}

// A pinned job trains to the same bytes, restarts included, and tells what it has locked.
TEST(MemoryPins, APinnedJobIsTheSameJob) {
  auto train = [](bool pinned) {
    LocalJobOptions options;
    options.workers = 2;
    options.manifest = MakeManifest({1000, 3000}, model::v1::DTYPE_BFLOAT16);
    options.config = MakeConfig(2, 2, model::v1::DTYPE_BFLOAT16);
    options.config.mutable_nvme()->set_pin_memory(pinned);
    const uint64_t before = LockedBytes();
    LocalJob job(options);
    for (uint32_t rank = 0; rank < 2; ++rank) job.Hello(rank, false);
    job.PutParameters({std::vector<float>(1000, 0.5f), std::vector<float>(3000, -1.0f)});
    for (int step = 0; step < 3; ++step) {
      for (uint32_t rank = 0; rank < 2; ++rank) {
        job.ScatterAll(rank, 0, {std::vector<float>(1000, 0.1f), std::vector<float>(3000, 0.2f)});
        job.Step(rank, 1, 0.01);
      }
      job.Run();
      job.RestartWorker(1);
      job.Run();
    }
    uint64_t expected = 0;
    for (uint32_t w = 0; w < 2; ++w) {
      expected += job.memory(w).plan().bytes();
      EXPECT_EQ(job.engine(w).Stats().pinned_bytes(), pinned ? job.memory(w).plan().bytes() : 0);
      EXPECT_EQ(job.engine(w).Stats().unpinned_bytes(), 0u);
    }
    EXPECT_EQ(LockedBytes() - before, pinned ? expected : 0);
    return job.StateBytes();
  };
  EXPECT_EQ(train(true), train(false));
}

}  // namespace
}  // namespace zeroshard
