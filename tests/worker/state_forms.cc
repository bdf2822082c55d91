#include "tests/worker/state_forms.h"

#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

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

size_t DamageParameters(LocalJob& job, uint32_t worker, const std::string& path, size_t images) {
  constexpr size_t kBlock = 4096;
  constexpr size_t kImageAt = 56;  // its number in a header, see docs/nvme.md
  const NvmePlan& plan = *job.memory(worker).nvme_plan();
  const std::string name = absl::StrCat(".w", worker, ".p0.extent");
  std::string file;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path)) {
    if (absl::StrContains(entry.path().string(), name)) file = entry.path().string();
  }
  std::fstream extent(file, std::ios::binary | std::ios::in | std::ios::out);
  EXPECT_TRUE(extent.is_open()) << name;
  std::string all(std::filesystem::file_size(file), 0);
  extent.read(all.data(), static_cast<std::streamsize>(all.size()));
  std::set<uint32_t> damaged;
  for (size_t at = 0; at + kBlock < all.size(); at += kBlock) {
    if (all.compare(at, 8, "ZSCHUNK1") != 0) continue;
    uint32_t image = 0;
    std::memcpy(&image, all.data() + at + kImageAt, sizeof(image));
    if (!plan.images()[image].parameters) continue;
    if (damaged.size() == images && !damaged.contains(image)) continue;
    damaged.insert(image);
    extent.seekp(static_cast<std::streamoff>(at + kBlock));
    extent.put(static_cast<char>(all[at + kBlock] ^ 1));
  }
  return damaged.size();
}

uint64_t GatherAll(LocalJob& job, uint32_t rank) {
  trainer::v1::SessionRequest request;
  for (uint32_t unit = 0; unit < job.layout().units().size(); ++unit) {
    request.mutable_gather()->add_units(unit);
  }
  return job.Send(rank, request);
}

std::vector<float> WindowOf(const LocalJob& job, uint32_t island) {
  std::vector<float> all;
  for (uint32_t p = 0; p < kSizes.size(); ++p) {
    const std::vector<float> values = job.Parameter(p, island);
    all.insert(all.end(), values.begin(), values.end());
  }
  return all;
}

std::string TrainedStates(const StateForm& form, const StateVariant& v, uint32_t steps) {
  const auto job = StartStateJob(form, v);
  TrainSteps(*job, 0, steps);
  return job->StateBytes();
}

}  // namespace zeroshard
