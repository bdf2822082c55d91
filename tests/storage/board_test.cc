#include "storage/board.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

namespace zeroshard {
namespace {

constexpr BoardShape kShape{.workers = 3, .ranks = 2, .units = 70, .parameters = 5};

struct Memory {
  explicit Memory(uint64_t bytes) : lines(bytes / 64) {}
  struct alignas(64) Line {
    std::byte bytes[64];
  };
  std::span<std::byte> span() { return {lines[0].bytes, lines.size() * 64}; }
  std::vector<Line> lines;
};

TEST(BoardTest, EveryEntryHasAPlaceOfItsOwn) {
  Memory memory(Board::Bytes(kShape));
  auto board = Board::Format(memory.span(), kShape, 7, 8, 2.0, 3);
  ASSERT_TRUE(board.ok());
  // Writes every entry, then reads all of them back: an overlap would show.
  uint64_t next = 1;
  auto visit = [&](auto&& entry) {
    for (uint32_t w = 0; w < kShape.workers; ++w) {
      entry(board->worker(w).ready);
      for (uint32_t r = 0; r < kShape.ranks; ++r) entry(board->put_done(w, r));
      for (uint32_t u = 0; u < kShape.units; ++u) {
        entry(board->merged(w, u).tag);
        entry(board->fill(w, u));
      }
      for (auto& word : board->dirty(w)) entry(word);
    }
    for (uint32_t r = 0; r < kShape.ranks; ++r) {
      entry(board->rank(r).arrival);
      for (auto& order : board->rank(r).order) entry(order);
      for (uint32_t u = 0; u < kShape.units; ++u) {
        entry(board->contribution(u, r).tag);
        entry(board->local(r, u).tag);
        entry(board->pins(r, u));
      }
    }
    for (uint32_t u = 0; u < kShape.units; ++u) {
      entry(board->wanted(u));
      entry(board->common_count(u));
    }
    for (uint32_t p = 0; p < kShape.parameters; ++p) entry(board->update_count(p));
  };
  visit([&](std::atomic<uint64_t>& word) { word.store(next++); });
  const uint64_t written = next;
  next = 1;
  visit([&](std::atomic<uint64_t>& word) { ASSERT_EQ(word.load(), next++); });
  EXPECT_EQ(next, written);
  EXPECT_EQ(board->attempt(), 1u) << "and the header is not hit";
  EXPECT_EQ(board->numbers().loss_scale, 2.0);
}

TEST(BoardTest, ABoardOfAnotherJobIsNotAdopted) {
  Memory memory(Board::Bytes(kShape));
  ASSERT_TRUE(Board::Format(memory.span(), kShape, 7, 8, 1.0, 1).ok());
  EXPECT_TRUE(Board::Adopt(memory.span(), kShape, 7, 8).ok());
  EXPECT_TRUE(absl::IsDataLoss(Board::Adopt(memory.span(), kShape, 9, 8).status()));
  EXPECT_TRUE(absl::IsDataLoss(Board::Adopt(memory.span(), kShape, 7, 9).status()));
  BoardShape other = kShape;
  other.ranks = 1;
  EXPECT_TRUE(absl::IsDataLoss(Board::Adopt(memory.span(), other, 7, 8).status()));
  EXPECT_TRUE(
      absl::IsInvalidArgument(Board::Adopt(memory.span().first(4096), kShape, 7, 8).status()));
}

TEST(BoardTest, TagsOrderMicroStepsAcrossAttempts) {
  EXPECT_LT(MakeTag(1, kMaxMicroSteps), MakeTag(2, 0));
  EXPECT_EQ(AttemptOf(MakeTag(9, 5)), 9u);
  EXPECT_EQ(MicroStepOf(MakeTag(9, 5)), 5u);
  EXPECT_EQ(MakeTag(9, 5) + 1, MakeTag(9, 6));
}

std::span<const std::byte> Bytes(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}
std::string Text(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST(UserStatesTest, WhatIsNotCommittedNeverReplacesWhatIs) {
  Memory memory(UserStates::Bytes(2, 100));
  const UserStates states(memory.span(), 2, 100);
  EXPECT_TRUE(states.Read(0, 0).empty());
  ASSERT_TRUE(states.Write(0, 1, 0, Bytes("one")).ok());
  EXPECT_EQ(Text(states.Read(0, 1)), "one");
  // Attempts 2 and 3 are dropped; 4 commits.
  for (uint64_t attempt : {2, 3}) {
    ASSERT_TRUE(states.Write(0, attempt, 1, Bytes("dropped")).ok());
    EXPECT_EQ(Text(states.Read(0, 1)), "one");
  }
  ASSERT_TRUE(states.Write(0, 4, 1, Bytes("four")).ok());
  EXPECT_EQ(Text(states.Read(0, 1)), "one");
  EXPECT_EQ(Text(states.Read(0, 4)), "four");
  EXPECT_TRUE(states.Read(1, 4).empty()) << "the other rank wrote nothing";
}

TEST(UserStatesTest, TooManyBytesAreRefused) {
  Memory memory(UserStates::Bytes(1, 10));
  const UserStates states(memory.span(), 1, 10);
  const absl::Status status = states.Write(0, 1, 0, Bytes("0123456789a"));
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_NE(std::string(status.message()).find("user_state_bytes"), std::string::npos);
}

}  // namespace
}  // namespace zeroshard
