// A parameter's values do not depend on who its neighbours are, although sums and updates of small
// ones run over the padding between them: jobs of many tensors against a job for each tensor.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "tests/fakes/local_job.h"

namespace zeroshard {
namespace {

constexpr int kTensors = 40;
constexpr int kSteps = 4;

struct Setting {
  std::string name;
  model::v1::OptimizerKind optimizer = model::v1::OPTIMIZER_ADAMW;
  std::vector<std::string> slots = {"exp_avg", "exp_avg_sq"};
  model::v1::DType dtype = model::v1::DTYPE_FLOAT32;
  model::v1::MasterForm master = model::v1::MASTER_FORM_FLOAT32;
  model::v1::StateFormat states = model::v1::STATE_FORMAT_FLOAT32;
  uint32_t stage = 2;
  uint32_t ranks = 2;
  uint32_t workers = 2;
};

// Values of tensor `tensor` that differ with `seed`.
std::vector<float> Values(uint64_t size, int tensor, int seed) {
  std::mt19937 random(static_cast<uint32_t>(1000 * seed + tensor));
  std::normal_distribution<float> normal;
  std::vector<float> values(size);
  for (float& value : values) value = normal(random);
  return values;
}

// In some steps some tensors have no gradient, and in the last but one only one rank's.
bool HasGradient(int tensor, uint32_t rank, int step) {
  if (step == 1) return tensor % 3 != 0;
  return step != kSteps - 2 || rank == 0 || tensor % 2 == 0;
}

// The tensors of the given numbers after all steps, as one job.
std::vector<std::vector<float>> Train(const Setting& setting, const std::vector<uint64_t>& sizes,
                                      const std::vector<int>& tensors) {
  LocalJobOptions options;
  options.manifest = MakeManifest(sizes, setting.dtype);
  options.config = MakeConfig(setting.stage, setting.ranks, setting.dtype);
  options.config.set_optimizer(setting.optimizer);
  options.config.clear_state_slots();
  for (const std::string& slot : setting.slots) options.config.add_state_slots(slot);
  options.config.set_master_form(setting.master);
  options.config.set_state_format(setting.states);
  options.config.set_rounding_seed(3);
  options.workers = setting.workers;
  LocalJob job(std::move(options));
  for (uint32_t rank = 0; rank < setting.ranks; ++rank) job.Hello(rank, /*reconnect=*/false);
  job.Run();
  std::vector<std::vector<float>> start;
  for (size_t i = 0; i < sizes.size(); ++i) start.push_back(Values(sizes[i], tensors[i], 0));
  job.PutParameters(start);
  for (int step = 0; step < kSteps; ++step) {
    for (uint32_t micro = 0; micro < 2; ++micro) {
      for (uint32_t rank = 0; rank < setting.ranks; ++rank) {
        std::vector<std::vector<float>> gradients;
        for (size_t i = 0; i < sizes.size(); ++i) {
          const int seed = 1 + step * 10 + static_cast<int>(rank * 2 + micro);
          gradients.push_back(HasGradient(tensors[i], rank, step)
                                  ? Values(sizes[i], tensors[i], seed)
                                  : std::vector<float>());
        }
        job.ScatterAll(rank, micro, gradients);
      }
      job.Run();
    }
    std::vector<uint64_t> ids;
    for (uint32_t rank = 0; rank < setting.ranks; ++rank) ids.push_back(job.Step(rank, 2, 1e-2));
    job.Run();
    for (uint32_t rank = 0; rank < setting.ranks; ++rank) EXPECT_TRUE(job.Done(rank, ids[rank]));
  }
  const records::v1::JobState state = job.engine(0).JobState();
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(state.parameter_updates(static_cast<int>(i)),
              tensors[i] % 3 == 0 ? kSteps - 1 : kSteps)
        << "tensor " << tensors[i];
  }
  std::vector<std::vector<float>> values;
  for (uint32_t i = 0; i < sizes.size(); ++i) values.push_back(job.Parameter(i));
  return values;
}

class SmallTensorsTest : public ::testing::TestWithParam<Setting> {};

TEST_P(SmallTensorsTest, EachIsAsIfItWereAlone) {
  std::mt19937 random(11);
  std::vector<uint64_t> sizes;
  std::vector<int> tensors;
  for (int i = 0; i < kTensors; ++i) {
    sizes.push_back(1 + random() % (i % 8 == 0 ? 700 : 30));
    tensors.push_back(i);
  }
  const std::vector<std::vector<float>> together = Train(GetParam(), sizes, tensors);
  for (int i = 0; i < kTensors; ++i) {
    const std::vector<float> alone = Train(GetParam(), {sizes[i]}, {i})[0];
    ASSERT_EQ(alone.size(), together[i].size());
    EXPECT_EQ(std::memcmp(alone.data(), together[i].data(), alone.size() * sizeof(float)), 0)
        << "tensor " << i << " of " << sizes[i] << " elements";
    EXPECT_NE(alone, Values(sizes[i], i, 0));
  }
}

const Setting kSettings[] = {
    {.name = "AdamW"},
    {.name = "AdamWStage0", .stage = 0},
    {.name = "AdamWStage1", .stage = 1, .workers = 3},
    {.name = "AdamWStage3", .stage = 3, .ranks = 3, .workers = 1},
    {.name = "Adam", .optimizer = model::v1::OPTIMIZER_ADAM},
    {.name = "Sgd",
     .optimizer = model::v1::OPTIMIZER_SGD,
     .slots = {"momentum_buffer"},
     .dtype = model::v1::DTYPE_FLOAT16},
    {.name = "Lion", .optimizer = model::v1::OPTIMIZER_LION, .slots = {"exp_avg"}},
    {.name = "Adagrad", .optimizer = model::v1::OPTIMIZER_ADAGRAD, .slots = {"sum"}},
    {.name = "Split", .dtype = model::v1::DTYPE_BFLOAT16, .master = model::v1::MASTER_FORM_SPLIT},
    {.name = "Bf16States", .states = model::v1::STATE_FORMAT_BFLOAT16},
};

INSTANTIATE_TEST_SUITE_P(Forms, SmallTensorsTest, ::testing::ValuesIn(kSettings),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace zeroshard
