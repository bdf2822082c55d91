// Collectives over 1 to 4 ranks in threads, byte for byte.
#include "transport/nccl/communicator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "tests/transport/nccl/collectives.h"
#include "tests/transport/nccl/world.h"
#include "transport/nccl/node_gather.h"

namespace zeroshard {
namespace {

using Sizes = std::vector<uint64_t>;

class CommunicatorTest : public WorldTest {};

GatherFunction GatherOver(NcclCommunicator& world) {
  return [&world](CUstream_st* stream, std::span<const NcclGather> gathers) {
    return world.AllGather(stream, gathers);
  };
}

// Sizes of `ranks` ranks, none equal to its neighbour's, one of them zero.
Sizes UnevenSizes(uint32_t ranks, uint64_t base) {
  Sizes sizes;
  for (uint32_t rank = 0; rank < ranks; ++rank) sizes.push_back(rank == 1 ? 0 : base + rank);
  return sizes;
}

TEST_F(CommunicatorTest, EvenPiecesAreOneAllGather) {
  for (uint32_t ranks = 1; ranks <= 4; ++ranks) {
    FakeNcclReset("");
    RunWorld(ranks, QuickOptions(), [&](Rank& rank, NcclCommunicator& world) {
      for (const Placement placement : {Placement::kTogether, Placement::kInPlace}) {
        EXPECT_EQ(GatherAndCheck(rank, world, {Sizes(ranks, 70001)}, placement, GatherOver(world)),
                  absl::OkStatus());
      }
      EXPECT_EQ(world.operations(), 2u);
    });
    EXPECT_EQ(FakeNcclCalls("ncclAllGather"), 2 * ranks);
    EXPECT_EQ(FakeNcclCalls("ncclBroadcast"), 0u);
  }
}

TEST_F(CommunicatorTest, PiecesOfAnySizesAndPlaces) {
  for (uint32_t ranks = 1; ranks <= 4; ++ranks) {
    RunWorld(ranks, QuickOptions(), [&](Rank& rank, NcclCommunicator& world) {
      for (const Placement placement :
           {Placement::kTogether, Placement::kApart, Placement::kInPlace}) {
        const std::vector<Sizes> sizes = {UnevenSizes(ranks, 5000), Sizes(ranks, 256),
                                          Sizes(ranks, 0), UnevenSizes(ranks, 99999)};
        EXPECT_EQ(GatherAndCheck(rank, world, sizes, placement, GatherOver(world)),
                  absl::OkStatus());
      }
    });
  }
  EXPECT_GT(FakeNcclCalls("ncclBroadcast"), 0u);
}

TEST_F(CommunicatorTest, ExchangeOfAnySizes) {
  for (uint32_t ranks = 1; ranks <= 4; ++ranks) {
    RunWorld(ranks, QuickOptions(), [](Rank& rank, NcclCommunicator& world) {
      for (int round = 0; round < 3; ++round) {
        EXPECT_EQ(ExchangeAndCheck(rank, world), absl::OkStatus());
      }
    });
  }
}

TEST_F(CommunicatorTest, SeveralMessagesBetweenTwoRanksArriveInOrder) {
  RunWorld(2, QuickOptions(), [](Rank& rank, NcclCommunicator& world) {
    const uint32_t self = world.rank();
    const uint32_t peer = 1 - self;
    const std::vector<NcclMessage> sends = {{peer, rank.PlaceOf(PatternOf(self, 0, 300))},
                                            {self, rank.PlaceOf(PatternOf(self, 9, 64))},
                                            {peer, rank.PlaceOf(PatternOf(self, 1, 4096))}};
    const std::vector<NcclMessage> receives = {
        {peer, rank.Place(300)}, {peer, rank.Place(4096)}, {self, rank.Place(64)}};
    ASSERT_EQ(world.Exchange(rank.stream(), sends, receives), absl::OkStatus());
    ASSERT_EQ(world.Synchronize(rank.done(), absl::Seconds(20)), absl::OkStatus());
    EXPECT_EQ(rank.Read(receives[0].buffer), PatternOf(peer, 0, 300));
    EXPECT_EQ(rank.Read(receives[1].buffer), PatternOf(peer, 1, 4096));
    EXPECT_EQ(rank.Read(receives[2].buffer), PatternOf(self, 9, 64));
  });
}

TEST_F(CommunicatorTest, ManyOperationsWithoutAWaitBetweenThem) {
  RunWorld(3, QuickOptions(), [](Rank& rank, NcclCommunicator& world) {
    std::vector<NcclBroadcast> broadcasts;
    for (uint32_t number = 0; number < 30; ++number) {
      const uint32_t root = number % 3;
      NcclBroadcast one = {root, {}, rank.Place(2000)};
      if (root == world.rank()) one.send = rank.PlaceOf(PatternOf(root, number, 2000));
      broadcasts.push_back(one);
    }
    for (const NcclBroadcast& one : broadcasts) {
      ASSERT_EQ(world.Broadcast(rank.stream(), std::span(&one, 1)), absl::OkStatus());
    }
    ASSERT_EQ(world.Synchronize(rank.done(), absl::Seconds(20)), absl::OkStatus());
    for (uint32_t number = 0; number < 30; ++number) {
      EXPECT_EQ(rank.Read(broadcasts[number].receive), PatternOf(number % 3, number, 2000));
    }
    EXPECT_EQ(world.operations(), 30u);
  });
}

TEST_F(CommunicatorTest, GathersOverNodesGiveTheSameBytes) {
  const std::vector<std::vector<uint32_t>> maps = {
      {0, 0, 1, 1}, {0, 1, 1, 1}, {0, 1, 0, 1}, {7, 7, 7, 7}, {0, 1, 2, 2}};
  for (const std::vector<uint32_t>& map : maps) {
    SCOPED_TRACE(testing::PrintToString(map));
    RunWorld(4, QuickOptions(), [&](Rank& rank, NcclCommunicator& world) {
      auto nodes = NodeGather::Create(world, map);
      ASSERT_TRUE(nodes.ok()) << nodes.status();
      const GatherFunction gather = [&](CUstream_st* stream, std::span<const NcclGather> gathers) {
        return (*nodes)->AllGather(stream, gathers);
      };
      for (const Placement placement : {Placement::kTogether, Placement::kInPlace}) {
        const std::vector<Sizes> sizes = {UnevenSizes(4, 3000), Sizes(4, 512)};
        EXPECT_EQ(GatherAndCheck(rank, world, sizes, placement, gather), absl::OkStatus());
      }
      EXPECT_EQ((*nodes)->Close(), absl::OkStatus());
      EXPECT_EQ(world.Close(), absl::OkStatus());
    });
  }
}

TEST_F(CommunicatorTest, RegisteredMemoryIsGivenBack) {
  RunWorld(2, QuickOptions(), [](Rank& rank, NcclCommunicator& world) {
    const NcclBuffer first = rank.Place(4096);
    const NcclBuffer second = rank.Place(4096);
    EXPECT_TRUE(world.registers());
    EXPECT_EQ(world.Register(first), absl::OkStatus());
    EXPECT_EQ(world.Register(second), absl::OkStatus());
    EXPECT_EQ(world.Register(second).code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(world.Unregister(first), absl::OkStatus());
    EXPECT_EQ(world.Unregister(first), absl::OkStatus());
    EXPECT_EQ(world.Close(), absl::OkStatus());
  });
  EXPECT_EQ(FakeNcclCalls("ncclCommRegister"), 4u);
  EXPECT_EQ(FakeNcclCalls("ncclCommDeregister"), 4u);
}

TEST_F(CommunicatorTest, OperationsUseRegisteredMemoryAndAnAbortLeavesItRegistered) {
  for (const char* settings : {"", "registers-nothing"}) {
    FakeNcclReset(settings);
    RunWorld(2, QuickOptions(), [](Rank& rank, NcclCommunicator& world) {
      EXPECT_EQ(world.Register(rank.memory()), absl::OkStatus());
      EXPECT_EQ(ExchangeAndCheck(rank, world), absl::OkStatus());
      EXPECT_TRUE(world.Abort(absl::Seconds(5)));
    });
    EXPECT_EQ(FakeNcclCalls("ncclCommRegister"), 2u);
    EXPECT_EQ(FakeNcclCalls("ncclCommDeregister"), 0u);
  }
}

TEST_F(CommunicatorTest, OlderVersionsDoWithoutWhatTheyLack) {
  FakeNcclReset("version=21403");
  RunWorld(2, QuickOptions(), [](Rank& rank, NcclCommunicator& world) {
    EXPECT_EQ(world.Register(rank.Place(4096)), absl::OkStatus());
    const absl::Status split = NodeGather::Create(world, std::vector<uint32_t>{0, 1}).status();
    EXPECT_EQ(split.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(split.ToString(), testing::HasSubstr("NCCL 2.14.3"));
    EXPECT_EQ(ExchangeAndCheck(rank, world), absl::OkStatus());
  });
  EXPECT_EQ(FakeNcclCalls("ncclCommRegister"), 0u);
  FakeNcclReset("version=21304");
  const absl::Status old = NcclLibrary::Load().status();
  EXPECT_EQ(old.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(old.ToString(), testing::HasSubstr("2.14 or newer"));
}

TEST_F(CommunicatorTest, MistakesOfTheCallerChangeNothing) {
  RunWorld(2, QuickOptions(), [](Rank& rank, NcclCommunicator& world) {
    const NcclBuffer place = rank.Place(64);
    const auto invalid = absl::StatusCode::kInvalidArgument;
    EXPECT_EQ(world.AllGather(rank.stream(), {place, {place}}).code(), invalid);
    NcclGather other_size = {place, {place, place}};
    other_size.send.bytes = 32;
    EXPECT_EQ(world.AllGather(rank.stream(), other_size).code(), invalid);
    const std::vector<NcclMessage> stray = {{2, place}};
    EXPECT_EQ(world.Exchange(rank.stream(), stray, {}).code(), invalid);
    const std::vector<NcclBuffer> few = {place};
    EXPECT_EQ(world.Exchange(rank.stream(), few, few).code(), invalid);
    const std::vector<NcclBroadcast> no_root = {{2, place, place}};
    EXPECT_EQ(world.Broadcast(rank.stream(), no_root).code(), invalid);
    EXPECT_EQ(world.Split(std::vector<uint32_t>{0}).status().code(), invalid);
    EXPECT_EQ(world.operations(), 0u);
    EXPECT_EQ(ExchangeAndCheck(rank, world), absl::OkStatus());
  });
  const NcclLibrary library = *NcclLibrary::Load();
  EXPECT_EQ(NcclCommunicator::Create(library, *library.MakeUniqueId(), 2, 2, {}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(CommunicatorTest, AnEndInOrder) {
  RunWorld(3, QuickOptions(), [](Rank& rank, NcclCommunicator& world) {
    EXPECT_EQ(ExchangeAndCheck(rank, world), absl::OkStatus());
    EXPECT_EQ(world.Close(), absl::OkStatus());
    EXPECT_EQ(world.Close().code(), absl::StatusCode::kAborted);
    EXPECT_FALSE(world.AllGather(rank.stream(), NcclGather{{}, {{}, {}, {}}}).ok());
  });
  EXPECT_EQ(FakeNcclCalls("ncclCommDestroy"), 3u);
  EXPECT_EQ(FakeNcclCalls("ncclCommAbort"), 0u);
}

}  // namespace
}  // namespace zeroshard
