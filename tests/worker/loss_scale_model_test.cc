// The loss scale against a second telling of DeepSpeed's rules, over long runs.
//
// The model looks at the whole history instead of keeping counters. With h the hysteresis and w the
// window:
// * A good step doubles the scale when w, 2w, 3w, ... good steps lie between it and the overflow
//   before it (or, without one, the beginning).
// * Patience is what is left of h - 1 after the overflows since it was last restored. A doubling
//   restores it; with consecutive_hysteresis every good step does.
// * An overflow takes one from the patience if there is any. Otherwise it halves the scale, down to
//   the minimum; at the minimum it is an error, and the step does not count.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <random>
#include <vector>

#include "worker/loss_scaler.h"

namespace zeroshard {
namespace {

struct Rules {
  double initial = 65536;
  uint32_t window = 1000;
  uint32_t hysteresis = 2;
  bool consecutive = false;
  double minimum = 1;
};

enum class Event { kGood, kDoubled, kOverflow };

class History {
 public:
  explicit History(const Rules& rules) : rules_(rules), scale_(rules.initial) {}

  double scale() const { return scale_; }

  // False: the run is over.
  bool Step(bool overflow) {
    if (overflow) {
      if (PatienceLeft() == 0) {
        if (scale_ == rules_.minimum) return false;
        scale_ = std::max(scale_ / 2, rules_.minimum);
      }
      events_.push_back(Event::kOverflow);
      return true;
    }
    const auto after_overflow = std::find(events_.rbegin(), events_.rend(), Event::kOverflow);
    const auto between = static_cast<uint64_t>(std::distance(events_.rbegin(), after_overflow));
    const bool doubles = between >= rules_.window && between % rules_.window == 0;
    if (doubles) scale_ *= 2;
    events_.push_back(doubles ? Event::kDoubled : Event::kGood);
    return true;
  }

 private:
  uint32_t PatienceLeft() const {
    uint32_t used = 0;
    for (auto event = events_.rbegin(); event != events_.rend(); ++event) {
      const bool restored =
          *event == Event::kDoubled || (rules_.consecutive && *event == Event::kGood);
      if (restored || used + 1 >= rules_.hysteresis) break;
      if (*event == Event::kOverflow) ++used;
    }
    return rules_.hysteresis - 1 - used;
  }

  const Rules rules_;
  double scale_;
  std::vector<Event> events_;
};

class BothScales {
 public:
  explicit BothScales(const Rules& rules) : history_(rules) {
    config_.set_dynamic(true);
    config_.set_initial(rules.initial);
    config_.set_window(rules.window);
    config_.set_hysteresis(rules.hysteresis);
    config_.set_consecutive_hysteresis(rules.consecutive);
    config_.set_minimum(rules.minimum);
    numbers_.loss_scale = rules.initial;
    numbers_.scaler_last_overflow = -1;
    numbers_.scaler_hysteresis = rules.hysteresis;
  }

  double scale() const { return numbers_.loss_scale; }

  // One step of both. Returns false where both say that training has diverged; the state is then
  // the one before.
  testing::AssertionResult Step(bool overflow, bool& alive) {
    const JobNumbers before = numbers_;
    alive = history_.Step(overflow);
    const absl::Status status = AdvanceLossScale(config_, overflow, numbers_);
    if (status.ok() != alive) return testing::AssertionFailure() << "model " << alive << status;
    if (!alive && (numbers_.loss_scale != before.loss_scale ||
                   numbers_.scaler_iteration != before.scaler_iteration ||
                   numbers_.scaler_hysteresis != before.scaler_hysteresis ||
                   numbers_.scaler_last_overflow != before.scaler_last_overflow)) {
      return testing::AssertionFailure() << "an error changed the numbers";
    }
    if (numbers_.loss_scale == history_.scale()) return testing::AssertionSuccess();
    return testing::AssertionFailure()
           << "scale " << numbers_.loss_scale << ", model " << history_.scale();
  }

 private:
  model::v1::LossScale config_;
  JobNumbers numbers_ = {};
  History history_;
};

std::vector<Rules> AllRules() {
  std::vector<Rules> all;
  for (const uint32_t window : {1u, 2u, 3u, 7u, 50u, 1000u}) {
    for (const uint32_t hysteresis : {1u, 2u, 3u, 5u}) {
      for (const bool consecutive : {false, true}) {
        for (const double initial : {2.0, 65536.0}) {
          for (const double minimum : {1.0, 16.0}) {
            all.push_back({initial, window, hysteresis, consecutive, minimum});
          }
        }
      }
    }
  }
  return all;
}

std::string Describe(const Rules& rules) {
  testing::Message text;
  text << "window " << rules.window << " hysteresis " << rules.hysteresis << " consecutive "
       << rules.consecutive << " initial " << rules.initial << " minimum " << rules.minimum;
  return text.GetString();
}

// As in training: gradients overflow above a scale that wanders, and now and then by accident.
TEST(LossScaleModelTest, AgreesOverTenThousandStepsOfEverySetting) {
  uint32_t seed = 0;
  for (const Rules& rules : AllRules()) {
    SCOPED_TRACE(Describe(rules));
    std::mt19937 random(++seed);
    BothScales both(rules);
    double limit = 20;  // of log2 of the scale
    int errors = 0;
    for (int step = 0; step < 12000; ++step) {
      limit = std::clamp(limit + (random() % 3 == 0 ? 1 : -1) * 0.5 * (random() % 2), -2.0, 24.0);
      if (random() % 500 == 0) limit = 24;
      const bool overflow = std::log2(both.scale()) > limit || random() % 400 == 0;
      bool alive = true;
      ASSERT_TRUE(both.Step(overflow, alive)) << "step " << step;
      if (!alive) {
        ++errors;
        limit = 24;  // the trainer repairs its data and steps again
      }
    }
    EXPECT_GT(errors, 0) << "no run reached the minimum";
  }
}

// Every sequence of up to 12 steps.
TEST(LossScaleModelTest, AgreesOnEveryShortSequence) {
  for (Rules rules : AllRules()) {
    if (rules.window > 7 || rules.initial != 2.0) continue;
    rules.initial = 64;
    for (uint32_t sequence = 0; sequence < 1u << 12; ++sequence) {
      BothScales both(rules);
      bool alive = true;
      for (int step = 0; step < 12 && alive; ++step) {
        ASSERT_TRUE(both.Step((sequence >> step & 1) != 0, alive))
            << Describe(rules) << " sequence " << sequence << " step " << step;
      }
    }
  }
}

TEST(LossScaleModelTest, TheModelKnowsThePublishedSequences) {
  const auto scales = [](const Rules& rules, const std::string& steps) {
    History history(rules);
    std::vector<double> seen;
    for (const char step : steps) {
      EXPECT_TRUE(history.Step(step == 'O'));
      seen.push_back(history.scale());
    }
    return seen;
  };
  EXPECT_EQ(scales({16, 2, 2, false, 1}, "OOONNNNN"),
            (std::vector<double>{16, 8, 4, 4, 4, 8, 8, 16}));
  EXPECT_EQ(scales({65536, 1000, 2, false, 1}, "OOO"), (std::vector<double>{65536, 32768, 16384}));
}

}  // namespace
}  // namespace zeroshard
