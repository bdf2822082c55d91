// A small network trained to the end with every form of master and states: the cheap forms reach
// the loss of the exact one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "worker/optim/kernels.h"
#include "worker/optim/random_key.h"

namespace zeroshard {
namespace {

constexpr size_t kIn = 16, kHidden = 48, kOut = 4, kBatch = 32;
constexpr size_t kFirst = kIn * kHidden, kSecond = kHidden * kOut;
constexpr size_t kParameters = kFirst + kSecond;
constexpr int kSteps = 1200;
constexpr float kNoise = 0.5f;  // a loss of kOut / 4 = 1 that nothing can learn

// y = W2 tanh(W1 x), weights in `w` one after the other.
void Forward(const float* w, const float* x, float* hidden, float* y) {
  for (size_t h = 0; h < kHidden; ++h) {
    float sum = 0;
    for (size_t i = 0; i < kIn; ++i) sum += w[h * kIn + i] * x[i];
    hidden[h] = std::tanh(sum);
  }
  for (size_t o = 0; o < kOut; ++o) {
    y[o] = 0;
    for (size_t h = 0; h < kHidden; ++h) y[o] += w[kFirst + o * kHidden + h] * hidden[h];
  }
}

// Adds the gradient of the squared error of one example, and returns the error.
double Backward(const float* w, const float* x, const float* wanted, float* grad) {
  float hidden[kHidden], y[kOut], error[kOut];
  Forward(w, x, hidden, y);
  double loss = 0;
  for (size_t o = 0; o < kOut; ++o) {
    error[o] = y[o] - wanted[o];
    loss += double{error[o]} * error[o];
  }
  for (size_t h = 0; h < kHidden; ++h) {
    float back = 0;
    for (size_t o = 0; o < kOut; ++o) {
      grad[kFirst + o * kHidden + h] += 2 * error[o] * hidden[h];
      back += 2 * error[o] * w[kFirst + o * kHidden + h];
    }
    back *= 1 - hidden[h] * hidden[h];
    for (size_t i = 0; i < kIn; ++i) grad[h * kIn + i] += back * x[i];
  }
  return loss;
}

// The parameters as the forward pass sees them.
std::vector<float> Weights(const UpdateArrays& arrays) {
  std::vector<float> w(kParameters);
  for (size_t i = 0; i < kParameters; ++i) {
    w[i] = arrays.param != nullptr ? arrays.param[i] : Bf16ToFloat(arrays.high[i]);
  }
  return w;
}

// The mean loss of the last fifth of the training.
double TrainOnce(OptimizerKind kind, MasterKind master, StateFormat format, double lr,
                 uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> teacher(kParameters), param(kParameters), grad(kParameters);
  for (size_t i = 0; i < kParameters; ++i) {
    teacher[i] = normal(random) / std::sqrt(i < kFirst ? float{kIn} : float{kHidden}) * 1.5f;
    param[i] = normal(random) / std::sqrt(i < kFirst ? float{kIn} : float{kHidden});
  }
  std::vector<uint16_t> high(kParameters), low(kParameters);
  for (size_t i = 0; i < kParameters; ++i) high[i] = FloatToBf16(param[i]);
  std::vector<float> states[kMaxStateSlots], scales[kMaxStateSlots];
  UpdatePass pass = {.kind = kind};
  pass.arrays.grad = grad.data();
  pass.arrays.master = master;
  if (master == MasterKind::kFloat32) pass.arrays.param = param.data();
  pass.arrays.high = high.data();
  pass.arrays.low = low.data();
  pass.arrays.state_format = format;
  for (int slot = 0; slot < kMaxStateSlots; ++slot) {
    states[slot].resize(kParameters);
    scales[slot].resize(kParameters / kStateBlock + 2);
    pass.arrays.state[slot] = states[slot].data();
    pass.arrays.absmax[slot] = scales[slot].data();
  }
  static_assert(kFirst % kStateBlock == 0);
  const UpdateSegment segments[] = {{.begin = 0, .end = kFirst},
                                    {.begin = kFirst, .end = kParameters}};
  pass.segments = segments;
  pass.grad_scale = 1.0f / kBatch;
  double tail = 0;
  for (int step = 0; step < kSteps; ++step) {
    std::fill(grad.begin(), grad.end(), 0.0f);
    const std::vector<float> w = Weights(pass.arrays);
    double loss = 0;
    for (size_t example = 0; example < kBatch; ++example) {
      float x[kIn], hidden[kHidden], wanted[kOut];
      for (float& value : x) value = normal(random);
      Forward(teacher.data(), x, hidden, wanted);
      for (float& value : wanted) value += kNoise * normal(random);
      loss += Backward(w.data(), x, wanted, grad.data()) / kBatch;
    }
    const double decay = 1 - static_cast<double>(step) / kSteps;
    const UpdateArgs args =
        MakeUpdateArgs({.lr = lr * decay, .weight_decay = 1e-4, .momentum = 0.9}, step + 1);
    pass.args = absl::MakeConstSpan(&args, 1);
    pass.random_key = RandomKey(1, static_cast<uint64_t>(step), 0);
    ApplyUpdate(pass, 0, kParameters);
    if (step >= kSteps * 4 / 5) tail += loss / (kSteps / 5.0);
  }
  return tail;
}

// Of three networks: two runs of one network that differ in a bit end half a percent apart.
double Train(OptimizerKind kind, MasterKind master, StateFormat format, double lr) {
  double mean = 0;
  for (uint64_t seed : {1, 2, 3}) mean += TrainOnce(kind, master, format, lr, seed) / 3;
  return mean;
}

struct TrainingCase {
  const char* name;
  OptimizerKind kind;
  MasterKind reference;  // master of the run with fp32 states
  MasterKind master;
  StateFormat format;
  double lr;
  double tolerance;  // relative, of the loss
};

class TrainingTest : public ::testing::TestWithParam<TrainingCase> {};

TEST_P(TrainingTest, ReachesTheLossOfFp32) {
  const TrainingCase& c = GetParam();
  static std::map<std::pair<OptimizerKind, MasterKind>, double> known;
  double& exact = known[{c.kind, c.reference}];
  if (exact == 0) exact = Train(c.kind, c.reference, StateFormat::kFloat32, c.lr);
  const double loss = Train(c.kind, c.master, c.format, c.lr);
  RecordProperty("exact", std::to_string(exact));
  RecordProperty("loss", std::to_string(loss));
  EXPECT_LT(exact, 1.5);  // about 5 at the start
  EXPECT_LE(loss / exact, 1.0 + c.tolerance);
  EXPECT_GE(loss / exact, 0.98);
}

constexpr MasterKind kFp32 = MasterKind::kFloat32;
constexpr MasterKind kSplit = MasterKind::kSplit;
constexpr TrainingCase kCases[] = {
    {"adam_8bit", OptimizerKind::kAdam, kFp32, kFp32, StateFormat::kInt8, 1e-2, 0.005},
    {"adamw_8bit", OptimizerKind::kAdamW, kFp32, kFp32, StateFormat::kInt8, 1e-2, 0.005},
    {"adamw_8bit_split", OptimizerKind::kAdamW, kSplit, kSplit, StateFormat::kInt8, 1e-2, 0.005},
    {"sgd_momentum_8bit", OptimizerKind::kSgdMomentum, kFp32, kFp32, StateFormat::kInt8, 2e-2,
     0.005},
    {"lion_8bit", OptimizerKind::kLion, kFp32, kFp32, StateFormat::kInt8, 3e-3, 0.005},
    {"adamw_split", OptimizerKind::kAdamW, kFp32, kSplit, StateFormat::kFloat32, 1e-2, 0.005},
    {"sgd_momentum_bf16_split", OptimizerKind::kSgdMomentum, kSplit, kSplit, StateFormat::kBfloat16,
     2e-2, 0.005},
    {"adamw_stochastic", OptimizerKind::kAdamW, kSplit, MasterKind::kStochastic,
     StateFormat::kFloat32, 1e-2, 0.01},
};

INSTANTIATE_TEST_SUITE_P(Forms, TrainingTest, ::testing::ValuesIn(kCases),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace zeroshard
