#include "server/power_jobs.h"

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zeroshard {
namespace {

using internal::v1::PowerStates;
using ::testing::HasSubstr;

PowerStates Found(const std::vector<std::pair<uint64_t, uint64_t>>& states,
                  const std::string& problem = "") {
  PowerStates found;
  for (const auto& [step, attempt] : states) {
    found.add_states()->set_step(step);
    found.mutable_states()->rbegin()->set_attempt(attempt);
  }
  found.set_problem(problem);
  return found;
}

PowerStates Missing(const std::string& file) {
  PowerStates found = Found({}, file);
  found.set_missing(true);
  return found;
}

PowerStates Unused() {
  PowerStates found;
  found.set_unused(true);
  return found;
}

constexpr bool kBegun = true;

TEST(PowerJobs, GoOnAtTheNewestStateThatAllHave) {
  const std::vector<PowerStates> found = {Found({{7, 9}, {6, 8}}), Found({{6, 8}, {5, 6}})};
  const auto resume = ChooseResume("gpt", kBegun, found);
  ASSERT_TRUE(resume.ok()) << resume.status();
  EXPECT_FALSE(resume->fresh());
  EXPECT_EQ(resume->state().step(), 6u);
  EXPECT_EQ(resume->state().attempt(), 8u);
  EXPECT_EQ(resume->committed(), 10u) << "above all that any worker has seen";
}

TEST(PowerJobs, BeginAnewWhereNoStepCanHaveBeenCommitted) {
  const std::vector<std::vector<PowerStates>> cases = {
      {Unused(), Unused()}, {Found({{0, 0}}), Unused()}, {Missing("a"), Unused()}};
  for (const auto& found : cases) EXPECT_TRUE(ChooseResume("gpt", kBegun, found)->fresh());
  const std::vector<PowerStates> none = {Missing("a"), Missing("b")};
  EXPECT_TRUE(ChooseResume("gpt", !kBegun, none)->fresh());
}

TEST(PowerJobs, DoNotBeginAnewBecauseADriveIsNotThere) {
  for (const auto& found :
       std::vector<std::vector<PowerStates>>{{Missing("/a/manifest"), Missing("/b/manifest")},
                                             {Found({{4, 4}}), Missing("/b/manifest")}}) {
    const auto resume = ChooseResume("gpt", kBegun, found);
    EXPECT_EQ(resume.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(resume.status().message()),
                HasSubstr("worker 1: /b/manifest; is the drive mounted?"));
  }
}

TEST(PowerJobs, SayWhatEachWorkerHasWhenThatIsNotEnough) {
  const std::vector<PowerStates> found = {Found({{7, 9}}, "/a/manifest at offset 0: torn"),
                                          Found({{6, 8}})};
  const auto resume = ChooseResume("gpt", kBegun, found);
  EXPECT_EQ(resume.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(resume.status().message()),
              ::testing::AllOf(HasSubstr("worker 0 has step 7 (attempt 9)"),
                               HasSubstr("worker 0: /a/manifest at offset 0: torn"),
                               HasSubstr("`zeroshard remove gpt` deletes")));
}

}  // namespace
}  // namespace zeroshard
