#include "storage/slot_table.h"

#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

constexpr SlotTableShape kShape{
    .chunks = 2, .slots = 6, .job_id = 1, .layout_fingerprint = 2, .plan_fingerprint = 3};

struct Memory {
  struct alignas(64) Line {
    std::byte bytes[64] = {};
  };
  std::span<std::byte> span() { return {lines[0].bytes, lines.size() * 64}; }
  std::vector<Line> lines = std::vector<Line>(16);
};

SlotTable Format(Memory& memory, uint64_t committed = 0) {
  auto table = SlotTable::Format(memory.span(), kShape, 1, committed);
  EXPECT_TRUE(table.ok()) << table.status();
  return *std::move(table);
}

SlotTable Adopt(Memory& memory) {
  auto table = SlotTable::Adopt(memory.span(), kShape);
  EXPECT_TRUE(table.ok()) << table.status();
  return *std::move(table);
}

uint32_t Reserve(SlotTable& table, uint32_t chunk) {
  auto slot = table.Reserve(chunk);
  EXPECT_TRUE(slot.ok()) << slot.status();
  return *slot;
}

SlotImage Write(SlotTable& table, uint32_t chunk, uint64_t attempt) {
  const SlotImage image{Reserve(table, chunk), table.generation(), attempt, attempt, 7 * attempt};
  EXPECT_TRUE(table.Complete(chunk, image).ok());
  return image;
}

void RunStep(SlotTable& table, uint64_t attempt) {
  ASSERT_TRUE(table.Begin(attempt).ok());
  for (uint32_t chunk : {0, 1}) Write(table, chunk, attempt);
  ASSERT_TRUE(table.Commit(attempt).ok());
}

TEST(SlotTableTest, ChunksAlternateBetweenTheirHomeSlots) {
  Memory memory;
  SlotTable table = Format(memory);
  EXPECT_FALSE(table.Current(0).has_value());
  std::set<uint32_t> used;
  for (uint64_t attempt = 1; attempt < 6; ++attempt) {
    const auto before = table.Current(1);
    RunStep(table, attempt);
    const auto after = table.Current(1);
    ASSERT_TRUE(after.has_value());
    EXPECT_EQ(*after, (SlotImage{after->slot, 1, attempt, attempt, 7 * attempt}));
    EXPECT_TRUE(!before.has_value() || before->slot != after->slot);
    used.insert(after->slot);
  }
  EXPECT_EQ(used, (std::set<uint32_t>{2, 3}));
  EXPECT_EQ(table.free_spares(), 2u);
  EXPECT_EQ(table.committed(), 5u);
}

