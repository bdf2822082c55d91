#include "device/cpu/lock_allowance.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <string>

namespace zeroshard {
namespace {

using ::testing::HasSubstr;

constexpr char kPlain[] =
    "Name:\tVmLck: 7 kB\nVmSize:\t  10000 kB\nVmLck:\t      12 kB\nCapPrm:\tffffffffffffffff\n"
    "CapEff:\t0000000000000000\n";

TEST(LockAllowance, IsTheLimitLessWhatIsLocked) {
  const LockAllowance allowance = LockAllowanceOf(65536, kPlain);
  EXPECT_FALSE(allowance.unlimited);
  EXPECT_EQ(allowance.limit_bytes, 65536u);
  EXPECT_EQ(allowance.used_bytes, 12u * 1024);
  EXPECT_EQ(allowance.left_bytes(), 65536u - 12 * 1024);
}

TEST(LockAllowance, IsNothingAboveALimitThatWasLowered) {
  EXPECT_EQ(LockAllowanceOf(12 * 1024, kPlain).left_bytes(), 0u);
  EXPECT_EQ(LockAllowanceOf(4096, kPlain).left_bytes(), 0u);
  EXPECT_EQ(LockAllowanceOf(0, kPlain).left_bytes(), 0u);
}

TEST(LockAllowance, HasNoEndWithoutALimitOrWithTheCapability) {
  EXPECT_EQ(LockAllowanceOf(RLIM_INFINITY, kPlain).left_bytes(), UINT64_MAX);
  const char only_ipc_lock[] = "VmLck:\t 4 kB\nCapEff:\t0000000000004000\n";
  EXPECT_EQ(LockAllowanceOf(0, only_ipc_lock).left_bytes(), UINT64_MAX);
  const char all_but_it[] = "VmLck:\t 4 kB\nCapEff:\t000001ffffffbfff\n";
  EXPECT_EQ(LockAllowanceOf(0, all_but_it).left_bytes(), 0u);
}

TEST(LockAllowance, ReadsAnyText) {
  for (const char* text : {"", "VmLck:", "VmLck:\t", "VmLck: x kB\nCapEff: zz", "CapEff:\n\n"}) {
    const LockAllowance allowance = LockAllowanceOf(100, text);
    EXPECT_EQ(allowance.left_bytes(), 100u) << text;
  }
}

TEST(LockAllowance, OfThisProcessCanBeRead) { EXPECT_TRUE(ReadLockAllowance().ok()); }

TEST(LockAllowance, AdviceNamesWhatIsNeeded) {
  const std::string advice = LockAdvice(LockAllowanceOf(65536, kPlain), 100000);
  EXPECT_THAT(advice, HasSubstr("RLIMIT_MEMLOCK is 65536 bytes, 12288 of them used, and 112288"));
  EXPECT_THAT(advice, HasSubstr("LimitMEMLOCK=112288 "));
  EXPECT_THAT(advice, HasSubstr("`ulimit -l 110`"));
}

}  // namespace
}  // namespace zeroshard
