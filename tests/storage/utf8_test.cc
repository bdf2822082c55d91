#include "storage/utf8.h"

#include <string>

#include "gtest/gtest.h"

namespace zeroshard {
namespace {

TEST(Utf8Test, AcceptsWellFormedText) {
  EXPECT_TRUE(IsUtf8(""));
  EXPECT_TRUE(IsUtf8("decoder.layers.0.weight"));
  EXPECT_TRUE(IsUtf8("gewicht_\xC3\xBC \xE2\x82\xAC \xF0\x9F\x8E\x89"));
  EXPECT_TRUE(IsUtf8("\xF4\x8F\xBF\xBF"));  // U+10FFFF
  EXPECT_TRUE(IsUtf8("\xED\x9F\xBF"));      // U+D7FF, the last before the surrogates
}

TEST(Utf8Test, RefusesMalformedText) {
  EXPECT_FALSE(IsUtf8("\x80"));              // continuation alone
  EXPECT_FALSE(IsUtf8("a\xC3"));             // cut
  EXPECT_FALSE(IsUtf8("\xC0\xAF"));          // overlong '/'
  EXPECT_FALSE(IsUtf8("\xE0\x80\xAF"));      // overlong
  EXPECT_FALSE(IsUtf8("\xF0\x80\x80\xAF"));  // overlong
  EXPECT_FALSE(IsUtf8("\xED\xA0\x80"));      // surrogate
  EXPECT_FALSE(IsUtf8("\xF4\x90\x80\x80"));  // above U+10FFFF
  EXPECT_FALSE(IsUtf8("\xFF"));
  EXPECT_FALSE(IsUtf8("\xE2\x28\xA1"));
}

}  // namespace
}  // namespace zeroshard
