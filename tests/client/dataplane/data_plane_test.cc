// What a data plane moves and sums, against the shards that it reads and the host's own sums.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "client/dataplane/exchange_header.h"
#include "tests/client/dataplane/plane_world.h"
#include "tests/fakes/nccl/fake_nccl.h"

namespace zeroshard {
namespace {

std::vector<std::byte> Pattern(uint64_t bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> pattern(bytes);
  for (std::byte& byte : pattern) byte = static_cast<std::byte>(random());
  return pattern;
}

std::vector<uint32_t> AllUnits(const PlaneWorld& world) {
  std::vector<uint32_t> units(world.layout().units().size());
  for (uint32_t i = 0; i < units.size(); ++i) units[i] = i;
  return units;
}

// --- Gathers -------------------------------------------------------------------------------------

class GatherTest : public testing::TestWithParam<std::tuple<uint32_t, uint32_t, DType>> {};

TEST_P(GatherTest, WindowsHoldWhatAllShardsHold) {
  const auto [ranks, stage, dtype] = GetParam();
  PlaneWorld world({.ranks = ranks, .config = {.stage = stage}, .dtype = dtype});
  world.Connect();
  for (int round = 0; round < 3; ++round) {
    std::vector<std::vector<std::byte>> units;
    for (const uint32_t unit : AllUnits(world)) {
      units.push_back(Pattern(world.layout().units()[unit].bytes(), 10 * round + unit));
      world.SetParameters(unit, units.back());
    }
    world.RunAll([&](uint32_t rank) -> absl::Status {
      DataPlane& plane = world.plane(rank);
      const std::vector<uint32_t> all = AllUnits(world);
      if (round == 0 || stage == 3) {
        ZS_RETURN_IF_ERROR(plane.Gather(all));
      } else {
        ZS_RETURN_IF_ERROR(round == 1 ? plane.Committed() : plane.Refresh());
      }
      for (const uint32_t unit : all) {
        ZS_RETURN_IF_ERROR(plane.WaitOn(unit, world.rank(rank).stream->handle()));
        EXPECT_EQ(world.Window(rank, unit), units[unit]) << "rank " << rank << " unit " << unit;
      }
      if (stage == 3) return plane.Release(all, world.rank(rank).stream->handle());
      return absl::OkStatus();
    });
  }
}

INSTANTIATE_TEST_SUITE_P(All, GatherTest,
                         testing::Combine(testing::Values(1, 2, 3, 4), testing::Values(1, 3),
                                          testing::Values(DType::kFloat32, DType::kBfloat16)),
                         [](const auto& param) {
                           return absl::StrCat(
                               "R", std::get<0>(param.param), "Stage", std::get<1>(param.param),
                               std::get<2>(param.param) == DType::kFloat32 ? "Fp32" : "Bf16");
                         });

TEST(GatherTest, OverNodesOfSeveralGpusTheWindowsAreTheSame) {
  for (const std::vector<std::string>& nodes :
       {std::vector<std::string>{"a", "a", "b", "b"}, {"a", "b", "b", "b"}}) {
    PlaneWorld world({.ranks = 4, .config = {.stage = 3}, .nodes = nodes});
    world.Connect();
    std::vector<std::vector<std::byte>> units;
    for (const uint32_t unit : AllUnits(world)) {
      units.push_back(Pattern(world.layout().units()[unit].bytes(), unit));
      world.SetParameters(unit, units.back());
    }
    FakeNcclReset("");
    world.RunAll([&](uint32_t rank) -> absl::Status {
      ZS_RETURN_IF_ERROR(world.plane(rank).Gather(AllUnits(world)));
      for (const uint32_t unit : AllUnits(world)) {
        ZS_RETURN_IF_ERROR(world.plane(rank).WaitOn(unit, world.rank(rank).stream->handle()));
        EXPECT_EQ(world.Window(rank, unit), units[unit]) << "rank " << rank << " unit " << unit;
      }
      return absl::OkStatus();
    });
    // The node first: messages between nodes, broadcasts within them.
    EXPECT_GT(FakeNcclCalls("ncclSend"), 0u);
    EXPECT_EQ(FakeNcclCalls("ncclAllGather"), 0u);
  }
}

TEST(GatherTest, AWindowHoldsAtMostWhatMayLiveAndUnitsKeepTheirAddresses) {
  // Units of 4 MiB in segments of 2 MiB; two may be there.
  constexpr uint64_t kElements = uint64_t{1} << 20;
  PlaneWorld world({.ranks = 2,
                    .config = {.stage = 3, .max_live_elements = 2 * kElements},
                    .sizes = std::vector<uint64_t>(12, kElements / 2)});
  world.Connect();
  const size_t units = world.layout().units().size();
  ASSERT_EQ(units, 6u);
  std::vector<std::vector<std::byte>> values;
  for (uint32_t unit = 0; unit < units; ++unit) {
    values.push_back(Pattern(world.layout().units()[unit].bytes(), unit));
    world.SetParameters(unit, values.back());
  }
  world.RunAll([&](uint32_t rank) -> absl::Status {
    DataPlane& plane = world.plane(rank);
    const StreamHandle stream = world.rank(rank).stream->handle();
    for (uint32_t turn = 0; turn < 2 * units; ++turn) {
      const auto unit = static_cast<uint32_t>(turn % units);
      ZS_RETURN_IF_ERROR(plane.Gather({&unit, 1}));
      ZS_RETURN_IF_ERROR(plane.WaitOn(unit, stream));
      EXPECT_EQ(plane.parameter_address(unit),
                plane.parameter_address(0) + world.layout().units()[unit].window_offset);
      EXPECT_EQ(world.Window(rank, unit), values[unit]) << unit;
      ZS_RETURN_IF_ERROR(plane.Release({&unit, 1}, stream));
    }
    const DataPlaneStats stats = plane.stats();
    EXPECT_LE(stats.peak_window_bytes, 2 * kElements * sizeof(float));
    EXPECT_EQ(stats.evictions, 2 * units - 2);
    return absl::OkStatus();
  });
}

// The fake ends the process where of a transfer only one end is registered.
TEST(RegistrationTest, WhatStaysMappedIsRegisteredByEveryRank) {
  struct Case {
    uint32_t stage;
    const char* nccl;
    uint64_t registrations;  // by each rank
  };
  // Of parameters: shards and window. Of gradients: headers, staging, the ring of slots.
  for (const Case& one : {Case{1, "", 5}, Case{2, "", 5}, Case{3, "", 3},
                          Case{1, "version=21403", 0}, Case{1, "registers-nothing", 5}}) {
    SCOPED_TRACE(absl::StrCat("stage ", one.stage, " ", one.nccl));
    PlaneWorld world({.ranks = 2, .config = {.stage = one.stage}});
    FakeNcclReset(one.nccl);
    world.Connect();
    EXPECT_EQ(FakeNcclCalls("ncclCommRegister"), 2 * one.registrations);
    const uint32_t unit = world.Trainable().front();
    const auto values = Pattern(world.layout().units()[unit].bytes(), 5);
    world.SetParameters(unit, values);
    world.RunAll([&](uint32_t rank) -> absl::Status {
      DataPlane& plane = world.plane(rank);
      ZS_RETURN_IF_ERROR(plane.Gather({&unit, 1}));
      ZS_RETURN_IF_ERROR(plane.WaitOn(unit, world.rank(rank).stream->handle()));
      EXPECT_EQ(world.Window(rank, unit), values);
      plane.Begin(1);
      ZS_RETURN_IF_ERROR(world.Send(rank, unit, 0, MakeGradient(world, unit, rank, false, false)));
      ZS_RETURN_IF_ERROR(plane.EndMicroStep(0));
      ZS_RETURN_IF_ERROR(plane.Boundary());
      return world.AwaitSummed(rank, 1);
    });
  }
}

TEST(BarrierTest, NobodyLeavesBeforeAllCame) {
  PlaneWorld world({.ranks = 3});
  world.Connect();
  std::atomic<int> came{0};
  for (int round = 1; round <= 3; ++round) {
    world.RunAll([&](uint32_t rank) -> absl::Status {
      absl::SleepFor(absl::Milliseconds(10 * rank));
      ++came;
      ZS_RETURN_IF_ERROR(world.plane(rank).Barrier());
      EXPECT_EQ(came.load(), 3 * round);
      return absl::OkStatus();
    });
  }
}

// --- Sums ----------------------------------------------------------------------------------------

struct SumCase {
  uint32_t ranks = 2;
  uint32_t stage = 3;
  uint32_t group = 1;
  DType dtype = DType::kFloat32;
  DType accumulators = DType::kFloat32;
  uint32_t micro_steps = 1;
  bool local = false;
  bool absent = false;
  bool weighted = false;
  std::string nodes{};  // by rank, a letter each; empty: one
};

void PrintTo(const SumCase& c, std::ostream* out) {
  *out << c.ranks << " ranks" << (c.nodes.empty() ? "" : " on ") << c.nodes << ", stage " << c.stage
       << ", groups of " << c.group << ", " << c.micro_steps << " micro-steps"
       << (c.local ? ", local" : "") << (c.absent ? ", absent" : "")
       << (c.weighted ? ", weighted" : "");
}

std::vector<std::string> NodesOf(const std::string& letters) {
  std::vector<std::string> nodes;
  for (const char letter : letters) nodes.emplace_back(1, letter);
  return nodes;
}

class SumTest : public testing::TestWithParam<SumCase> {
 protected:
  // By unit and micro-step. With `absent` some ranks have no gradient of a unit at all.
  std::map<uint32_t, std::vector<Gradients>> Make(const PlaneWorld& world, uint64_t attempt) {
    const SumCase& c = GetParam();
    std::map<uint32_t, std::vector<Gradients>> made;
    for (const uint32_t unit : world.Trainable()) {
      for (uint32_t micro = 0; micro < c.micro_steps; ++micro) {
        Gradients& gradients = made[unit].emplace_back(c.ranks);
        for (uint32_t rank = 0; rank < c.ranks; ++rank) {
          const uint64_t seed = (attempt * 64 + micro) * 64 + rank;
          if (c.absent && (seed + unit) % 5 == 0) continue;
          gradients[rank] = MakeGradient(world, unit, seed, c.absent, c.weighted);
        }
      }
    }
    return made;
  }
};

TEST_P(SumTest, AccumulatorsHoldTheHostsBits) {
  const SumCase& c = GetParam();
  PlaneWorld world({.ranks = c.ranks,
                    .config = {.stage = c.stage,
                               .accumulator_dtype = c.accumulators,
                               .reduction_group = c.group,
                               .local_sums = c.local},
                    .dtype = c.dtype,
                    .frozen = {2, 3},
                    .nodes = NodesOf(c.nodes)});
  world.Connect();
  for (uint64_t attempt = 7; attempt < 10; ++attempt) {
    const auto gradients = Make(world, attempt);
    std::map<uint32_t, std::vector<std::byte>> before;
    for (const uint32_t unit : world.Trainable()) before[unit] = world.Accumulators(unit);
    world.RunAll([&](uint32_t rank) -> absl::Status {
      DataPlane& plane = world.plane(rank);
      plane.Begin(attempt);
      for (uint32_t micro = 0; micro < c.micro_steps; ++micro) {
        std::vector<uint32_t> order = world.Trainable();
        std::mt19937_64 random(attempt * 100 + micro * 10 + rank);
        std::shuffle(order.begin(), order.end(), random);  // another one on each rank
        for (const uint32_t unit : order) {
          const auto& gradient = gradients.at(unit)[micro][rank];
          if (gradient) ZS_RETURN_IF_ERROR(world.Send(rank, unit, micro, *gradient));
        }
        ZS_RETURN_IF_ERROR(plane.EndMicroStep(micro));
      }
      EXPECT_LT(world.counters(rank).summed.load(), attempt);
      ZS_RETURN_IF_ERROR(plane.Boundary());
      return world.AwaitSummed(rank, attempt);
    });
    for (const uint32_t unit : world.Trainable()) {
      const std::vector<std::byte> expected =
          SumOnHost(world, unit, gradients.at(unit), before[unit]);
      const size_t element = SizeOf(c.accumulators);
      EXPECT_EQ(WithoutPadding(world, unit, world.Accumulators(unit), element),
                WithoutPadding(world, unit, expected, element))
          << "unit " << unit << " attempt " << attempt;
      for (uint32_t rank = 0; rank < c.ranks; ++rank) {
        EXPECT_EQ(world.PresenceOf(rank, unit), PresenceOnHost(world, unit, gradients.at(unit)))
            << "unit " << unit << " rank " << rank;
      }
    }
  }
  for (uint32_t rank = 0; rank < c.ranks; ++rank) EXPECT_EQ(world.counters(rank).error.load(), 0u);
}

std::vector<SumCase> SumCases() {
  std::vector<SumCase> cases;
  for (const uint32_t ranks : {1u, 2u, 3u, 4u}) {
    for (const bool odd : {false, true}) {
      cases.push_back({.ranks = ranks, .absent = odd, .weighted = odd});
      cases.push_back({.ranks = ranks,
                       .stage = 2,
                       .group = 2,
                       .dtype = DType::kBfloat16,
                       .micro_steps = 3,
                       .absent = odd,
                       .weighted = !odd});
      cases.push_back({.ranks = ranks,
                       .stage = 1,
                       .group = ranks,
                       .dtype = DType::kBfloat16,
                       .micro_steps = 2,
                       .local = true,
                       .absent = odd,
                       .weighted = odd});
    }
  }
  cases.push_back({.ranks = 3, .stage = 1, .group = 3, .micro_steps = 3, .absent = true});
  cases.push_back({.ranks = 2, .dtype = DType::kFloat16, .micro_steps = 2, .weighted = true});
  cases.push_back({.ranks = 2,
                   .dtype = DType::kBfloat16,
                   .accumulators = DType::kBfloat16,
                   .micro_steps = 2,
                   .absent = true});
  // Nodes that are nodes of the tree, that are more than one, or none; with parts and without.
  cases.push_back({.ranks = 4, .group = 2, .nodes = "aabb"});
  cases.push_back({.ranks = 4,
                   .stage = 1,
                   .group = 2,
                   .dtype = DType::kBfloat16,
                   .micro_steps = 2,
                   .local = true,
                   .absent = true,
                   .nodes = "aabb"});
  cases.push_back({.ranks = 6,
                   .group = 3,
                   .dtype = DType::kBfloat16,
                   .micro_steps = 2,
                   .absent = true,
                   .weighted = true,
                   .nodes = "aaabbb"});
  cases.push_back({.ranks = 5, .stage = 2, .group = 3, .absent = true, .nodes = "aabbb"});
  cases.push_back({.ranks = 6, .group = 4, .weighted = true, .nodes = "aabbcc"});
  cases.push_back({.ranks = 7, .group = 7, .dtype = DType::kFloat16, .nodes = "aaaabbb"});
  cases.push_back({.ranks = 4, .group = 2, .absent = true, .nodes = "abab"});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(All, SumTest, testing::ValuesIn(SumCases()));

// What one step's gradients are between nodes, in bytes an element, headers left out.
double BetweenNodes(DType dtype, const std::string& nodes) {
  const auto ranks = static_cast<uint32_t>(nodes.size());
  PlaneWorld world({.ranks = ranks,
                    .config = {.reduction_group = ranks / 2},
                    .dtype = dtype,
                    .sizes = {5000, 513},
                    .nodes = NodesOf(nodes)});
  world.Connect();
  const uint32_t unit = world.Trainable().at(0);
  world.RunAll([&](uint32_t rank) -> absl::Status {
    world.plane(rank).Begin(1);
    ZS_RETURN_IF_ERROR(world.Send(rank, unit, 0, MakeGradient(world, unit, 1, false, false)));
    ZS_RETURN_IF_ERROR(world.plane(rank).EndMicroStep(0));
    ZS_RETURN_IF_ERROR(world.plane(rank).Boundary());
    return world.AwaitSummed(rank, 1);
  });
  uint64_t bytes = 0;
  for (uint32_t rank = 0; rank < ranks; ++rank) {
    bytes += world.plane(rank).stats().scattered_between_nodes;
    for (uint32_t peer = 0; peer < ranks; ++peer) {
      if (nodes[peer] != nodes[rank]) bytes -= sizeof(ExchangeHeader);
    }
  }
  EXPECT_EQ(world.Trainable().size(), 1u);
  return static_cast<double>(bytes) / static_cast<double>(world.layout().units()[unit].elements());
}

TEST(SumTest, RanksOfANodeAreSummedBeforeTheyCrossTheNetwork) {
  EXPECT_EQ(BetweenNodes(DType::kFloat32, "aaaabbbb"), 4.0);
  EXPECT_EQ(BetweenNodes(DType::kBfloat16, "aaaabbbb"), 4.0);
  // Nodes that hold none of the tree's: all pieces, four of them.
  EXPECT_EQ(BetweenNodes(DType::kFloat32, "abababab"), 16.0);
  // A sum in fp32 is no less than two pieces of 16 bits.
  EXPECT_EQ(BetweenNodes(DType::kBfloat16, "aabb"), 4.0);
}

TEST(SumTest, GradientsThatComeInTheWrongOrderGetMoreRoomInsteadOfADeadlock) {
  // The ring has room for two of six units, and the first that is exchanged comes last.
  PlaneWorld world({.ranks = 2, .sizes = std::vector<uint64_t>(12, 128 * 1024)});
  world.Connect();
  const std::vector<uint32_t> units = world.Trainable();
  ASSERT_EQ(units.size(), 6u);
  for (uint64_t attempt = 1; attempt < 4; ++attempt) {
    world.RunAll([&](uint32_t rank) -> absl::Status {
      world.plane(rank).Begin(attempt);
      for (const uint32_t unit : units) {
        ZS_RETURN_IF_ERROR(
            world.Send(rank, unit, 0, MakeGradient(world, unit, rank, false, false)));
      }
      ZS_RETURN_IF_ERROR(world.plane(rank).EndMicroStep(0));
      ZS_RETURN_IF_ERROR(world.plane(rank).Boundary());
      return world.AwaitSummed(rank, attempt);
    });
  }
  const DataPlaneStats stats = world.plane(0).stats();
  EXPECT_EQ(stats.overflows, 2u);  // in the first step only
  EXPECT_GE(stats.slot_bytes, world.layout().window_bytes());
}

// --- Calls that are wrong ------------------------------------------------------------------------

TEST(MisuseTest, IsRefusedAndChangesNothing) {
  PlaneWorld world({.ranks = 1, .config = {.stage = 3}, .frozen = {5}});
  world.Connect();
  DataPlane& plane = world.plane(0);
  plane.Begin(1);
  const StreamHandle stream = world.rank(0).stream->handle();
  const uint32_t none = 99;
  EXPECT_TRUE(absl::IsInvalidArgument(plane.Gather({&none, 1})));
  const uint32_t unit = 0;
  EXPECT_TRUE(absl::IsFailedPrecondition(plane.WaitOn(unit, stream)));
  EXPECT_TRUE(absl::IsFailedPrecondition(plane.WaitOnHost(unit)));
  EXPECT_TRUE(absl::IsFailedPrecondition(plane.Release({&unit, 1}, stream)));
  const uint64_t bytes = world.layout().units()[unit].bytes();
  const DeviceSlot slot = *plane.AcquireSlot(bytes);
  const uint32_t frozen = world.layout().place(5).unit;
  EXPECT_TRUE(absl::IsInvalidArgument(plane.Scatter({.unit = none, .slot = slot.offset})));
  EXPECT_TRUE(absl::IsInvalidArgument(plane.Scatter({.unit = frozen, .slot = slot.offset})));
  EXPECT_TRUE(absl::IsInvalidArgument(plane.Scatter({.unit = unit, .slot = slot.offset + 512})));
  EXPECT_TRUE(absl::IsInvalidArgument(
      plane.Scatter({.unit = unit, .slot = slot.offset, .present = "long"})));
  EXPECT_TRUE(absl::IsFailedPrecondition(
      plane.Scatter({.unit = unit, .micro_step = 1, .slot = slot.offset})));
  EXPECT_TRUE(absl::IsFailedPrecondition(plane.EndMicroStep(1)));
  EXPECT_TRUE(absl::IsFailedPrecondition(plane.Boundary()));
  EXPECT_TRUE(absl::IsInvalidArgument(plane.AbandonSlot(slot.offset + 512)));
  // And the right ones still work.
  EXPECT_TRUE(plane.Scatter({.unit = unit, .slot = slot.offset, .stream = stream}).ok());
  const DeviceSlot again = *plane.AcquireSlot(bytes);
  EXPECT_TRUE(absl::IsFailedPrecondition(plane.Scatter({.unit = unit, .slot = again.offset})));
  EXPECT_TRUE(plane.AbandonSlot(again.offset).ok());
  EXPECT_TRUE(plane.EndMicroStep(0).ok());
  EXPECT_TRUE(plane.Boundary().ok());
  EXPECT_TRUE(world.AwaitSummed(0, 1).ok());
}

TEST(MisuseTest, ForwardOnlyJobsHaveNoGradients) {
  PlaneWorld world({.ranks = 2, .config = {.stage = 3, .forward_only = true}});
  world.Connect();
  EXPECT_TRUE(absl::IsFailedPrecondition(world.plane(0).AcquireSlot(512).status()));
  EXPECT_TRUE(absl::IsFailedPrecondition(world.plane(0).Boundary()));
  EXPECT_EQ(world.plane(0).stats().slot_bytes, 0u);
}

}  // namespace
}  // namespace zeroshard
