// 8-bit states against their published definition.
#include "worker/optim/state_codes.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "tests/worker/optim/update_reference.h"
#include "worker/optim/code_book.h"

namespace zeroshard {
namespace {

const StateMap kMaps[] = {StateMap::kSigned, StateMap::kUnsigned};

const float* Book(StateMap map) {
  return map == StateMap::kSigned ? kSignedBook.value : kUnsignedBook.value;
}

// The publication's program computes in fp32; ours is rounded once, so they differ by an ulp or
// two.
TEST(CodeBookTest, IsThePublishedOne) {
  for (StateMap map : kMaps) {
    const auto published = PublishedBook(map);
    for (int code = 0; code < 256; ++code) {
      EXPECT_FLOAT_EQ(Book(map)[code], published[code]) << code;
    }
    for (int code = 1; code < 256; ++code) EXPECT_LT(Book(map)[code - 1], Book(map)[code]);
  }
}

// Numbers worked out by hand from the definition.
TEST(CodeBookTest, HasTheNumbersOfTheDefinition) {
  EXPECT_EQ(kSignedBook.value[127], 0.0f);
  EXPECT_EQ(kSignedBook.value[128], 5.5e-7f);      // the only one of the lowest decade
  EXPECT_EQ(kSignedBook.value[129], 3.25e-6f);     // two parts: 0.325, 0.775
  EXPECT_EQ(kSignedBook.value[130], 7.75e-6f);     //
  EXPECT_EQ(kSignedBook.value[131], 2.125e-5f);    // four: 0.2125, 0.4375, 0.6625, 0.8875
  EXPECT_EQ(kSignedBook.value[191], 0.10703125f);  // 64: 0.1 + 0.9 / 128
  EXPECT_EQ(kSignedBook.value[254], 0.99296875f);  // 1 - 0.9 / 128
  EXPECT_EQ(kSignedBook.value[255], 1.0f);
  EXPECT_EQ(kSignedBook.value[0], -0.99296875f);
  EXPECT_EQ(kSignedBook.value[126], -5.5e-7f);
  EXPECT_EQ(kUnsignedBook.value[0], 0.0f);
  EXPECT_EQ(kUnsignedBook.value[1], 3.25e-7f);
  EXPECT_EQ(kUnsignedBook.value[2], 7.75e-7f);
  EXPECT_EQ(kUnsignedBook.value[254], 0.996484375f);  // 1 - 0.9 / 256
  EXPECT_EQ(kUnsignedBook.value[255], 1.0f);
}

// Every code decodes to its number and is encoded back, at any scale.
TEST(StateCodesTest, CodesComeBack) {
  for (StateMap map : kMaps) {
    for (float scale : {1.0f, 0.37f, 1e-30f, 3e38f}) {
      std::vector<uint8_t> codes(256), again(256);
      for (int code = 0; code < 256; ++code) codes[code] = static_cast<uint8_t>(code);
      std::vector<float> values(256);
      DecodeStates(map, codes.data(), 256, scale, values.data());
      for (int code = 0; code < 256; ++code) EXPECT_EQ(values[code], Book(map)[code] * scale);
      EXPECT_EQ(EncodeStates(map, values.data(), 256, again.data()), scale);
      EXPECT_EQ(codes, again);
    }
  }
}

// On both sides of every border between two codes, and on it.
TEST(StateCodesTest, TheNearestCodeOnBothSidesOfEveryBorder) {
  for (StateMap map : kMaps) {
    for (int code = 0; code + 1 < 256; ++code) {
      const float middle =
          static_cast<float>((double{Book(map)[code]} + double{Book(map)[code + 1]}) / 2);
      for (float x : {std::nextafter(middle, -2.0f), middle, std::nextafter(middle, 2.0f)}) {
        const float block[] = {1.0f, x};
        uint8_t codes[2];
        EXPECT_EQ(EncodeStates(map, block, 2, codes), 1.0f);
        EXPECT_EQ(codes[0], 255);
        EXPECT_EQ(codes[1], ReferenceCode(map, x, 1.0f)) << "at " << x;
      }
    }
  }
}

TEST(StateCodesTest, RandomBlocksOfAnyValues) {
  std::mt19937_64 random(1);
  for (StateMap map : kMaps) {
    for (int round = 0; round < 200; ++round) {
      const size_t n = 1 + random() % 256;
      const float spread = std::pow(10.0f, static_cast<float>(random() % 60) - 40);
      const auto values =
          RandomFloats(random, n, round % 2 == 0 ? Values::kOrdinary : Values::kAny, spread);
      std::vector<uint8_t> codes(n);
      const float scale = EncodeStates(map, values.data(), n, codes.data());
      for (size_t i = 0; i < n; ++i) {
        ASSERT_EQ(codes[i], ReferenceCode(map, values[i], scale)) << values[i] << " of " << scale;
        ASSERT_TRUE(!std::isfinite(values[i]) || std::fabs(values[i]) <= scale);
      }
    }
  }
}

TEST(StateCodesTest, FreshMemoryIsZero) {
  const std::vector<uint8_t> codes(256, 0);
  for (StateMap map : kMaps) {
    std::vector<float> values(256, 1.0f);
    DecodeStates(map, codes.data(), 256, 0.0f, values.data());
    for (float value : values) EXPECT_EQ(std::bit_cast<uint32_t>(value), 0u);
  }
}

TEST(StateCodesTest, ValuesThatAreNoNumbersDisturbNobody) {
  const float inf = INFINITY;
  const float values[] = {0.5f, -0.25f, inf, -inf, NAN, 0.125f};
  uint8_t codes[6];
  float decoded[6];
  EXPECT_EQ(EncodeStates(StateMap::kSigned, values, 6, codes), 0.5f);
  DecodeStates(StateMap::kSigned, codes, 6, 0.5f, decoded);
  EXPECT_EQ(decoded[0], 0.5f);
  EXPECT_EQ(codes[1], ReferenceCode(StateMap::kSigned, -0.25f, 0.5f));
  EXPECT_EQ(decoded[2], 0.5f);
  EXPECT_EQ(decoded[3], 0.5f * -0.99296875f);
  EXPECT_EQ(decoded[4], 0.0f);
  EXPECT_EQ(codes[5], ReferenceCode(StateMap::kSigned, 0.125f, 0.5f));
  const float none[] = {NAN, inf, 0.0f};
  EXPECT_EQ(EncodeStates(StateMap::kUnsigned, none, 3, codes), 0.0f);
}

// A second moment of 0 beside a first one that is not would divide by eps alone.
TEST(StateCodesTest, SecondMomentsAboveZeroStayAboveZero) {
  const float values[] = {1.0f, 1e-30f, 0.0f, 1e-45f};
  uint8_t codes[4];
  EncodeStates(StateMap::kUnsigned, values, 4, codes);
  EXPECT_EQ(codes[1], 1);
  EXPECT_EQ(codes[2], 0);
  EXPECT_EQ(codes[3], 1);
}

// What the publication promises: a relative error that shrinks with the magnitude's share.
TEST(StateCodesTest, ErrorsAreThoseOfTheCodeBook) {
  std::mt19937_64 random(2);
  std::vector<float> values = RandomFloats(random, 256, Values::kOrdinary);
  std::vector<uint8_t> codes(256);
  std::vector<float> decoded(256);
  for (int block = 0; block < 100; ++block) {
    values = RandomFloats(random, 256, Values::kOrdinary);
    const float scale = EncodeStates(StateMap::kSigned, values.data(), 256, codes.data());
    DecodeStates(StateMap::kSigned, codes.data(), 256, scale, decoded.data());
    for (size_t i = 0; i < 256; ++i) {
      // Half a part of the top decade is 0.9 / 128, of the next 0.09 / 64.
      const float share = std::fabs(values[i]) / scale;
      const float step = share >= 0.1f ? 0.9f / 128 : 0.09f / 64;
      EXPECT_LE(std::fabs(values[i] - decoded[i]), step * scale * 1.001f);
    }
  }
}

}  // namespace
}  // namespace zeroshard
