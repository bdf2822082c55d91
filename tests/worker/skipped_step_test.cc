// A step that is skipped because of an overflow leaves no trace but the loss scale: a run with such
// steps in it ends, bit for bit, like the run without them.
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/fakes/local_job.h"

namespace zeroshard {
namespace {

using Values = std::vector<std::vector<float>>;

const std::vector<uint64_t> kSizes = {5, 0, 300, 4000};
constexpr uint32_t kRanks = 2;

// Multiples of 1/256: products with any scale of the test are exact in fp16.
Values ExactValues(uint32_t seed) {
  std::mt19937 random(seed);
  Values values;
  for (const uint64_t size : kSizes) {
    values.emplace_back(size);
    for (float& value : values.back()) {
      value = static_cast<float>(static_cast<int>(random() % 257) - 128) / 256.0f;
    }
  }
  return values;
}

LocalJobOptions Options(uint32_t stage, uint32_t workers) {
  LocalJobOptions options;
  options.manifest = MakeManifest(kSizes, model::v1::DTYPE_FLOAT16);
  options.config = MakeConfig(stage, kRanks, model::v1::DTYPE_FLOAT16);
  options.config.set_gradient_clipping(0.5);
  model::v1::LossScale& scale = *options.config.mutable_loss_scale();
  scale.set_dynamic(true);
  scale.set_initial(1024.0);
  scale.set_window(1000);
  scale.set_hysteresis(1);
  scale.set_minimum(1.0);
  options.workers = workers;
  return options;
}

enum class Kind { kGood, kInfinity, kNan };

// One step of all ranks. In a bad one, one element of one rank is not finite.
void TakeStep(LocalJob& job, uint32_t seed, Kind kind, std::mt19937& random) {
  const double scale = job.memory(0).board().numbers().loss_scale;
  const uint32_t bad_rank = random() % kRanks;
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    Values gradients = ExactValues(seed * kRanks + rank);
    for (auto& tensor : gradients) {
      for (float& value : tensor) value *= static_cast<float>(scale);
    }
    if (kind != Kind::kGood && rank == bad_rank) {
      std::vector<float>& tensor = gradients[random() % 2 == 0 ? 0 : 3];
      tensor[random() % tensor.size()] = kind == Kind::kNan
                                             ? std::numeric_limits<float>::quiet_NaN()
                                             : -std::numeric_limits<float>::infinity();
    }
    job.ScatterAll(rank, 0, gradients);
  }
  for (uint32_t rank = 0; rank < kRanks; ++rank) job.Step(rank, 1, 0.01);
  job.Run();
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    EXPECT_TRUE(job.failures(rank).empty());
    EXPECT_EQ(job.result(rank).skipped, kind == Kind::kGood ? 0u : 1u);
    EXPECT_EQ(job.result(rank).norm_valid, kind == Kind::kGood ? 1u : 0u);
  }
}

TEST(SkippedStepTest, LeavesNoTraceButTheScale) {
  constexpr Kind kRun[] = {Kind::kInfinity, Kind::kGood, Kind::kGood, Kind::kNan,
                           Kind::kInfinity, Kind::kGood, Kind::kNan,  Kind::kGood};
  for (uint32_t stage = 0; stage <= 3; ++stage) {
    for (const uint32_t workers : {1u, 2u}) {
      SCOPED_TRACE(testing::Message() << "stage " << stage << " W " << workers);
      std::mt19937 random(stage * 2 + workers);
      LocalJob plain(Options(stage, workers));
      LocalJob disturbed(Options(stage, workers));
      plain.PutParameters(ExactValues(1000));
      disturbed.PutParameters(ExactValues(1000));
      double scale = 1024.0;
      uint32_t good = 0;
      for (const Kind kind : kRun) {
        if (kind == Kind::kGood) {
          TakeStep(plain, ++good, kind, random);
          TakeStep(disturbed, good, kind, random);
        } else {
          const std::string before = disturbed.StateBytes();
          TakeStep(disturbed, 500, kind, random);
          EXPECT_TRUE(disturbed.StateBytes() == before);
          scale /= 2;
        }
        EXPECT_TRUE(disturbed.StateBytes() == plain.StateBytes());
      }
      EXPECT_EQ(disturbed.result(0).updates, good);
      EXPECT_EQ(disturbed.result(0).step, std::size(kRun));
      EXPECT_EQ(disturbed.result(0).loss_scale, scale);
      EXPECT_EQ(disturbed.result(0).grad_norm, plain.result(0).grad_norm);
      for (uint32_t parameter = 0; parameter < kSizes.size(); ++parameter) {
        EXPECT_EQ(disturbed.Parameter(parameter), plain.Parameter(parameter));
      }
    }
  }
}

TEST(SkippedStepTest, AtTheMinimumAllRanksGetTheErrorAndNothingChanges) {
  LocalJobOptions options = Options(3, 2);
  options.config.mutable_loss_scale()->set_initial(2.0);
  LocalJob job(std::move(options));
  job.PutParameters(ExactValues(1000));
  std::mt19937 random(1);
  TakeStep(job, 1, Kind::kGood, random);
  TakeStep(job, 2, Kind::kInfinity, random);
  const std::string before = job.StateBytes();
  const JobNumbers numbers = job.memory(0).board().numbers();
  ASSERT_EQ(numbers.loss_scale, 1.0);
  Values bad = ExactValues(3);
  bad[3][77] = std::numeric_limits<float>::infinity();
  job.ScatterAll(0, 0, ExactValues(3));
  job.ScatterAll(1, 0, bad);
  for (uint32_t rank = 0; rank < kRanks; ++rank) job.Step(rank, 1, 0.01);
  job.Run();
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    ASSERT_FALSE(job.failures(rank).empty()) << rank;
    const std::string message = job.failures(rank).back().message();
    EXPECT_NE(message.find("at its minimum of 1 (fp16.min_loss_scale)"), std::string::npos)
        << message;
  }
  EXPECT_TRUE(job.StateBytes() == before);
  EXPECT_EQ(job.memory(0).board().numbers().step, numbers.step);
  EXPECT_EQ(job.memory(0).board().numbers().loss_scale, 1.0);
}

}  // namespace
}  // namespace zeroshard
