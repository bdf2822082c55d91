// A job of small units for the tests of the engine, and how it is trained.
#ifndef ZEROSHARD_TESTS_WORKER_ENGINE_FIXTURE_H_
#define ZEROSHARD_TESTS_WORKER_ENGINE_FIXTURE_H_

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/fakes/local_job.h"

namespace zeroshard {

using Values = std::vector<std::vector<float>>;

inline const std::vector<uint64_t> kSizes = {5, 7, 0, 1, 256, 513, 40000, 100, 3};

inline Values RandomValues(const std::vector<uint64_t>& sizes, uint32_t seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  Values values;
  for (uint64_t size : sizes) {
    values.emplace_back(size);
    for (float& value : values.back()) value = uniform(random);
  }
  return values;
}

struct Variant {
  uint32_t stage = 3;
  uint32_t workers = 1;
  uint32_t ranks = 2;
  uint32_t micro_steps = 1;
  uint64_t sub_group = 0;
  bool copy = false;
  bool islands = false;
  bool ranks_first = true;
  model::v1::DType dtype = model::v1::DTYPE_BFLOAT16;
};

inline std::string Describe(const Variant& v) {
  return absl::StrCat("stage ", v.stage, " W ", v.workers, " R ", v.ranks, " A ", v.micro_steps,
                      " sub ", v.sub_group, v.copy ? " copy" : "", v.islands ? " islands" : "",
                      " dtype ", static_cast<int>(v.dtype));
}

inline LocalJobOptions Options(const Variant& v) {
  LocalJobOptions options;
  options.manifest = MakeManifest(kSizes, v.dtype);
  options.config = MakeConfig(v.stage, v.ranks, v.dtype);
  options.config.set_accumulation_steps(v.micro_steps);
  options.config.set_sub_group_elements(v.sub_group);
  options.config.set_ranks_first(v.ranks_first);
  options.config.set_gradient_clipping(0.5);
  options.config.set_reduction_group(2);
  options.islands = v.islands;
  if (v.copy || v.islands) options.config.set_window(model::v1::WINDOW_COPY);
  options.workers = v.workers;
  return options;
}

inline Values GradientsOf(uint32_t step, uint32_t micro, uint32_t rank) {
  return RandomValues(kSizes, 1000 * step + 100 * micro + rank + 7);
}

inline trainer::v1::SessionRequest GatherOf(std::vector<uint32_t> units, bool alone = false) {
  trainer::v1::SessionRequest request;
  for (uint32_t unit : units) request.mutable_gather()->add_units(unit);
  request.mutable_gather()->set_alone(alone);
  return request;
}

// Trains two steps; ranks take turns in an order that depends on the step.
inline std::string Train(const Variant& v) {
  LocalJob job(Options(v));
  job.PutParameters(RandomValues(kSizes, 1));
  for (uint32_t step = 0; step < 2; ++step) {
    std::vector<uint64_t> ids(v.ranks);
    for (uint32_t micro = 0; micro < v.micro_steps; ++micro) {
      for (uint32_t i = 0; i < v.ranks; ++i) {
        const uint32_t rank = (i + step) % v.ranks;
        job.ScatterAll(rank, micro, GradientsOf(step, micro, rank));
      }
      job.Run();
    }
    for (uint32_t rank = 0; rank < v.ranks; ++rank) ids[rank] = job.Step(rank, v.micro_steps, 0.01);
    job.Run();
    for (uint32_t rank = 0; rank < v.ranks; ++rank) {
      EXPECT_TRUE(job.Done(rank, ids[rank])) << Describe(v) << " step " << step;
      EXPECT_EQ(job.result(rank).step, step + 1);
      EXPECT_EQ(job.result(rank).norm_valid, 1u);
    }
  }
  return job.StateBytes();
}

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_WORKER_ENGINE_FIXTURE_H_
