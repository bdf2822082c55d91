#include "client/slot_ring.h"

#include <map>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace zeroshard {
namespace {

TEST(SlotRingTest, HandsOutAlignedSlotsInOrder) {
  SlotRing ring(1000);
  EXPECT_EQ(ring.capacity(), 960u);
  EXPECT_EQ(ring.Acquire(1), 0u);
  EXPECT_EQ(ring.Acquire(65), 64u);
  EXPECT_EQ(ring.Acquire(0), 192u);
  EXPECT_EQ(ring.Acquire(704), 256u);
  EXPECT_EQ(ring.Acquire(1), std::nullopt);
  EXPECT_EQ(ring.size(), 4u);
  EXPECT_EQ(ring.unbound(), 4u);
}

TEST(SlotRingTest, ASlotLongerThanTheWindowIsNeverHandedOut) {
  SlotRing ring(256);
  EXPECT_EQ(ring.Acquire(257), std::nullopt);
  EXPECT_EQ(ring.Acquire(256), 0u);
}

TEST(SlotRingTest, AWindowOfNothingHasNoSlot) {
  SlotRing ring(63);
  EXPECT_EQ(ring.Acquire(1), std::nullopt);
  EXPECT_EQ(ring.Acquire(0), std::nullopt);
}

TEST(SlotRingTest, ASlotBelongsToTheFirstRequestThatNamesIt) {
  SlotRing ring(256);
  ASSERT_EQ(ring.Acquire(128), 0u);
  EXPECT_TRUE(absl::IsInvalidArgument(ring.Bind(64, 1, 1)));
  EXPECT_TRUE(absl::IsInvalidArgument(ring.Bind(0, 129, 1)));
  EXPECT_TRUE(ring.Bind(0, 128, 1).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(ring.Bind(0, 128, 2)));
  EXPECT_TRUE(absl::IsInvalidArgument(ring.Abandon(0)));
}

TEST(SlotRingTest, AnAbandonedSlotIsFreeAtOnce) {
  SlotRing ring(128);
  ASSERT_EQ(ring.Acquire(128), 0u);
  EXPECT_EQ(ring.Acquire(64), std::nullopt);
  EXPECT_TRUE(ring.Abandon(0).ok());
  EXPECT_EQ(ring.Acquire(64), 0u);
}

TEST(SlotRingTest, ReclaimFreesCompleteSlotsButNotUnboundOnes) {
  SlotRing ring(192);
  ASSERT_EQ(ring.Acquire(64), 0u);
  ASSERT_EQ(ring.Acquire(64), 64u);
  ASSERT_EQ(ring.Acquire(64), 128u);
  ASSERT_TRUE(ring.Bind(0, 64, 7).ok());
  ASSERT_TRUE(ring.Bind(128, 64, 8).ok());
  ring.Reclaim([](uint64_t) { return true; });
  EXPECT_EQ(ring.Acquire(64), 0u);
  EXPECT_EQ(ring.Acquire(64), std::nullopt);  // the slot at 64 is still in use
  ASSERT_TRUE(ring.Bind(64, 64, 9).ok());
  ring.Reclaim([](uint64_t id) { return id == 9; });
  EXPECT_EQ(ring.Acquire(128), 64u);
}

// Against a plain map of what is in use: slots never overlap, always lie inside, and the ring
// refuses only when the range behind its head really is short.
TEST(SlotRingTest, RandomOperationsNeverOverlap) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    const uint64_t capacity = 64 * (1 + random() % 40);
    SlotRing ring(capacity);
    std::map<uint64_t, uint64_t> used;            // begin -> end
    std::map<uint64_t, uint64_t> unbound, bound;  // begin -> bytes; id -> begin
    std::set<uint64_t> complete;
    uint64_t next_id = 1;
    for (int i = 0; i < 2000; ++i) {
      const uint32_t what = random() % 4;
      if (what <= 1) {
        const uint64_t bytes = random() % (capacity / 2 + 2);
        const auto offset = ring.Acquire(bytes);
        if (!offset) {
          ASSERT_FALSE(used.empty() && bytes <= capacity) << "an empty ring refused " << bytes;
          continue;
        }
        const uint64_t end = *offset + std::max<uint64_t>(bytes, 1);
        ASSERT_EQ(*offset % kSlotAlignment, 0u);
        ASSERT_LE(end, capacity);
        for (const auto& [begin, other_end] : used) {
          ASSERT_TRUE(end <= begin || other_end <= *offset) << "overlap, seed " << seed;
        }
        used[*offset] = end;
        unbound[*offset] = bytes;
      } else if (what == 2 && !unbound.empty()) {
        const auto [offset, bytes] = *std::next(unbound.begin(), random() % unbound.size());
        unbound.erase(offset);
        if (random() % 8 == 0) {
          ASSERT_TRUE(ring.Abandon(offset).ok());
          used.erase(offset);
        } else {
          ASSERT_TRUE(ring.Bind(offset, bytes, next_id).ok());
          bound[next_id++] = offset;
        }
      } else if (!bound.empty()) {
        const auto [id, offset] = *std::next(bound.begin(), random() % bound.size());
        bound.erase(id);
        complete.insert(id);
        used.erase(offset);
        ring.Reclaim([&](uint64_t one) { return complete.contains(one); });
      }
    }
    while (!unbound.empty()) {
      ASSERT_TRUE(ring.Abandon(unbound.begin()->first).ok());
      unbound.erase(unbound.begin());
    }
    ring.Reclaim([](uint64_t) { return true; });
    EXPECT_EQ(ring.size(), 0u);
    EXPECT_EQ(ring.Acquire(capacity), 0u);
  }
}

}  // namespace
}  // namespace zeroshard
