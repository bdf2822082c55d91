// Checkpoints of every form of master and states: a run that stops and goes on, at another stage
// and number of workers, ends with the bits of one that did not; masters change their form.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/storage/temp_dir.h"
#include "tests/worker/state_checkpoints.h"
#include "tests/worker/state_forms.h"

namespace zeroshard {
namespace {

class StateCheckpointTest : public ::testing::TestWithParam<StateForm> {};

TEST_P(StateCheckpointTest, ARunThatGoesOnElsewhereEndsTheSame) {
  const auto whole = StartStateJob(GetParam(), {});
  TrainSteps(*whole, 0, 4);
  const TempDir dir;
  const auto first = StartStateJob(GetParam(), {.stage = 1, .workers = 2});
  TrainSteps(*first, 0, 2);
  SaveState(*first, 2, dir, "c");
  std::vector<StateVariant> variants = {{.stage = 3, .workers = 3, .copy = true},
                                        {.stage = 2, .workers = 3, .islands = true}};
  if (GetParam().master != model::v1::MASTER_FORM_NONE)
    variants.push_back({.stage = 0, .workers = 2});
  for (const StateVariant& v : variants) {
    const auto next = StartStateJob(GetParam(), v);
    TrainSteps(*next, 0, 1);  // what the checkpoint overwrites
    ASSERT_EQ(RestoreState(*next, v.workers, dir, "c"), "");
    EXPECT_TRUE(next->StateBytes() == first->StateBytes()) << "stage " << v.stage;
    TrainSteps(*next, 2, 4);
    EXPECT_TRUE(next->StateBytes() == whole->StateBytes()) << "stage " << v.stage;
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, StateCheckpointTest,
                         ::testing::ValuesIn(AllStateForms().begin(), AllStateForms().end()),
                         [](const auto& info) { return std::string(info.param.name); });

const StateForm& FormOf(std::string_view name) {
  for (const StateForm& form : AllStateForms()) {
    if (form.name == name) return form;
  }
  ADD_FAILURE() << name;
  return AllStateForms().front();
}

TEST(StateCheckpointFormsTest, MastersChangeTheirForm) {
  const TempDir dir;
  const StateForm split = FormOf("adamw_split");
  StateForm plain = split;
  plain.master = model::v1::MASTER_FORM_FLOAT32;
  StateForm none = split;
  none.master = model::v1::MASTER_FORM_NONE;
  const auto job = StartStateJob(split, {.workers = 2});
  TrainSteps(*job, 0, 2);
  SaveState(*job, 2, dir, "split");
  const auto wide = StartStateJob(plain, {});
  ASSERT_EQ(RestoreState(*wide, 1, dir, "split"), "");
  EXPECT_TRUE(wide->StateBytes() == job->StateBytes()) << "the master is the same number";
  TrainSteps(*wide, 2, 3);
  SaveState(*wide, 1, dir, "plain");
  const auto back = StartStateJob(split, {.workers = 3});
  ASSERT_EQ(RestoreState(*back, 3, dir, "plain"), "");
  for (uint32_t p = 0; p < wide->layout().parameters().size(); ++p) {
    EXPECT_EQ(back->Parameter(p), wide->Parameter(p)) << "a nudge never moves the rounded value";
  }
  const auto alone = StartStateJob(none, {});
  ASSERT_EQ(RestoreState(*alone, 1, dir, "plain"), "");
  SaveState(*alone, 1, dir, "none");
  const auto again = StartStateJob(split, {});
  ASSERT_EQ(RestoreState(*again, 1, dir, "none"), "") << "the parameter becomes the master";
  for (uint32_t p = 0; p < wide->layout().parameters().size(); ++p) {
    EXPECT_EQ(again->Parameter(p), wide->Parameter(p));
  }
}

TEST(StateCheckpointFormsTest, StatesOfAnotherFormatAreRefusedBeforeAnythingChanges) {
  const TempDir dir;
  const auto job = StartStateJob(FormOf("adamw_split"), {});
  TrainSteps(*job, 0, 1);
  SaveState(*job, 1, dir, "c");
  const auto other = StartStateJob(FormOf("adamw_bf16_states"), {});
  const std::string before = other->StateBytes();
  const std::string error = RestoreState(*other, 1, dir, "c");
  EXPECT_NE(error.find("as float32, this job holds it as bfloat16"), std::string::npos) << error;
  EXPECT_NE(error.find("load the parameters alone"), std::string::npos) << error;
  EXPECT_TRUE(other->StateBytes() == before);
  EXPECT_EQ(RestoreState(*other, 1, dir, "c", /*parameters_only=*/true), "");
  EXPECT_EQ(other->Parameter(6), job->Parameter(6));
}

}  // namespace
}  // namespace zeroshard
