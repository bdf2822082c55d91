// What becomes of callers when NCCL fails, hangs or is used wrongly: an error, soon, and the way
// out.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "base/deadline.h"
#include "tests/transport/nccl/collectives.h"
#include "tests/transport/nccl/world.h"

namespace zeroshard {
namespace {

using absl::StatusCode;
using testing::HasSubstr;

constexpr absl::Duration kShort = absl::Milliseconds(300);
constexpr absl::Duration kAmple = absl::Seconds(20);

class CommunicatorFaultsTest : public WorldTest {};

absl::Status GatherSome(Rank& rank, NcclCommunicator& world) {
  const NcclBuffer place = rank.Place(1024 * world.ranks());
  NcclGather gather = {rank.Place(1024), {}};
  for (uint32_t piece = 0; piece < world.ranks(); ++piece) {
    gather.receive.push_back({place.address + 1024 * piece, 1024});
  }
  return world.AllGather(rank.stream(), gather);
}

// A dead communicator says why, makes no call into NCCL, and lets the stream go on when aborted.
void ExpectDead(Rank& rank, NcclCommunicator& world, const absl::Status& reason) {
  EXPECT_EQ(world.Poll(), reason);
  EXPECT_EQ(GatherSome(rank, world), reason);
  EXPECT_EQ(world.Synchronize(rank.done(), kAmple), reason);
  EXPECT_EQ(world.Register(rank.Place(64)), reason);
  EXPECT_EQ(world.Close(), reason);
  EXPECT_TRUE(rank.Passed(kAmple));
}

TEST_F(CommunicatorFaultsTest, AnOperationThatNeverEnds) {
  FakeNcclReset("hang:2,rank=1");
  RunWorld(3, QuickOptions(), [](Rank& rank, NcclCommunicator& world) {
    EXPECT_EQ(GatherSome(rank, world), absl::OkStatus());
    EXPECT_EQ(world.Synchronize(rank.done(), kAmple), absl::OkStatus());
    EXPECT_EQ(GatherSome(rank, world), absl::OkStatus());
    const absl::Status late = world.Synchronize(rank.done(), kShort);
    EXPECT_EQ(late.code(), StatusCode::kDeadlineExceeded);
    EXPECT_THAT(late.ToString(), HasSubstr("of 3 of job generation 1"));
    EXPECT_THAT(late.ToString(), HasSubstr("2 operations"));
    ExpectDead(rank, world, late);
  });
}

TEST_F(CommunicatorFaultsTest, AnAsynchronousErrorEndsTheWait) {
  FakeNcclReset("error:1,rank=0");
  RunWorld(2, QuickOptions(), [](Rank& rank, NcclCommunicator& world) {
    const bool fails = world.rank() == 0;
    absl::Status error = GatherSome(rank, world);  // may see it already
    if (error.ok()) error = world.Synchronize(rank.done(), fails ? kAmple : kShort);
    EXPECT_EQ(error.code(), fails ? StatusCode::kUnavailable : StatusCode::kDeadlineExceeded);
    EXPECT_THAT(error.ToString(), HasSubstr(fails ? "unhandled system error" : "was not over"));
    ExpectDead(rank, world, error);
  });
}

TEST_F(CommunicatorFaultsTest, NewsFromElsewhereEndTheWaitAtOnce) {
  FakeNcclReset("hang:1");
  RunWorld(2, QuickOptions(), [](Rank& rank, NcclCommunicator& world) {
    EXPECT_EQ(GatherSome(rank, world), absl::OkStatus());
    const Deadline ample = Deadline::After(kAmple);
    std::thread news([&world] {
      absl::SleepFor(absl::Milliseconds(20));
      world.Interrupt(absl::AbortedError("step 7 aborted: rank 1 died"));
      world.Interrupt(absl::AbortedError("a later reason"));
    });
    const absl::Status error = world.Synchronize(rank.done(), kAmple);
    news.join();
    EXPECT_EQ(error, absl::AbortedError("step 7 aborted: rank 1 died"));
    EXPECT_FALSE(ample.Passed());
    ExpectDead(rank, world, error);
  });
}

TEST_F(CommunicatorFaultsTest, TheDeathOfTheGenerationEndsEveryWait) {
  const absl::Status dead = absl::AbortedError("step 7 aborted: rank 1 died");
  std::atomic<bool> alive = true;
  NcclOptions options = QuickOptions();
  options.alive = [&] { return alive ? absl::OkStatus() : dead; };
  FakeNcclReset("hang:1");
  RunWorld(1, options, [&](Rank& rank, NcclCommunicator& world) {
    EXPECT_EQ(GatherSome(rank, world), absl::OkStatus());
    alive = false;
    EXPECT_EQ(world.Synchronize(rank.done(), kAmple), dead);
    ExpectDead(rank, world, dead);
  });
  // A communicator that never comes to be.
  const NcclLibrary library = *NcclLibrary::Load();
  const auto rank = Rank::Create(0);
  EXPECT_EQ(NcclCommunicator::Create(library, *library.MakeUniqueId(), 0, 2, options).status(),
            dead);
}

TEST_F(CommunicatorFaultsTest, RanksThatDoOtherThingsHangUntilTheDeadline) {
  RunWorld(2, QuickOptions(), [](Rank& rank, NcclCommunicator& world) {
    const std::vector<NcclBuffer> buffers = {rank.Place(1024), rank.Place(1024)};
    if (world.rank() == 0) {
      EXPECT_EQ(GatherSome(rank, world), absl::OkStatus());
    }
    EXPECT_EQ(world.Exchange(rank.stream(), buffers, buffers), absl::OkStatus());
    if (world.rank() == 1) {
      EXPECT_EQ(GatherSome(rank, world), absl::OkStatus());
    }
    const absl::Status error = world.Synchronize(rank.done(), kShort);
    EXPECT_EQ(error.code(), StatusCode::kDeadlineExceeded);
    EXPECT_THAT(error.ToString(), HasSubstr("does other operations"));
  });
}

TEST_F(CommunicatorFaultsTest, AnAbortThatHangsIsGivenUp) {
  FakeNcclReset("hang:1,abort-hangs");
  std::barrier both(2);
  RunWorld(2, QuickOptions(), [&](Rank& rank, NcclCommunicator& world) {
    EXPECT_EQ(GatherSome(rank, world), absl::OkStatus());
    EXPECT_FALSE(world.Synchronize(rank.done(), kShort).ok());
    EXPECT_FALSE(world.Abort(kShort));
    EXPECT_FALSE(world.Abort(absl::ZeroDuration()));
    EXPECT_FALSE(rank.Passed(absl::ZeroDuration()));
    both.arrive_and_wait();
    FakeNcclReset("");  // it ends after all, and the rest of RunWorld finds that
  });
  EXPECT_LE(FakeNcclCalls("ncclCommAbort"), 2u);
}

TEST_F(CommunicatorFaultsTest, ALaunchThatHangs) {
  FakeNcclReset("launch-hang:1");
  NcclOptions options = QuickOptions();
  options.timeout = absl::Seconds(1);
  RunWorld(1, options, [](Rank& rank, NcclCommunicator& world) {
    std::thread second([&] {
      absl::SleepFor(absl::Milliseconds(200));
      const absl::Status both = GatherSome(rank, world);
      EXPECT_EQ(both.code(), StatusCode::kFailedPrecondition);
      EXPECT_THAT(both.ToString(), HasSubstr("two threads"));
      EXPECT_EQ(world.Poll(), absl::OkStatus());
    });
    const absl::Status late = GatherSome(rank, world);
    second.join();
    EXPECT_EQ(late.code(), StatusCode::kDeadlineExceeded);
    EXPECT_THAT(late.ToString(), HasSubstr("launch of all-gather, operation 1, 1024 bytes"));
    ExpectDead(rank, world, late);
  });
}

TEST_F(CommunicatorFaultsTest, AGroupThatFails) {
  FakeNcclReset("fail:2");
  RunWorld(2, QuickOptions(), [](Rank& rank, NcclCommunicator& world) {
    EXPECT_EQ(GatherSome(rank, world), absl::OkStatus());
    EXPECT_EQ(world.Synchronize(rank.done(), kAmple), absl::OkStatus());
    const absl::Status error = GatherSome(rank, world);
    EXPECT_EQ(error.code(), StatusCode::kInternal);
    EXPECT_THAT(error.ToString(), HasSubstr("all-gather, operation 2"));
    ExpectDead(rank, world, error);
  });
}

TEST_F(CommunicatorFaultsTest, AStreamThatFailsEndsTheCommunicator) {
  RunWorld(1, QuickOptions(), [](Rank& rank, NcclCommunicator& world) {
    const absl::Status error = world.Synchronize(
        []() -> absl::StatusOr<bool> { return absl::InternalError("device lost"); }, kAmple);
    EXPECT_EQ(error.code(), StatusCode::kInternal);
    ExpectDead(rank, world, error);
  });
}

// What becomes of Create when all ranks call it with these settings.
std::vector<absl::Status> CreateWith(const std::string& settings, uint32_t ranks,
                                     const std::vector<uint32_t>& devices) {
  FakeNcclReset(settings.c_str());
  NcclOptions options = QuickOptions();
  options.timeout = absl::Milliseconds(500);
  const NcclLibrary library = *NcclLibrary::Load();
  const NcclUniqueId id = *library.MakeUniqueId();
  std::vector<absl::Status> results(devices.size());
  RunRanks(static_cast<uint32_t>(devices.size()), [&](uint32_t number) {
    auto rank = Rank::Create(devices[number]);
    ASSERT_TRUE(rank.ok()) << rank.status();
    results[number] = NcclCommunicator::Create(library, id, number, ranks, options).status();
  });
  return results;
}

TEST_F(CommunicatorFaultsTest, CreationThatCannotBe) {
  const std::vector<absl::Status> alone = CreateWith("", 3, {0, 1});
  for (const absl::Status& status : alone) {
    EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status;
    EXPECT_THAT(status.ToString(), HasSubstr("of 3 of job generation 1"));
  }
  for (const absl::Status& status : CreateWith("init-hangs", 2, {0, 1})) {
    EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status;
  }
  for (const absl::Status& status : CreateWith("init-fails", 2, {0, 1})) {
    EXPECT_EQ(status.code(), StatusCode::kUnavailable) << status;
  }
  for (const absl::Status& status : CreateWith("", 2, {1, 1})) {
    EXPECT_EQ(status.code(), StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(status.ToString(), HasSubstr("Duplicate GPU"));
  }
  EXPECT_EQ(FakeNcclCalls("communicators"), 0u);
}

TEST_F(CommunicatorFaultsTest, ASplitThatNotAllTakePartIn) {
  NcclOptions options = QuickOptions();
  options.timeout = absl::Milliseconds(500);
  RunWorld(2, options, [](Rank& rank, NcclCommunicator& world) {
    if (world.rank() == 1) return absl::SleepFor(absl::Milliseconds(800));
    const absl::Status late = world.Split(std::vector<uint32_t>{0, 0}).status();
    EXPECT_EQ(late.code(), StatusCode::kDeadlineExceeded);
    ExpectDead(rank, world, late);
  });
}

}  // namespace
}  // namespace zeroshard
