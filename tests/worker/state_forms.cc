#include "tests/worker/state_forms.h"

#include <gtest/gtest.h>

#include <memory>
#include <random>

namespace zeroshard {
namespace {

using namespace model::v1;  // NOLINT(google-build-using-namespace): the words of the configuration

using Values = std::vector<std::vector<float>>;

// Several parameters share a grain, one is empty, one has many grains.
const std::vector<uint64_t> kSizes = {5, 7, 0, 1, 256, 513, 40000, 100, 3};

const StateForm kForms[] = {
    {"adamw_split",
     OPTIMIZER_ADAMW,
     {"exp_avg", "exp_avg_sq"},
     MASTER_FORM_SPLIT,
     STATE_FORMAT_FLOAT32},
    {"adamw_bf16_states",
     OPTIMIZER_ADAMW,
     {"exp_avg", "exp_avg_sq"},
     MASTER_FORM_SPLIT,
     STATE_FORMAT_BFLOAT16},
    {"adamw_int8_fp32_master",
     OPTIMIZER_ADAMW,
     {"exp_avg", "exp_avg_sq"},
     MASTER_FORM_FLOAT32,
     STATE_FORMAT_INT8},
    {"adam_int8_split",
     OPTIMIZER_ADAM,
     {"exp_avg", "exp_avg_sq"},
     MASTER_FORM_SPLIT,
     STATE_FORMAT_INT8},
    {"adamw_stochastic",
     OPTIMIZER_ADAMW,
     {"exp_avg", "exp_avg_sq"},
     MASTER_FORM_NONE,
     STATE_FORMAT_FLOAT32},
    {"adamw_stochastic_bf16",
     OPTIMIZER_ADAMW,
     {"exp_avg", "exp_avg_sq"},
     MASTER_FORM_NONE,
     STATE_FORMAT_BFLOAT16},
    {"sgd_split", OPTIMIZER_SGD, {}, MASTER_FORM_SPLIT, STATE_FORMAT_FLOAT32},
    {"sgd_momentum_bf16_split",
     OPTIMIZER_SGD,
     {"momentum_buffer"},
     MASTER_FORM_SPLIT,
     STATE_FORMAT_BFLOAT16},
    {"adagrad", OPTIMIZER_ADAGRAD, {"sum"}, MASTER_FORM_FLOAT32, STATE_FORMAT_FLOAT32},
    {"lion_int8_split", OPTIMIZER_LION, {"exp_avg"}, MASTER_FORM_SPLIT, STATE_FORMAT_INT8},
    {"lion_bf16_split", OPTIMIZER_LION, {"exp_avg"}, MASTER_FORM_SPLIT, STATE_FORMAT_BFLOAT16},
};

Values RandomValues(uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  Values values;
  for (uint64_t size : kSizes) {
    values.emplace_back(size);
    for (float& value : values.back()) value = uniform(random);
  }
  return values;
}

// In some steps a rank, or every rank, has no gradient for some parameters.
Values GradientsOf(uint32_t step, uint32_t rank) {
  Values gradients = RandomValues(100 * step + rank + 7);
  for (size_t p = 0; p < gradients.size(); ++p) {
    if ((step == 1 && p % 3 == 0) || (step == 2 && p % 2 == rank)) gradients[p].clear();
  }
  return gradients;
}

}  // namespace

std::span<const StateForm> AllStateForms() { return kForms; }

LocalJobOptions StateOptions(const StateForm& form, const StateVariant& v) {
  LocalJobOptions options;
  options.manifest = MakeManifest(kSizes, DTYPE_BFLOAT16);
  options.config = MakeConfig(v.stage, kStateRanks, DTYPE_BFLOAT16);
  options.config.set_optimizer(form.optimizer);
  options.config.clear_state_slots();
  for (const char* slot : form.slots) options.config.add_state_slots(slot);
  options.config.set_master_form(form.master);
  options.config.set_state_format(form.states);
  options.config.set_rounding_seed(v.seed);
  options.config.set_sub_group_elements(v.workers * 512);
  options.config.set_gradient_clipping(0.5);
  if (v.copy || v.islands) options.config.set_window(WINDOW_COPY);
  if (!v.nvme_paths.empty()) {
    UseNvme(options.config, v.ratio, v.parameters);
    options.config.mutable_nvme()->set_durability(v.durability);
    options.nvme_paths = v.nvme_paths;
  }
  options.islands = v.islands;
  options.workers = v.workers;
  options.lanes = v.lanes;
  return options;
}

std::unique_ptr<LocalJob> StartStateJob(const StateForm& form, const StateVariant& v) {
  return StartStateJob(StateOptions(form, v));
}

std::unique_ptr<LocalJob> StartStateJob(const LocalJobOptions& options) {
  auto job = std::make_unique<LocalJob>(options);
  job->PutParameters(RandomValues(1));
  return job;
}

void ScatterStep(LocalJob& job, uint32_t step) {
  for (uint32_t rank = 0; rank < kStateRanks; ++rank)
    job.ScatterAll(rank, 0, GradientsOf(step, rank));
  job.Run();
}

void TrainSteps(LocalJob& job, uint32_t from, uint32_t to) {
  for (uint32_t step = from; step < to; ++step) {
    ScatterStep(job, step);
    for (uint32_t rank = 0; rank < kStateRanks; ++rank) job.Step(rank, 1, 0.01);
    job.Run();
    for (uint32_t rank = 0; rank < kStateRanks; ++rank) ASSERT_EQ(job.result(rank).step, step + 1);
  }
}

std::string TrainedStates(const StateForm& form, const StateVariant& v, uint32_t steps) {
  const auto job = StartStateJob(form, v);
  TrainSteps(*job, 0, steps);
  return job->StateBytes();
}

}  // namespace zeroshard
