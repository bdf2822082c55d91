// The compiled optimizer loops: every instruction set, type and segment against the functor applied
// to one element after the other.
#include "worker/optim/kernels.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/strings.h"
#include "tests/worker/random_values.h"

namespace zeroshard {
namespace {

constexpr size_t kElements = 900;

struct Tensors {
  DType grad_dtype;
  DType out_dtype;
  std::vector<std::byte> grad;
  std::vector<float> param, state0, state1;
  std::vector<std::byte> out;

  UpdateArrays Arrays() {
    return {.grad = grad.data(),
            .grad_dtype = grad_dtype,
            .param = param.data(),
            .state = {state0.data(), state1.data()},
            .out = out.data(),
            .out_dtype = out_dtype};
  }
};

Tensors RandomTensors(std::mt19937_64& random, Values kind, DType grad_dtype, DType out_dtype) {
  Tensors t;
  t.grad_dtype = grad_dtype;
  t.out_dtype = out_dtype;
  t.grad = Encode(grad_dtype, RandomFloats(random, kElements, kind));
  t.param = RandomFloats(random, kElements, kind);
  t.state0 = RandomFloats(random, kElements, kind, 0.1f);
  t.state1 = RandomFloats(random, kElements, kind, 0.1f);
  if (kind == Values::kOrdinary) {
    for (float& v : t.state1) v *= v;
  }
  t.out = Encode(out_dtype, RandomFloats(random, kElements, kind));
  return t;
}

void UpdateOne(OptimizerKind kind, const UpdateArgs& args, float g, float& p, float& s0,
               float& s1) {
  switch (kind) {
#define ZS_CASE(value, functor)          \
  case OptimizerKind::value:             \
    functor::Update(args, g, p, s0, s1); \
    break;
    ZS_FOR_EACH_OPTIMIZER(ZS_CASE)
#undef ZS_CASE
  }
}

// The contract of kernels.h, element by element.
void Reference(const UpdatePass& pass, Tensors& t, uint64_t begin, uint64_t end) {
  const std::vector<float> grad = Decode(t.grad_dtype, t.grad);
  std::vector<float> out = Decode(t.out_dtype, t.out);
  const int slots = GetOptimizerInfo(pass.kind).state_slots;
  for (const UpdateSegment& segment : pass.segments) {
    for (uint64_t i = std::max(begin, segment.begin); i < std::min(end, segment.end); ++i) {
      float p = t.param[i], s0 = t.state0[i], s1 = t.state1[i];
      UpdateOne(pass.kind, pass.args[segment.args], grad[i] * pass.grad_scale, p, s0, s1);
      t.param[i] = p;
      if (slots > 0) t.state0[i] = s0;
      if (slots > 1) t.state1[i] = s1;
      out[i] = p;
    }
  }
  t.out = Encode(t.out_dtype, out);
}

void ExpectSameBits(const std::vector<float>& a, const std::vector<float>& b, const char* what) {
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(CanonicalBits(a[i]), CanonicalBits(b[i]))
        << what << " " << i << ": " << a[i] << ", " << b[i];
  }
}

std::vector<UpdateArgs> RandomArgs(std::mt19937_64& random, OptimizerKind kind, size_t count) {
  std::vector<UpdateArgs> args;
  for (size_t i = 0; i < count; ++i) {
    Hyperparameters h = {.lr = 1e-3 * static_cast<double>(1 + random() % 9)};
    h.weight_decay = random() % 2 == 0 ? 0.0 : 0.1;
    h.momentum = kind == OptimizerKind::kSgd || random() % 3 == 0 ? 0.0 : 0.9;
    h.nesterov = h.momentum > 0 && random() % 2 == 0;
    h.dampening = h.nesterov ? 0.0 : 0.25;
    args.push_back(MakeUpdateArgs(h, 1 + static_cast<int64_t>(random() % 4)));
  }
  return args;
}

class OptimKernelsTest : public ::testing::TestWithParam<std::tuple<Isa, OptimizerKind>> {};

TEST_P(OptimKernelsTest, EqualsTheFunctorBitForBit) {
  const auto [isa, kind] = GetParam();
  std::mt19937_64 random(1);
  for (DType grad_dtype : kAllDTypes) {
    for (DType out_dtype : kAllDTypes) {
      for (Values values : {Values::kOrdinary, Values::kAny}) {
        Tensors actual = RandomTensors(random, values, grad_dtype, out_dtype);
        Tensors expected = actual;
        std::vector<UpdateSegment> segments;
        for (uint64_t at = random() % 20; at < kElements;) {
          const uint64_t end = std::min<uint64_t>(kElements, at + random() % 260);
          segments.push_back({.begin = at, .end = end, .args = uint32_t(random() % 3)});
          at = end + random() % 3 * 7;
        }
        const auto args = RandomArgs(random, kind, 3);
        UpdatePass pass = {.kind = kind,
                           .arrays = actual.Arrays(),
                           .segments = segments,
                           .args = args,
                           .grad_scale = 0.3f};
        for (uint64_t at = 5; at < kElements;) {  // cut anywhere; the first 5 stay
          const uint64_t end = std::min<uint64_t>(kElements, at + 1 + random() % 300);
          ApplyUpdateOn(isa, pass, at, end);
          at = end;
        }
        Reference(pass, expected, 5, kElements);
        ExpectSameBits(actual.param, expected.param, "param");
        ExpectSameBits(actual.state0, expected.state0, "state 0");
        ExpectSameBits(actual.state1, expected.state1, "state 1");
        ExpectSameBits(Decode(out_dtype, actual.out), Decode(out_dtype, expected.out), "out");
      }
    }
  }
}

TEST_P(OptimKernelsTest, AllInstructionSetsStoreTheSameBytes) {
  const auto [isa, kind] = GetParam();
  std::mt19937_64 random(2);
  for (DType grad_dtype : kAllDTypes) {
    Tensors a = RandomTensors(random, Values::kAny, grad_dtype, DType::kFloat16);
    Tensors b = a;
    const auto args = RandomArgs(random, kind, 1);
    const UpdateSegment all = {.begin = 0, .end = kElements, .args = 0};
    UpdatePass pass = {.kind = kind, .segments = absl::MakeConstSpan(&all, 1), .args = args};
    pass.arrays = a.Arrays();
    ApplyUpdateOn(isa, pass, 0, kElements);
    pass.arrays = b.Arrays();
    ApplyUpdateOn(Isa::kX86V2, pass, 0, kElements);
    EXPECT_EQ(std::memcmp(a.param.data(), b.param.data(), kElements * 4), 0);
    EXPECT_EQ(std::memcmp(a.state0.data(), b.state0.data(), kElements * 4), 0);
    EXPECT_EQ(std::memcmp(a.state1.data(), b.state1.data(), kElements * 4), 0);
    EXPECT_EQ(a.out, b.out);
  }
}

TEST_P(OptimKernelsTest, WorksWithoutAnOutput) {
  const auto [isa, kind] = GetParam();
  std::mt19937_64 random(3);
  Tensors with = RandomTensors(random, Values::kOrdinary, DType::kFloat32, DType::kBfloat16);
  Tensors without = with;
  const auto args = RandomArgs(random, kind, 1);
  const UpdateSegment all = {.begin = 0, .end = kElements, .args = 0};
  UpdatePass pass = {.kind = kind, .segments = absl::MakeConstSpan(&all, 1), .args = args};
  pass.arrays = with.Arrays();
  ApplyUpdateOn(isa, pass, 0, kElements);
  pass.arrays = without.Arrays();
  pass.arrays.out = nullptr;
  ApplyUpdateOn(isa, pass, 0, kElements);
  EXPECT_EQ(with.param, without.param);
  EXPECT_EQ(with.state0, without.state0);
}

INSTANTIATE_TEST_SUITE_P(
    All, OptimKernelsTest,
    ::testing::Combine(::testing::ValuesIn(SupportedIsas()),
                       ::testing::Values(OptimizerKind::kAdamW, OptimizerKind::kAdam,
                                         OptimizerKind::kSgd, OptimizerKind::kSgdMomentum)),
    [](const auto& info) {
      return absl::StrCat("v", 2 + static_cast<int>(std::get<0>(info.param)), "_",
                          Abs(GetOptimizerInfo(std::get<1>(info.param)).name));
    });

}  // namespace
}  // namespace zeroshard
