// The optimizers against published numbers and against the formulas in fp64.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "tests/worker/random_values.h"
#include "worker/optim/kernels.h"

namespace zeroshard {
namespace {

// One parameter tensor trained by itself.
class Trainer {
 public:
  Trainer(OptimizerKind kind, Hyperparameters hyperparameters, std::vector<float> initial)
      : kind_(kind),
        hyperparameters_(hyperparameters),
        param(std::move(initial)),
        state0(param.size()),
        state1(param.size()),
        bf16(param.size()) {}

  void Step(const std::vector<float>& grad) {
    const UpdateArgs args = MakeUpdateArgs(hyperparameters_, ++step_);
    const UpdateSegment all = {.begin = 0, .end = param.size(), .args = 0};
    UpdatePass pass;
    pass.kind = kind_;
    pass.arrays = {.grad = grad.data(),
                   .param = param.data(),
                   .state = {state0.data(), state1.data()},
                   .out = bf16.data(),
                   .out_dtype = DType::kBfloat16};
    pass.segments = absl::MakeConstSpan(&all, 1);
    pass.args = absl::MakeConstSpan(&args, 1);
    ApplyUpdate(pass, 0, param.size());
  }

  int64_t step() const { return step_; }

 private:
  const OptimizerKind kind_;
  const Hyperparameters hyperparameters_;
  int64_t step_ = 0;

 public:
  std::vector<float> param, state0, state1;
  std::vector<uint16_t> bf16;
};

float UlpAt(double magnitude) {
  const float m = std::fabs(static_cast<float>(magnitude));
  return std::nextafter(m, INFINITY) - m;
}

void ExpectWithinUlps(double actual, double expected, double magnitude, double ulps) {
  EXPECT_LE(std::fabs(actual - expected), ulps * UlpAt(magnitude)) << actual << " " << expected;
}

struct GoldenCase {
  const char* name;
  OptimizerKind kind;
  Hyperparameters h;
  float after[3][4];  // as torch.optim 1.13 computes it
};

class GoldenTest : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(GoldenTest, ThreeStepsOfFourParameters) {
  Trainer trainer(GetParam().kind, GetParam().h, {1, -2, 0.5, 0});
  const std::vector<float> grads[] = {{.1f, -.2f, .3f, 0}, {.1f, .2f, -.3f, 0}, {0, 0, 0, 0}};
  for (int step = 0; step < 3; ++step) {
    trainer.Step(grads[step]);
    for (int i = 0; i < 4; ++i) {
      const float expected = GetParam().after[step][i];
      ExpectWithinUlps(trainer.param[i], expected, expected, 2);
    }
  }
}

const GoldenCase kGoldenCases[] = {
    {"adamw",
     OptimizerKind::kAdamW,
     {.lr = 1e-2, .weight_decay = 0.1},
     {{.989000022f, -1.98800004f, .489500016f, 0},
      {.978011072f, -1.98653841f, .489536822f, 0},
      {.969303071f, -1.98495877f, .48945412f, 0}}},
    {"adam_l2",
     OptimizerKind::kAdam,
     {.lr = 1e-2, .weight_decay = 0.1},
     {{.99000001f, -1.99000001f, .49000001f, 0},
      {.98000133f, -1.98331809f, .488893896f, 0},
      {.970603347f, -1.97585142f, .487323225f, 0}}},
    {"sgd",
     OptimizerKind::kSgd,
     {.lr = 1e-2, .weight_decay = 0.1},
     {{0.998000026f, -1.99600005f, 0.496499985f, 0},
      {0.996002018f, -1.9960041f, 0.4990035f, 0},
      {0.995006025f, -1.99400806f, 0.49850449f, 0}}},
    {"sgd_momentum",
     OptimizerKind::kSgdMomentum,
     {.lr = 1e-2, .weight_decay = 0.1, .momentum = 0.9},
     {{0.998000026f, -1.99600005f, 0.496499985f, 0},
      {0.994202018f, -1.9924041f, 0.495853484f, 0},
      {0.989789605f, -1.98717535f, 0.494775772f, 0}}},
    {"sgd_dampening",
     OptimizerKind::kSgdMomentum,
     {.lr = 1e-2, .momentum = 0.9, .dampening = 0.5},
     {{0.999000013f, -1.99800003f, 0.497000009f, 0},
      {0.997600019f, -1.99720001f, 0.495800018f, 0},
      {0.996340036f, -1.99647999f, 0.494720012f, 0}}},
    {"sgd_nesterov",
     OptimizerKind::kSgdMomentum,
     {.lr = 1e-2, .weight_decay = 0.1, .momentum = 0.9, .nesterov = true},
     {{0.996200025f, -1.99240005f, 0.493349999f, 0},
      {0.990787268f, -1.98917449f, 0.495277643f, 0},
      {0.98582983f, -1.98248518f, 0.493815511f, 0}}},
};

INSTANTIATE_TEST_SUITE_P(Optimizers, GoldenTest, ::testing::ValuesIn(kGoldenCases),
                         [](const auto& info) { return std::string(info.param.name); });

// bf16 parameters alone would stay at 1: half an ulp below 1 is 0.001953125.
TEST(MasterTest, SmallUpdatesAddUpInTheMaster) {
  Trainer trainer(OptimizerKind::kSgd, {.lr = 1e-3}, {1.0f});
  for (int i = 0; i < 8; ++i) trainer.Step({1.0f});
  EXPECT_EQ(trainer.param[0], 0.992000103f);
  EXPECT_EQ(Bf16ToFloat(trainer.bf16[0]), 0.9921875f);
}

// The published formulas in fp64, from the same fp32 state and with the same fp32 coefficients of
// the moments. The decayed gradient is an fp32 tensor in the published code too.
struct Fp64 {
  OptimizerKind kind;
  Hyperparameters h;

