#include "base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

namespace zeroshard {
namespace {

using ::testing::MatchesRegex;

TEST(LogTest, OneLineOfPairsPerEvent) {
  ::testing::internal::CaptureStderr();
  SetLogProcess("zeroshardd%n");
  LogInfo("job \"gpt\"\nis running");
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_THAT(text, MatchesRegex("ts=[0-9T:.-]+Z level=info process=zeroshardd%n pid=[0-9]+ "
                                 "msg=\"job ..gpt...nis running\"\n"));
  EXPECT_NE(text.find("\\\"gpt\\\"\\nis"), std::string::npos);
}

TEST(LogTest, LevelsBelowTheLimitAreDropped) {
  ::testing::internal::CaptureStderr();
  SetLogLevel(LogLevel::kWarn);
  LogDebug("one");
  LogInfo("two");
  LogWarn("three");
  LogError("four");
  SetLogLevel(LogLevel::kOff);
  LogError("five");
  SetLogLevel(LogLevel::kInfo);
  const std::string text = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2);
  EXPECT_NE(text.find("three"), std::string::npos);
  EXPECT_NE(text.find("level=error"), std::string::npos);
}

TEST(LogTest, ParsesLevelNames) {
  EXPECT_EQ(ParseLogLevel("debug").value(), LogLevel::kDebug);
  EXPECT_EQ(ParseLogLevel("off").value(), LogLevel::kOff);
  EXPECT_EQ(ParseLogLevel("loud").status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(LogTest, EscapesControlCharacters) {
  EXPECT_EQ(QuoteForLog("a\tb\x01\\"), "\"a\\tb\\x01\\\\\"");
}

}  // namespace
}  // namespace zeroshard
