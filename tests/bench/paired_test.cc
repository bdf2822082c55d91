#include "tests/bench/paired.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard::bench {
namespace {

using ::testing::HasSubstr;

// What a run prints, and its exit status.
std::pair<std::string, int> RunOnce(const std::vector<std::string>& flags, double a, double b,
                                    Target target) {
  std::vector<char*> argv = {const_cast<char*>("bench")};
  for (const std::string& flag : flags) argv.push_back(const_cast<char*>(flag.c_str()));
  Bench bench("demo", static_cast<int>(argv.size()), argv.data());
  testing::internal::CaptureStdout();
  bench.Compare(
      {{"ours", "theirs", "us", target}}, [&] { return std::vector<double>{a}; },
      [&] { return std::vector<double>{b}; });
  return {testing::internal::GetCapturedStdout(), bench.Finish()};
}

TEST(PairedTest, AMetTargetPasses) {
  const auto [text, status] = RunOnce({}, 3.0, 4.0, AtMost(0.8));
  EXPECT_EQ(status, 0);
  const auto line = nlohmann::json::parse(text);
  EXPECT_EQ(line["ratio"], 0.75);
  EXPECT_EQ(line["pass"], true);
  EXPECT_EQ(line["blocks"], 12);
  EXPECT_EQ(line["ci"], nlohmann::json({0.75, 0.75}));
}

TEST(PairedTest, AMissedTargetFailsTheRun) {
  const auto [text, status] = RunOnce({"--blocks=10"}, 3.0, 4.0, AtLeast(0.8));
  EXPECT_EQ(status, 1);
  EXPECT_THAT(text, HasSubstr("\"pass\":false"));
}

TEST(PairedTest, SmokeJudgesNothing) {
  const auto [text, status] = RunOnce({"--smoke"}, 3.0, 4.0, AtLeast(0.8));
  EXPECT_EQ(status, 0);
  EXPECT_THAT(text, HasSubstr("\"pass\":null"));
}

TEST(PairedTest, ADriftThatHitsBothSidesCancels) {
  double slowness = 1.0;
  char name[] = "bench";
  char* argv[] = {name};
  Bench bench("drift", 1, argv);
  testing::internal::CaptureStdout();
  const auto side = [&](double cost) {
    slowness += 0.01;
    return std::vector<double>{cost * slowness};
  };
  bench.Compare(
      {{"ours", "theirs", "us", AtMost(1.0)}}, [&] { return side(2.0); },
      [&] { return side(4.0); });
  const auto line = nlohmann::json::parse(testing::internal::GetCapturedStdout());
  EXPECT_NEAR(line["ratio"].get<double>(), 0.5, 1e-4);
}

TEST(PairedTest, ABrokenRequirementFailsEvenASmokeRun) {
  char name[] = "bench", smoke[] = "--smoke";
  char* argv[] = {name, smoke};
  Bench bench("demo", 2, argv);
  bench.Require(false, "the results differ");
  EXPECT_EQ(bench.Finish(), 1);
}

TEST(PairedTest, PercentilesOfKnownSamples) {
  std::vector<double> samples;
  for (int i = 100; i >= 1; --i) samples.push_back(i);
  EXPECT_EQ(Percentile(samples, 0.0), 1);
  EXPECT_EQ(Percentile(samples, 0.99), 100);
  EXPECT_EQ(Median(samples), 51);
}

}  // namespace
}  // namespace zeroshard::bench