TEST(SlotTableTest, WhatIsPreparedIsCurrentWithTheCommit) {
  Memory memory;
  SlotTable table = Format(memory);
  RunStep(table, 1);
  const SlotImage old = *table.Current(0);
  ASSERT_TRUE(table.Begin(2).ok());
  EXPECT_FALSE(table.Prepared(0).has_value());
  const SlotImage image = Write(table, 0, 2);
  EXPECT_EQ(table.Current(0), old);
  EXPECT_EQ(table.Prepared(0), image);
  EXPECT_EQ(table.Reserve(0).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(table.Commit(2).ok());
  EXPECT_EQ(table.Current(0), image);
  EXPECT_EQ(table.Current(1)->attempt, 1u) << "a chunk that was not written keeps its image";
}

TEST(SlotTableTest, ADroppedAttemptLeavesNothing) {
  Memory memory;
  SlotTable table = Format(memory);
  RunStep(table, 1);
  const SlotImage old = *table.Current(0);
  ASSERT_TRUE(table.Begin(2).ok());
  const SlotImage dropped = Write(table, 0, 2);
  ASSERT_TRUE(table.Begin(3).ok());
  EXPECT_FALSE(table.Prepared(0).has_value());
  EXPECT_EQ(Write(table, 0, 3).slot, dropped.slot);
  ASSERT_TRUE(table.Begin(4).ok());
  ASSERT_TRUE(table.Commit(4).ok());
  EXPECT_EQ(table.Current(0), old);
}

// The same when nobody began another attempt before the commit: a successor that only catches up.
TEST(SlotTableTest, ACommitTakesNothingOfEarlierAttempts) {
  Memory memory;
  SlotTable table = Format(memory);
  RunStep(table, 1);
  ASSERT_TRUE(table.Begin(2).ok());
  Write(table, 0, 2);
  SlotTable successor = Adopt(memory);
  ASSERT_TRUE(successor.Commit(3).ok());
  EXPECT_EQ(successor.Current(0)->attempt, 1u);
}

TEST(SlotTableTest, AWriteThatEndsTooLateOnlyFreesItsSlot) {
  Memory memory;
  SlotTable table = Format(memory);
  RunStep(table, 1);
  ASSERT_TRUE(table.Begin(2).ok());
  const uint32_t slot = Reserve(table, 0);
  ASSERT_TRUE(table.Begin(3).ok());
  const uint32_t other = Reserve(table, 0);
  EXPECT_NE(other, slot) << "the dropped write is still in flight";
  EXPECT_EQ(table.Complete(0, {slot, 1, 2, 2, 2}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(table.Prepared(0).has_value());
  ASSERT_TRUE(table.Complete(0, {other, 1, 3, 2, 2}).ok());
  ASSERT_TRUE(table.Commit(3).ok());
  EXPECT_EQ(table.Current(0)->slot, other);
  ASSERT_TRUE(table.Begin(4).ok());
  EXPECT_NE(Reserve(table, 0), other);
}

TEST(SlotTableTest, AFailedWriteIsTriedElsewhereOrAgain) {
  Memory memory;
  SlotTable table = Format(memory);
  RunStep(table, 1);
  ASSERT_TRUE(table.Begin(2).ok());
  const uint32_t first = Reserve(table, 0);
  const uint32_t second = Reserve(table, 0);
  EXPECT_NE(first, second);
  table.Release(first);
  EXPECT_EQ(Reserve(table, 0), first);
}

TEST(SlotTableTest, WithTheCommittedAttemptImagesAreCurrentAtOnce) {
  Memory memory;
  SlotTable table = Format(memory, 5);
  ASSERT_TRUE(table.Begin(5).ok());
  for (int i = 0; i < 5; ++i) {
    const SlotImage image = Write(table, 1, 5);
    EXPECT_EQ(table.Current(1), image);
    EXPECT_FALSE(table.Prepared(1).has_value());
    Memory killed = memory;
    EXPECT_EQ(Adopt(killed).Current(1), image) << "also for a successor";
  }
  ASSERT_TRUE(table.Begin(6).ok());
  EXPECT_EQ(table.Current(1)->attempt, 5u);
}

TEST(SlotTableTest, WhatAPredecessorMayStillWriteIsLeftAlone) {
  Memory memory;
  SlotTable table = Format(memory);
  RunStep(table, 1);
  ASSERT_TRUE(table.Begin(2).ok());
  std::set<uint32_t> late = {Reserve(table, 0), Reserve(table, 1)};
  for (uint64_t generation = 2; generation < 3; ++generation) {
    SlotTable successor = Adopt(memory);
    EXPECT_EQ(successor.generation(), generation);
    EXPECT_EQ(successor.quarantined(), 2u);
    ASSERT_TRUE(successor.Begin(2).ok());
    for (uint32_t chunk : {0, 1}) {
      EXPECT_TRUE(late.insert(Reserve(successor, chunk)).second) << "a slot that is written to";
    }
  }
  SlotTable third = Adopt(memory);
  EXPECT_EQ(third.quarantined(), 4u);
  EXPECT_EQ(third.free_spares(), 0u);
  ASSERT_TRUE(third.Begin(2).ok());
  const auto none = third.Reserve(0);
  EXPECT_EQ(none.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(none.status().message()),
              HasSubstr("chunk 0 has no slot: 4 slots may still be written by a dead worker"));
  EXPECT_EQ(third.ReleaseDrained(), 4u);
  EXPECT_EQ(third.quarantined(), 0u);
  RunStep(third, 3);
  EXPECT_EQ(third.Current(0)->attempt, 3u);
}

TEST(SlotTableTest, DrainingDoesNotReleaseWhatThisProcessWrites) {
  Memory memory;
  SlotTable table = Format(memory);
  RunStep(table, 1);
  ASSERT_TRUE(table.Begin(2).ok());
  const uint32_t slot = Reserve(table, 0);
  EXPECT_EQ(table.ReleaseDrained(), 0u);
  EXPECT_NE(Reserve(table, 0), slot);
}

TEST(SlotTableTest, SparesComeBack) {
  Memory memory;
  SlotTable table = Format(memory);
  RunStep(table, 1);
  ASSERT_TRUE(table.Begin(2).ok());
  Reserve(table, 0);
  SlotTable successor = Adopt(memory);
  RunStep(successor, 2);
  EXPECT_GE(successor.Current(0)->slot, 4u);
  EXPECT_EQ(successor.free_spares(), 1u);
  successor.ReleaseDrained();
  for (uint64_t attempt = 3; attempt < 6; ++attempt) RunStep(successor, attempt);
  EXPECT_LT(successor.Current(0)->slot, 2u);
  EXPECT_EQ(successor.free_spares(), 2u);
}

TEST(SlotTableTest, ATableOfAnotherShapeIsNotAdopted) {
  Memory memory;
  SlotTable first = Format(memory);
  RunStep(first, 1);
  const auto message = [&](auto change) {
    SlotTableShape shape = kShape;
    change(shape);
    auto table = SlotTable::Adopt(memory.span(), shape);
    EXPECT_EQ(table.status().code(), absl::StatusCode::kDataLoss) << table.status();
    return std::string(table.status().message());
  };
  EXPECT_THAT(message([](auto& s) { s.job_id = 9; }), HasSubstr("job id is 1, expected 9"));
  EXPECT_THAT(message([](auto& s) { s.layout_fingerprint = 9; }), HasSubstr("layout fingerprint"));
  EXPECT_THAT(message([](auto& s) { s.plan_fingerprint = 9; }), HasSubstr("plan fingerprint"));
  EXPECT_THAT(message([](auto& s) { s.slots = 5; }), HasSubstr("slots is 6, expected 5"));
  EXPECT_THAT(message([](auto& s) { s.chunks = 1; }), HasSubstr("chunks is 2, expected 1"));
  for (size_t offset : {48, 56}) {  // generation, committed tag
    const uint64_t was = *reinterpret_cast<uint64_t*>(&memory.span()[offset]);
    for (uint64_t bad : {uint64_t{0}, ~uint64_t{0}}) {
      *reinterpret_cast<uint64_t*>(&memory.span()[offset]) = bad;
      EXPECT_THAT(message([](auto&) {}), HasSubstr(offset == 48 ? "generation" : "committed tag"));
    }
    *reinterpret_cast<uint64_t*>(&memory.span()[offset]) = was;
  }
  memory.span()[0] ^= std::byte{1};
  EXPECT_THAT(message([](auto&) {}), HasSubstr("magic"));
}

TEST(SlotTableTest, EntriesThatContradictThemselvesAreFound) {
  for (uint32_t bad : {2u /* home of chunk 1 */, 6u /* no slot */}) {
    Memory memory;
    SlotTable table = Format(memory);
    RunStep(table, 1);
    RunStep(table, 2);
    std::memcpy(memory.span().data() + 128 + 16, &bad, sizeof(bad));  // slot of the first entry
    auto adopted = SlotTable::Adopt(memory.span(), kShape);
    EXPECT_EQ(adopted.status().code(), absl::StatusCode::kDataLoss) << adopted.status();
  }
}

TEST(SlotTableTest, ATableIsFilledFromAManifest) {
  Memory memory;
  SlotTable table = Format(memory, 8);
  const SlotImage first{1, 3, 8, 7, 55};
  const SlotImage spare{4, 3, 6, 5, 66};
  ASSERT_TRUE(table.Restore(0, first).ok());
  ASSERT_TRUE(table.Restore(1, spare).ok());
  EXPECT_EQ(table.Current(0), first);
  EXPECT_EQ(table.Current(1), spare);
  EXPECT_EQ(table.free_spares(), 1u);
  EXPECT_FALSE(table.Restore(0, first).ok()) << "it has an image";
  RunStep(table, 9);
  EXPECT_EQ(table.Current(0)->slot, 0u);

  Memory other;
  SlotTable empty = Format(other, 8);
  EXPECT_FALSE(empty.Restore(0, {2, 3, 8, 7, 0}).ok()) << "the home slot of another chunk";
  EXPECT_FALSE(empty.Restore(0, {6, 3, 8, 7, 0}).ok()) << "no slot";
  EXPECT_FALSE(empty.Restore(0, {0, 3, 9, 7, 0}).ok()) << "not committed";
  EXPECT_FALSE(empty.Restore(2, {0, 3, 8, 7, 0}).ok()) << "no chunk";
}

TEST(SlotTableTest, AForgottenChunkHasNoImageAndFreesItsSlots) {
  Memory memory;
  SlotTable table = Format(memory);
  RunStep(table, 1);
  RunStep(table, 2);
  ASSERT_TRUE(table.Begin(3).ok());
  Write(table, 0, 3);
  table.Forget(0);
  EXPECT_FALSE(table.Current(0).has_value());
  EXPECT_FALSE(table.Prepared(0).has_value());
  EXPECT_EQ(table.Current(1)->attempt, 2u);
  table.Forget(0);
  ASSERT_TRUE(table.Commit(3).ok());
  EXPECT_FALSE(Adopt(memory).Current(0).has_value());
  ASSERT_TRUE(table.Begin(3).ok());
  const SlotImage back = Write(table, 0, 3);
  EXPECT_EQ(table.Current(0), back) << "it can come back";
  EXPECT_LT(back.slot, 2u);
}

// With an older entry beside the current one, and with one of the attempt in flight.
TEST(SlotTableTest, AKillInForgetLeavesTheCurrentImageOrNone) {
  for (const bool prepared : {false, true}) {
    Memory memory;
    SlotTable table = Format(memory);
    RunStep(table, 1);
    RunStep(table, 2);
    if (prepared) {
      ASSERT_TRUE(table.Begin(3).ok());
      Write(table, 0, 3);
    }
    const SlotImage current = *table.Current(0);
    std::vector<std::optional<SlotImage>> after;
    table.ObserveStores([&] {
      Memory killed = memory;
      SlotTable successor = Adopt(killed);
      after.push_back(successor.Current(0));
    });
    table.Forget(0);
    ASSERT_EQ(after.size(), 2u);
    EXPECT_EQ(after[0], current);
    EXPECT_FALSE(after[1].has_value());
  }
}

TEST(SlotTableTest, TheCallersMistakesAreRefused) {
  Memory memory;
  EXPECT_FALSE(SlotTable::Format(memory.span().first(440), kShape, 1, 0).ok());
  EXPECT_FALSE(SlotTable::Format(memory.span().subspan(8), kShape, 1, 0).ok());
  EXPECT_FALSE(SlotTable::Format(memory.span(), kShape, 0, 0).ok());
  SlotTableShape few = kShape;
  few.slots = 3;
  EXPECT_FALSE(SlotTable::Format(memory.span(), few, 1, 0).ok());
  SlotTable table = Format(memory, 3);
  EXPECT_EQ(table.Reserve(0).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(table.Begin(2).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(table.Commit(2).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(table.Commit(3).ok());
}

}  // namespace
}  // namespace zeroshard
