// The SMART log of an NVMe drive, byte by byte.
#include "storage/smart_log.h"

#include <gtest/gtest.h>

#include <array>
#include <initializer_list>
#include <limits>

namespace zeroshard {
namespace {

using Page = std::array<std::byte, kSmartLogBytes>;

void Put(Page& page, size_t at, std::initializer_list<int> bytes) {
  for (const int byte : bytes) page[at++] = static_cast<std::byte>(byte);
}

// A page as a drive in use sends it.
Page UsedDrive() {
  Page page = {};
  Put(page, 0, {0x04});                            // critical warning: reliability
  Put(page, 1, {0x3a, 0x01});                      // 314 K
  Put(page, 3, {100, 10, 3});                      // spare, its threshold, used
  Put(page, 32, {0x40, 0xe2, 0x01});               // 123,456 units read
  Put(page, 48, {0x15, 0xcd, 0x5b, 0x07});         // 123,456,789 units written
  Put(page, 64, {1});                              // commands: not of interest
  Put(page, 128, {0x10, 0x27});                    // 10,000 hours
  Put(page, 144, {17});                            // unsafe shutdowns
  Put(page, 160, {0xff, 0, 0, 0, 0, 0, 0, 0x01});  // media errors
  Put(page, 176, {9});                             // log entries: not of interest
  Put(page, 200, {0x3b, 0x01});                    // sensor 1
  return page;
}

TEST(SmartLogTest, EveryFieldIsReadFromItsPlace) {
  const auto log = ParseSmartLog(UsedDrive());
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_EQ(log->critical_warning, 4);
  EXPECT_EQ(log->temperature_celsius, 41);
  EXPECT_EQ(log->available_spare_percent, 100);
  EXPECT_EQ(log->spare_threshold_percent, 10);
  EXPECT_EQ(log->used_percent, 3);
  EXPECT_EQ(log->read_bytes, 63'209'472'000u);
  EXPECT_EQ(log->written_bytes, 63'209'875'968'000u);
  EXPECT_EQ(log->power_on_hours, 10'000u);
  EXPECT_EQ(log->unsafe_shutdowns, 17u);
  EXPECT_EQ(log->media_errors, 0x01000000000000ffu);
}

TEST(SmartLogTest, WhatDoesNotFitIsCutOff) {
  Page page = UsedDrive();
  Put(page, 48, {0, 0, 0, 0, 0, 0, 0, 1});  // 2^56 units
  Put(page, 160 + 15, {1});                 // 2^120 errors
  Put(page, 5, {255});
  const auto log = ParseSmartLog(page);
  ASSERT_TRUE(log.ok());
  EXPECT_EQ(log->written_bytes, std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(log->media_errors, std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(log->used_percent, 255);
}

TEST(SmartLogTest, ATemperatureOfZeroKelvinIsNone) {
  Page page = UsedDrive();
  Put(page, 1, {0, 0});
  EXPECT_EQ(ParseSmartLog(page)->temperature_celsius, std::nullopt);
  Put(page, 1, {0x0a, 0x01});
  EXPECT_EQ(ParseSmartLog(page)->temperature_celsius, -7);
}

TEST(SmartLogTest, ShortAndEmptyPagesAreRefused) {
  const Page page = UsedDrive();
  EXPECT_EQ(ParseSmartLog(std::span(page).first(511)).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ParseSmartLog({}).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ParseSmartLog(Page{}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(SmartLogTest, OtherBytesDoNotMatter) {
  const SmartLog golden = *ParseSmartLog(UsedDrive());
  for (size_t i = 0; i < kSmartLogBytes; ++i) {
    const bool read = i < 6 || (i >= 32 && i < 64) || (i >= 128 && i < 176);
    Page page = UsedDrive();
    page[i] ^= std::byte{0x10};
    EXPECT_EQ(*ParseSmartLog(page) == golden, !read) << i;
  }
}

}  // namespace
}  // namespace zeroshard
