// Ranks that do not come, collectives that hang, devices that are lost: every wait ends, the first
// reason is kept, the worker is told, and the process goes on with another generation.
#include <gtest/gtest.h>

#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "client/dataplane/loader.h"
#include "client/dataplane/trainer_data_plane.h"
#include "tests/client/dataplane/plane_world.h"
#include "tests/fakes/cuda/fake_cuda.h"
#include "tests/fakes/nccl/fake_nccl.h"

namespace zeroshard {
namespace {

class FaultTest : public testing::Test {
 protected:
  ~FaultTest() override { FakeNcclReset(""); }
};

// A step of two ranks in which each sends all its gradients.
absl::Status Step(PlaneWorld& world, uint32_t rank, uint64_t attempt) {
  world.plane(rank).Begin(attempt);
  for (const uint32_t unit : world.Trainable()) {
    ZS_RETURN_IF_ERROR(world.Send(rank, unit, 0, MakeGradient(world, unit, rank, false, false)));
  }
  ZS_RETURN_IF_ERROR(world.plane(rank).EndMicroStep(0));
  ZS_RETURN_IF_ERROR(world.plane(rank).Boundary());
  return world.AwaitSummed(rank, attempt);
}

TEST_F(FaultTest, ARankThatDoesNotComeEndsTheWaitAndIsToldToTheWorker) {
  PlaneWorld world({.ranks = 2, .timeout = absl::Seconds(1)});
  world.Connect();
  const uint32_t unit = 0;
  ASSERT_TRUE(world.plane(0).Gather({&unit, 1}).ok());
  const absl::Status status = world.plane(0).WaitOnHost(unit);
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_EQ(world.counters(0).error.load(), static_cast<uint64_t>(status.code()));
  // The first reason is kept.
  EXPECT_EQ(world.plane(0).Gather({&unit, 1}), status);
  EXPECT_EQ(world.plane(0).Poll(), status);
  EXPECT_EQ(world.plane(0).AcquireSlot(512).status(), status);
}

TEST_F(FaultTest, APollFindsWorkThatStandsStill) {
  PlaneWorld world({.ranks = 2, .timeout = absl::Milliseconds(300)});
  world.Connect();
  const uint32_t unit = 1;
  ASSERT_TRUE(world.plane(0).Gather({&unit, 1}).ok());
  absl::Status status;
  for (const absl::Time end = absl::Now() + absl::Seconds(20); status.ok() && absl::Now() < end;) {
    status = world.plane(0).Poll();
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_NE(status.message().find("all-gather of unit 1"), std::string::npos) << status;
}

TEST_F(FaultTest, AnAbortEndsAWaitOfAnotherThread) {
  PlaneWorld world({.ranks = 2});
  world.Connect();
  const uint32_t unit = 0;
  ASSERT_TRUE(world.plane(0).Gather({&unit, 1}).ok());
  std::thread waiter([&] {
    const absl::Status status = world.plane(0).WaitOnHost(unit);
    EXPECT_TRUE(absl::IsAborted(status)) << status;
  });
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_TRUE(world.plane(0).Abort(absl::AbortedError("step 3 aborted: rank 1 died")));
  waiter.join();
  EXPECT_EQ(world.counters(0).error.load(), static_cast<uint64_t>(absl::StatusCode::kAborted));
}

TEST_F(FaultTest, ADeadGenerationEndsAWait) {
  PlaneWorld world({.ranks = 2});
  world.Connect();
  const uint32_t unit = 0;
  std::vector<DataPlaneOptions> options;
  std::atomic<bool> dead{false};
  for (uint32_t rank = 0; rank < 2; ++rank) {
    world.rank(rank).plane.reset();
    options.push_back(world.PlaneOptions(rank));
    options[rank].alive = [&dead] {
      return dead ? absl::AbortedError("step 5 aborted: rank 1 died") : absl::OkStatus();
    };
  }
  world.ForgetKeys();
  world.RunAll([&](uint32_t rank) -> absl::Status {
    ZS_ASSIGN_OR_RETURN(world.rank(rank).plane, TrainerDataPlane::Create(std::move(options[rank])));
    return absl::OkStatus();
  });
  ASSERT_TRUE(world.plane(0).Gather({&unit, 1}).ok());
  dead = true;
  const absl::Status status = world.plane(0).WaitOnHost(unit);
  EXPECT_TRUE(absl::IsAborted(status)) << status;
  EXPECT_NE(status.message().find("rank 1 died"), std::string::npos) << status;
  // Whoever ended the generation knows: nothing is told to the worker.
  EXPECT_EQ(world.counters(0).error.load(), 0u);
}

TEST_F(FaultTest, ClosingIsNoFailure) {
  PlaneWorld world({.ranks = 2});
  world.Connect();
  EXPECT_TRUE(world.plane(0).Abort(absl::CancelledError("the session was closed")));
  EXPECT_EQ(world.counters(0).error.load(), 0u);
  EXPECT_FALSE(world.plane(0).Barrier().ok());
}

TEST_F(FaultTest, AHangOfACollectiveEndsAndTheNextGenerationGoesOnAtTheSameAddresses) {
  PlaneWorld world({.ranks = 2, .timeout = absl::Seconds(1)});
  world.Connect();
  world.RunAll([&](uint32_t rank) { return Step(world, rank, 1); });
  const DeviceAddress address = world.plane(0).parameter_address(1);
  FakeNcclReset("hang:3,rank=0");
  const std::vector<absl::Status> results =
      world.Run([&](uint32_t rank) { return Step(world, rank, 2); });
  EXPECT_FALSE(results[0].ok() && results[1].ok());
  for (uint32_t rank = 0; rank < 2; ++rank) {
    world.plane(rank).Abort(absl::AbortedError("step 2 aborted"));
  }
  FakeNcclReset("");
  world.Connect();
  world.RunAll([&](uint32_t rank) { return Step(world, rank, 3); });
  EXPECT_EQ(world.plane(0).parameter_address(1), address);
}

TEST_F(FaultTest, AnAsynchronousErrorOfNcclIsFound) {
  PlaneWorld world({.ranks = 2});
  world.Connect();
  FakeNcclReset("error:1,rank=0");
  const uint32_t unit = 0;
  const absl::Status sent = world.plane(0).Gather({&unit, 1});
  const absl::Status status = sent.ok() ? world.plane(0).WaitOnHost(unit) : sent;
  EXPECT_FALSE(status.ok());
  EXPECT_NE(world.counters(0).error.load(), 0u);
}

TEST_F(FaultTest, AnAbortThatHangsGivesTheMemoryUp) {
  auto world =
      std::make_unique<PlaneWorld>(WorldOptions{.ranks = 2, .timeout = absl::Milliseconds(500)});
  world->Connect();
  FakeNcclReset("hang:1,abort-hangs");
  const uint32_t unit = 0;
  ASSERT_TRUE(world->plane(0).Gather({&unit, 1}).ok());
  EXPECT_FALSE(world->plane(0).WaitOnHost(unit).ok());
  const absl::Time start = absl::Now();
  EXPECT_FALSE(world->plane(0).Abort(absl::AbortedError("step 1 aborted")));
  EXPECT_LT(absl::Now() - start, absl::Seconds(15));
  EXPECT_EQ(world->plane(0).memory(), nullptr);
  FakeNcclReset("");
}

TEST_F(FaultTest, ALostDeviceIsSaidAndToldToTheWorker) {
  PlaneWorld world({.ranks = 1}, "lost:40");
  world.Connect();
  absl::Status status;
  for (uint64_t attempt = 1; status.ok() && attempt < 50; ++attempt) {
    // Not by Send: the test's own copies fail, too.
    DataPlane& plane = world.plane(0);
    plane.Begin(attempt);
    for (const uint32_t unit : world.Trainable()) {
      const absl::StatusOr<DeviceSlot> slot =
          plane.AcquireSlot(world.layout().units()[unit].bytes());
      status = slot.status();
      if (status.ok()) status = plane.Scatter({.unit = unit, .slot = slot->offset});
      if (!status.ok()) break;
    }
    if (status.ok()) status = plane.EndMicroStep(0);
    if (status.ok()) status = plane.Boundary();
    if (status.ok()) status = world.AwaitSummed(0, attempt);
  }
  EXPECT_NE(status.message().find("device lost"), std::string::npos) << status;
  EXPECT_NE(world.counters(0).error.load(), 0u);
  EXPECT_TRUE(world.plane(0).Abort(status));
}

TEST_F(FaultTest, RanksOfDifferentStepsAreFoundBeforeTheWorkerIsTold) {
  PlaneWorld world({.ranks = 2});
  world.Connect();
  const std::vector<absl::Status> results =
      world.Run([&](uint32_t rank) { return Step(world, rank, 10 + rank); });
  for (uint32_t rank = 0; rank < 2; ++rank) {
    // The counter may have been written; the error was before it.
    while (world.counters(rank).summed.load() == 0) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_NE(world.counters(rank).error.load(), 0u);
    const absl::Status status = world.plane(rank).Poll();
    EXPECT_TRUE(absl::IsAborted(status)) << status;
    EXPECT_NE(status.message().find("not at the same micro-step"), std::string::npos) << status;
  }
}

TEST_F(FaultTest, AFullDeviceIsAnErrorWithFigures) {
  PlaneWorld world({.ranks = 1, .sizes = {1 << 20}}, "memory=14M");
  absl::StatusOr<std::unique_ptr<DataPlane>> plane =
      TrainerDataPlane::Create(world.PlaneOptions(0));
  EXPECT_TRUE(absl::IsResourceExhausted(plane.status())) << plane.status();
}

TEST_F(FaultTest, AGpuThatThisProcessDoesNotSeeIsRefused) {
  PlaneWorld world({.ranks = 1});
  DataPlaneOptions options = world.PlaneOptions(0);
  options.device_uuid[3] ^= std::byte{0x40};
  EXPECT_TRUE(absl::IsFailedPrecondition(TrainerDataPlane::Create(std::move(options)).status()));
  options = world.PlaneOptions(0);
  options.places[0].parameters = options.shared_bytes;
  EXPECT_TRUE(absl::IsDataLoss(TrainerDataPlane::Create(std::move(options)).status()));
}

TEST(LoaderTest, OpensTheLibraryOfItsOwnVersion) {
  fake_cuda::ResetFakeCuda("devices=2");
  ASSERT_EQ(setenv("ZEROSHARD_DATAPLANE", "client/dataplane/libzeroshard-dataplane.so", 1), 0);
  const absl::StatusOr<const DataPlaneLibrary*> library = LoadDataPlaneLibrary();
  ASSERT_TRUE(library.ok()) << library.status();
  EXPECT_EQ((*library)->version, kDataPlaneVersion);
  const absl::StatusOr<DeviceFacts> facts = (*library)->device(1);
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_EQ(facts->ordinal, 1);
  EXPECT_TRUE(absl::IsNotFound((*library)->device(2).status()));
  ASSERT_EQ(setenv("ZEROSHARD_DATAPLANE", "/nowhere/lib.so", 1), 0);
  const absl::Status missing = LoadDataPlaneLibrary().status();
  EXPECT_TRUE(absl::IsFailedPrecondition(missing));
  EXPECT_NE(missing.message().find("/nowhere/lib.so"), std::string::npos) << missing;
  unsetenv("ZEROSHARD_DATAPLANE");
}

}  // namespace
}  // namespace zeroshard