  // Returns the new (p, s0, s1).
  std::array<double, 3> operator()(double g, double p, double s0, double s1, int64_t step) const {
    if (kind == OptimizerKind::kAdamW || kind == OptimizerKind::kLion) {
      p *= 1 - h.lr * h.weight_decay;
    } else {
      g = static_cast<float>(g) + static_cast<float>(h.weight_decay) * static_cast<float>(p);
    }
    if (kind == OptimizerKind::kSgd) return {p - h.lr * g, s0, s1};
    if (kind == OptimizerKind::kSgdMomentum) {
      s0 = step == 1 ? g : h.momentum * s0 + (1 - h.dampening) * g;
      return {p - h.lr * (h.nesterov ? g + h.momentum * s0 : s0), s0, s1};
    }
    if (kind == OptimizerKind::kAdagrad) {
      s0 += g * g;
      return {p - h.lr * g / (std::sqrt(s0) + h.eps), s0, s1};
    }
    const auto rounded = [](double x) { return double{static_cast<float>(x)}; };
    if (kind == OptimizerKind::kLion) {
      const double direction = rounded(h.beta1) * s0 + rounded(1 - h.beta1) * g;
      s0 = rounded(h.beta2) * s0 + rounded(1 - h.beta2) * g;
      return {p - h.lr * (direction > 0 ? 1 : direction < 0 ? -1 : 0), s0, s1};
    }
    s0 = rounded(h.beta1) * s0 + rounded(1 - h.beta1) * g;
    s1 = rounded(h.beta2) * s1 + rounded(1 - h.beta2) * g * g;
    const double t = static_cast<double>(step);
    const double m_hat = s0 / (1 - std::pow(h.beta1, t));
    const double v_hat = s1 / (1 - std::pow(h.beta2, t));
    return {p - h.lr * m_hat / (std::sqrt(v_hat) + h.eps), s0, s1};
  }
};

class Fp64Test : public ::testing::TestWithParam<Fp64> {};

// Every step within 2 ulp of the larger of a term and the result (a difference of two nearly equal
// terms has the error of the terms).
TEST_P(Fp64Test, EveryStepIsWithinTwoUlps) {
  const Fp64& reference = GetParam();
  constexpr size_t kElements = 500;
  std::mt19937_64 random(1);
  std::vector<float> initial = RandomFloats(random, kElements, Values::kOrdinary);
  for (float& p : initial) p += p < 0 ? -0.05f : 0.05f;
  Trainer trainer(reference.kind, reference.h, initial);
  while (trainer.step() < 60) {
    const auto grad = RandomFloats(random, kElements, Values::kOrdinary, 0.3f);
    const Trainer before = trainer;
    trainer.Step(grad);
    for (size_t i = 0; i < kElements; ++i) {
      const double g = grad[i], p = before.param[i];
      const double decayed = std::fabs(g) + reference.h.weight_decay * std::fabs(p);
      const auto after = reference(g, p, before.state0[i], before.state1[i], trainer.step());
      ExpectWithinUlps(trainer.param[i], after[0], std::max(std::fabs(p), std::fabs(after[0])), 2);
      ExpectWithinUlps(
          trainer.state0[i], after[1],
          std::max({decayed, std::fabs(double{before.state0[i]}), std::fabs(after[1])}), 2);
      ExpectWithinUlps(trainer.state1[i], after[2],
                       std::max(decayed * decayed * 1e-3, std::fabs(after[2])), 2);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Formulas, Fp64Test,
    ::testing::Values(
        Fp64{OptimizerKind::kAdamW, {.weight_decay = 0.1}},
        Fp64{OptimizerKind::kAdamW, {.lr = 3e-4, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6}},
        Fp64{OptimizerKind::kAdam, {}}, Fp64{OptimizerKind::kAdam, {.weight_decay = 0.01}},
        Fp64{OptimizerKind::kSgd, {.weight_decay = 0.01}},
        Fp64{OptimizerKind::kSgdMomentum, {.momentum = 0.9}},
        Fp64{OptimizerKind::kSgdMomentum,
             {.weight_decay = 0.01, .momentum = 0.9, .dampening = 0.3}},
        Fp64{OptimizerKind::kSgdMomentum, {.momentum = 0.9, .nesterov = true}},
        Fp64{OptimizerKind::kAdagrad, {.lr = 1e-2, .eps = 1e-10}},
        Fp64{OptimizerKind::kAdagrad, {.lr = 1e-2, .eps = 1e-10, .weight_decay = 0.01}},
        Fp64{OptimizerKind::kLion, {.lr = 1e-4, .beta2 = 0.99, .weight_decay = 0.1}}));

TEST(UpdateArgsTest, GroupsWithoutMomentumUseThePlainFormula) {
  const Hyperparameters h = {.lr = 0.5, .momentum = 0.0, .dampening = 0.5};
  Trainer plain(OptimizerKind::kSgd, h, {1.0f});
  Trainer mixed(OptimizerKind::kSgdMomentum, h, {1.0f});
  for (float g : {1.0f, -0.25f, 3.0f}) {
    plain.Step({g});
    mixed.Step({g});
    EXPECT_EQ(plain.param, mixed.param);
  }
}

TEST(UpdateArgsTest, BiasCorrectionComesFromTheStepNumber) {
  const UpdateArgs late = MakeUpdateArgs({.lr = 1e-3}, 1000000);
  EXPECT_EQ(late.step_size, 1e-3f);
  EXPECT_EQ(late.scaled_eps, 1e-8f);
  for (int64_t step : {1, 2, 10, 999, 12345}) {
    const UpdateArgs args = MakeUpdateArgs({.lr = 1e-3}, step);
    const double t = static_cast<double>(step);
    const double c = std::sqrt(1 - std::pow(0.999, t));
    EXPECT_FLOAT_EQ(args.step_size, static_cast<float>(1e-3 / (1 - std::pow(0.9, t)) * c));
    EXPECT_FLOAT_EQ(args.scaled_eps, static_cast<float>(1e-8 * c));
  }
}

}  // namespace
}  // namespace zeroshard
