// Every optimizer with every form of master and states, in the engine: bit-identity over stages,
// workers and windows, absent parameters, checkpoints between forms, and kills inside the update.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/fakes/local_job.h"

namespace zeroshard {
namespace {

using namespace model::v1;  // NOLINT(google-build-using-namespace): the words of the configuration

using Values = std::vector<std::vector<float>>;

// Several parameters share a grain, one is empty, one has many grains.
const std::vector<uint64_t> kSizes = {5, 7, 0, 1, 256, 513, 40000, 100, 3};

struct Form {
  const char* name;
  model::v1::OptimizerKind optimizer;
  std::vector<const char*> slots;
  model::v1::MasterForm master;
  model::v1::StateFormat states;
};

const Form kForms[] = {
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

struct Variant {
  uint32_t stage = 2;
  uint32_t workers = 1;
  uint32_t lanes = 1;
  bool copy = false;
  bool islands = false;
};
constexpr uint32_t kRanks = 2;
constexpr uint32_t kSteps = 4;

LocalJobOptions Options(const Form& form, const Variant& v) {
  LocalJobOptions options;
  options.manifest = MakeManifest(kSizes, DTYPE_BFLOAT16);
  options.config = MakeConfig(v.stage, kRanks, DTYPE_BFLOAT16);
  options.config.set_optimizer(form.optimizer);
  options.config.clear_state_slots();
  for (const char* slot : form.slots) options.config.add_state_slots(slot);
  options.config.set_master_form(form.master);
  options.config.set_state_format(form.states);
  options.config.set_rounding_seed(7);
  options.config.set_sub_group_elements(v.workers * 512);
  options.config.set_gradient_clipping(0.5);
  if (v.copy || v.islands) options.config.set_window(WINDOW_COPY);
  options.islands = v.islands;
  options.workers = v.workers;
  options.lanes = v.lanes;
  return options;
}

// In some steps a rank, or every rank, has no gradient for some parameters.
Values GradientsOf(uint32_t step, uint32_t rank) {
  Values gradients = RandomValues(100 * step + rank + 7);
  for (size_t p = 0; p < gradients.size(); ++p) {
    if ((step == 1 && p % 3 == 0) || (step == 2 && p % 2 == rank)) gradients[p].clear();
  }
  return gradients;
}

void Scatter(LocalJob& job, uint32_t step) {
  for (uint32_t rank = 0; rank < kRanks; ++rank) job.ScatterAll(rank, 0, GradientsOf(step, rank));
  job.Run();
}

void Train(LocalJob& job, uint32_t from, uint32_t to) {
  for (uint32_t step = from; step < to; ++step) {
    Scatter(job, step);
    for (uint32_t rank = 0; rank < kRanks; ++rank) job.Step(rank, 1, 0.01);
    job.Run();
    for (uint32_t rank = 0; rank < kRanks; ++rank) ASSERT_EQ(job.result(rank).step, step + 1);
  }
}

std::string Trained(const Form& form, const Variant& v) {
  LocalJob job(Options(form, v));
  job.PutParameters(RandomValues(1));
  Train(job, 0, kSteps);
  return job.StateBytes();
}

class StateFormTest : public ::testing::TestWithParam<Form> {};

TEST_P(StateFormTest, TrainsBitIdenticallyWhateverTheStageAndTheNumberOfWorkers) {
  const std::string expected = Trained(GetParam(), {});
  std::vector<Variant> variants = {{.stage = 2, .workers = 3, .lanes = 2}};
  for (uint32_t stage : {0u, 1u, 2u, 3u}) {
    if (stage == 0 && GetParam().master == MASTER_FORM_NONE) continue;
    for (uint32_t workers : {1u, 2u, 4u}) variants.push_back({.stage = stage, .workers = workers});
    variants.push_back({.stage = stage, .workers = 3, .islands = true});
  }
  variants.push_back({.stage = 3, .workers = 2, .copy = true});
  for (const Variant& v : variants) {
    ASSERT_TRUE(Trained(GetParam(), v) == expected)
        << "stage " << v.stage << " W " << v.workers << (v.copy ? " copy" : "")
        << (v.islands ? " islands" : "");
  }
}

TEST_P(StateFormTest, TheNextRunDrawsOtherNumbersOnlyWithAnotherSeed) {
  LocalJobOptions options = Options(GetParam(), {});
  options.config.set_rounding_seed(8);
  LocalJob job(std::move(options));
  job.PutParameters(RandomValues(1));
  Train(job, 0, kSteps);
  EXPECT_EQ(job.StateBytes() == Trained(GetParam(), {}), GetParam().master != MASTER_FORM_NONE);
}

// Runs the step in a child process that is killed after `delay`; the successors of its workers
// finish it. Returns whether the kill came before the child was done.
bool KillInTheStep(LocalJob& job, const Variant& v, std::chrono::nanoseconds delay) {
  int ready[2];
  EXPECT_EQ(pipe(ready), 0);
  const pid_t child = fork();
  if (child == 0) {
    if (write(ready[1], "x", 1) != 1) _exit(1);
    job.Run();
    _exit(0);
  }
  char byte;
  EXPECT_EQ(read(ready[0], &byte, 1), 1);
  close(ready[0]);
  close(ready[1]);
  const auto until = std::chrono::steady_clock::now() + delay;
  while (std::chrono::steady_clock::now() < until) {
  }
  kill(child, SIGKILL);
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  for (uint32_t w = 0; w < v.workers; ++w) job.RestartWorker(w);
  for (uint32_t rank = 0; rank < kRanks; ++rank) job.Reconnect(rank);
  job.Run();
  return WIFSIGNALED(status);
}

// ZEROSHARD_KILLS=N: so many kills for each form; a few by default.
TEST_P(StateFormTest, KilledInsideTheUpdateEndsTheSame) {
  int kills = 25;
  if (const char* text = std::getenv("ZEROSHARD_KILLS"); text != nullptr) {
    ASSERT_TRUE(absl::SimpleAtoi(text, &kills)) << text;
  }
  const Variant v{.stage = 2, .workers = 2};
  const std::string expected = Trained(GetParam(), {});
  std::mt19937_64 random(5);
  std::chrono::nanoseconds longest = std::chrono::milliseconds(1);
  int killed = 0;
  for (int round = 0; killed < kills && round < 20 * kills; ++round) {
    LocalJob job(Options(GetParam(), v));
    job.PutParameters(RandomValues(1));
    for (uint32_t step = 0; step < kSteps; ++step) {
      Scatter(job, step);
      for (uint32_t rank = 0; rank < kRanks; ++rank) job.Step(rank, 1, 0.01);
      const bool early = KillInTheStep(
          job, v, std::chrono::nanoseconds(random() % static_cast<uint64_t>(longest.count())));
      killed += early ? 1 : 0;
      // The step takes about as long as the delays from which half of the kills come too late.
      longest = std::clamp<std::chrono::nanoseconds>(early ? longest * 9 / 8 : longest * 7 / 8,
                                                     std::chrono::microseconds(50),
                                                     std::chrono::milliseconds(100));
      ASSERT_EQ(job.result(0).step, step + 1);
    }
    ASSERT_TRUE(job.StateBytes() == expected) << "round " << round;
  }
  EXPECT_GE(killed, kills);
}

INSTANTIATE_TEST_SUITE_P(Forms, StateFormTest, ::testing::ValuesIn(kForms),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace zeroshard
