// The compiled optimizer loops: every instruction set, optimizer, type, form of master and states
// against a scalar reference, and against themselves with other cuts of the range.
#include "worker/optim/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/strings.h"
#include "tests/worker/optim/update_reference.h"
#include "worker/optim/random_key.h"

namespace zeroshard {
namespace {

constexpr uint64_t kElements = 1300;

// One parameter of several blocks, some odd ones, an empty one, one that starts on a block.
std::vector<uint64_t> RandomOffsets(std::mt19937_64& random) {
  std::vector<uint64_t> offsets = {0, 256 + random() % 300};
  offsets.push_back(offsets.back() + 1 + random() % 40);
  offsets.push_back(offsets.back());
  offsets.push_back(768);
  offsets.push_back(768 + 1 + random() % 255);
  offsets.push_back(kElements - random() % 20);
  offsets.push_back(kElements);
  return offsets;
}

struct Form {
  std::string name;
  UpdateArrays arrays;
};

// Every supported combination of master, output, gradient and states.
std::vector<Form> Forms(const OptimizerInfo& optimizer) {
  static uint16_t some_output;
  std::vector<Form> forms;
  const auto add = [&](std::string name, MasterKind master, bool output, DType out_dtype) {
    for (DType grad : kAllDTypes) {
      for (int format = 0; format < 3; ++format) {
        const auto states = static_cast<StateFormat>(format);
        if (states == StateFormat::kInt8 && !optimizer.eight_bit) continue;
        UpdateArrays arrays;
        arrays.grad_dtype = grad;
        arrays.master = master;
        arrays.state_format = states;
        arrays.out = output ? &some_output : nullptr;
        arrays.out_dtype = out_dtype;
        forms.push_back(
            {absl::StrCat(name, ", gradient ", Abs(DTypeName(grad)), ", states ", format), arrays});
      }
    }
  };
  add("fp32", MasterKind::kFloat32, false, DType::kFloat32);
  for (DType out : kAllDTypes) {
    add(absl::StrCat("fp32 to ", Abs(DTypeName(out))), MasterKind::kFloat32, true, out);
  }
  add("canonical", MasterKind::kFloat32Canonical, false, DType::kFloat32);
  add("canonical to bf16", MasterKind::kFloat32Canonical, true, DType::kBfloat16);
  add("split", MasterKind::kSplit, false, DType::kFloat32);
  add("stochastic", MasterKind::kStochastic, false, DType::kFloat32);
  add("stochastic to bf16", MasterKind::kStochastic, true, DType::kBfloat16);
  return forms;
}

// Some parameters with one of three groups' arguments, some absent.
std::vector<int> RandomUpdated(std::mt19937_64& random, size_t parameters) {
  std::vector<int> updated;
  for (size_t i = 0; i < parameters; ++i) updated.push_back(static_cast<int>(random() % 4) - 1);
  return updated;
}

// Cuts anywhere; with 8-bit states between blocks.
void UpdateInPieces(Isa isa, const UpdatePass& pass, std::mt19937_64& random) {
  const bool blocks = pass.arrays.state_format == StateFormat::kInt8;
  for (uint64_t at = 0; at < kElements;) {
    uint64_t end = at + 1 + random() % 400;
    if (blocks) end = (end + 255) / 256 * 256;
    end = std::min(end, kElements);
    ApplyUpdateOn(isa, pass, at, end);
    at = end;
  }
}

class OptimKernelsTest : public ::testing::TestWithParam<std::tuple<Isa, OptimizerKind>> {};

TEST_P(OptimKernelsTest, EqualsTheReferenceBitForBit) {
  const auto [isa, kind] = GetParam();
  std::mt19937_64 random(1);
  for (const Form& form : Forms(GetOptimizerInfo(kind))) {
    for (Values values : {Values::kOrdinary, Values::kAny}) {
      const auto offsets = RandomOffsets(random);
      UpdateTensors actual = RandomTensors(random, form.arrays, kind, offsets, values);
      UpdateTensors expected = actual;
      const auto args = RandomArgs(random, kind, 3);
      const auto segments = actual.Segments(RandomUpdated(random, offsets.size() - 1));
      const UpdatePass pass = {.kind = kind,
                               .arrays = actual.Arrays(),
                               .segments = segments,
                               .args = args,
                               .grad_scale = 0.3f,
                               .random_key = RandomKey(7, random(), 3),
                               .stream_output = random() % 2 == 0};
      UpdateInPieces(isa, pass, random);
      ReferenceUpdate(pass, expected);
      ASSERT_TRUE(actual == expected) << form.name << ", values " << static_cast<int>(values);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, OptimKernelsTest,
                         ::testing::Combine(::testing::ValuesIn(SupportedIsas()),
                                            ::testing::ValuesIn([] {
                                              std::vector<OptimizerKind> kinds;
                                              for (const OptimizerInfo& info : AllOptimizers()) {
                                                kinds.push_back(info.kind);
                                              }
                                              return kinds;
                                            }())),
                         [](const auto& info) {
                           return absl::StrCat("v", 2 + static_cast<int>(std::get<0>(info.param)),
                                               "_",
                                               Abs(GetOptimizerInfo(std::get<1>(info.param)).name));
                         });

// A parameter is updated alike whichever of its neighbours are.
TEST(EightBitTest, AbsenceOfOneParameterDoesNotTouchAnother) {
  std::mt19937_64 random(2);
  const std::vector<uint64_t> offsets = {0, 100, 300, 1300};
  UpdateArrays form;
  form.state_format = StateFormat::kInt8;
  UpdateTensors all =
      RandomTensors(random, form, OptimizerKind::kAdamW, offsets, Values::kOrdinary);
  UpdateTensors one = all;
  const UpdateTensors before = all;
  const auto args = RandomArgs(random, OptimizerKind::kAdamW, 1);
  const auto update = [&](UpdateTensors& tensors, const std::vector<int>& updated) {
    const auto segments = tensors.Segments(updated);
    ApplyUpdate({.arrays = tensors.Arrays(), .segments = segments, .args = args}, 0, 1300);
  };
  update(all, {0, 0, 0});
  update(one, {-1, 0, -1});
  for (size_t i = 0; i < 1300; ++i) {
    const UpdateTensors& expected = i >= 100 && i < 300 ? all : before;
    EXPECT_EQ(one.param[i], expected.param[i]) << i;
    EXPECT_EQ(one.state[0][i], expected.state[0][i]) << i;
    EXPECT_EQ(one.absmax[1][one.block_of[i]], expected.absmax[1][one.block_of[i]]) << i;
  }
}

// A NaN shows in its own parameter and nowhere else.
TEST(EightBitTest, ANanGradientStaysWithItsElement) {
  for (float poison : {NAN, INFINITY, -INFINITY}) {
    std::mt19937_64 random(3);
    UpdateArrays form;
    form.state_format = StateFormat::kInt8;
    UpdateTensors clean =
        RandomTensors(random, form, OptimizerKind::kAdamW, {0, 256}, Values::kOrdinary);
    UpdateTensors poisoned = clean;
    std::memcpy(poisoned.grad.data() + 4 * 77, &poison, 4);
    std::memset(clean.grad.data() + 4 * 77, 0, 4);
    const auto args = RandomArgs(random, OptimizerKind::kAdamW, 1);
    for (UpdateTensors* tensors : {&clean, &poisoned}) {
      const auto segments = tensors->Segments({0});
      ApplyUpdate({.arrays = tensors->Arrays(), .segments = segments, .args = args}, 0, 256);
    }
    for (size_t i = 0; i < 256; ++i) {
      if (i == 77) continue;
      EXPECT_EQ(clean.param[i], poisoned.param[i]);
      EXPECT_EQ(clean.state[0][i], poisoned.state[0][i]);
      EXPECT_EQ(clean.state[1][i], poisoned.state[1][i]);
    }
    EXPECT_NE(poisoned.param[77], poisoned.param[77]);
    EXPECT_TRUE(std::isfinite(poisoned.absmax[0][0]) && std::isfinite(poisoned.absmax[1][0]));
  }
}

TEST(EightBitDeathTest, ACutThroughABlockIsABug) {
  std::mt19937_64 random(4);
  UpdateArrays form;
  form.state_format = StateFormat::kInt8;
  UpdateTensors t = RandomTensors(random, form, OptimizerKind::kAdamW, {0, 512}, Values::kOrdinary);
  const auto args = RandomArgs(random, OptimizerKind::kAdamW, 1);
  const auto segments = t.Segments({0});
  const UpdatePass pass = {.arrays = t.Arrays(), .segments = segments, .args = args};
  EXPECT_DEATH(ApplyUpdate(pass, 0, 128), "cuts a block");
}

}  // namespace
}  // namespace zeroshard
