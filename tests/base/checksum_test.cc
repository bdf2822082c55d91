#include "base/checksum.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "base/random_token.h"

namespace zeroshard {
namespace {

TEST(ChecksumTest, KnownValues) {
  // From the reference implementation of XXH3 (xxhsum -H3).
  EXPECT_EQ(Xxh3_64(""), 0x2D06800538D394C2ULL);
  EXPECT_EQ(Xxh3_64("a"), 0xE6C632B61E964E1FULL);
}

TEST(ChecksumTest, EveryBitMatters) {
  std::string text(1000, 'x');
  const uint64_t before = Xxh3_64(text);
  text[500] ^= 1;
  EXPECT_NE(Xxh3_64(text), before);
  EXPECT_NE(Xxh3_64(text, 1), Xxh3_64(text, 2));
}

TEST(ChecksumTest, StreamEqualsOneShot) {
  std::string text;
  for (int i = 0; i < 5000; ++i) text += static_cast<char>(i * 31);
  for (const size_t piece : {1ul, 7ul, 256ul, 5000ul}) {
    Xxh3Stream stream(9);
    for (size_t at = 0; at < text.size(); at += piece) {
      stream.Update(std::string_view(text).substr(at, piece));
    }
    Xxh3Stream moved = std::move(stream);
    EXPECT_EQ(moved.Digest(), Xxh3_64(text, 9));
  }
}

TEST(RandomTokenTest, TokensAreLongAndDifferent) {
  const std::string token = RandomToken();
  EXPECT_EQ(token.size(), 64u);
  EXPECT_EQ(token.find_first_not_of("0123456789abcdef"), std::string::npos);
  EXPECT_NE(token, RandomToken());
  EXPECT_NE(RandomId(), RandomId());
}

TEST(RandomTokenTest, ConstantTimeEqualsCompares) {
  EXPECT_TRUE(ConstantTimeEquals("abc", "abc"));
  EXPECT_FALSE(ConstantTimeEquals("abc", "abd"));
  EXPECT_FALSE(ConstantTimeEquals("abc", "ab"));
  EXPECT_TRUE(ConstantTimeEquals("", ""));
}

}  // namespace
}  // namespace zeroshard
