// What the tests of plans share: a manifest, a plan that must be possible, and its ledger.
#ifndef ZEROSHARD_TESTS_SERVER_PLAN_FIXTURE_H_
#define ZEROSHARD_TESTS_SERVER_PLAN_FIXTURE_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/planner.h"

namespace zeroshard {

// A trainable parameter of the module of its name.
inline model::v1::Parameter* AddParameter(model::v1::Manifest& manifest, const std::string& name,
                                          const std::vector<uint64_t>& shape,
                                          model::v1::DType dtype) {
  model::v1::Parameter* parameter = manifest.add_parameters();
  parameter->set_name(name);
  for (const uint64_t size : shape) parameter->add_shape(size);
  parameter->set_dtype(dtype);
  parameter->set_trainable(true);
  parameter->set_module(name);
  return parameter;
}

// Two ranks with one bf16 parameter of 512 * 512 elements: 1024 grains, two chunks of 65,536
// elements for each of two workers on `devices`.
inline PlanInput TwoWorkers(const DsConfig& config, std::vector<std::string> devices) {
  PlanInput input;
  input.config = config;
  AddParameter(input.manifest, "w", {512, 512}, model::v1::DTYPE_BFLOAT16);
  input.manifest.add_groups();
  input.world_size = 2;
  input.local_ranks = 2;
  input.devices = std::move(devices);
  input.nvme_paths = {{.path = "/a"}};
  return input;
}

inline JobPlan Plan(const PlanInput& input) {
  absl::StatusOr<JobPlan> plan = PlanJob(input);
  EXPECT_TRUE(plan.ok()) << plan.status();
  return plan.ok() ? *std::move(plan) : JobPlan();
}

// Bytes by "holder state tier"; whatever the job, all tiers add up.
inline std::map<std::string, uint64_t> Lines(const JobPlan& plan) {
  std::map<std::string, uint64_t> lines;
  std::map<std::string, uint64_t> tiers;
  for (const auto& line : plan.ledger) {
    lines[absl::StrCat(line.holder(), " ", line.state(), " ", line.tier())] += line.bytes();
    tiers[line.tier()] += line.bytes();
  }
  uint64_t gpu = 0;
  for (const GpuBytes& bytes : plan.gpus) gpu += bytes.total();
  EXPECT_EQ(tiers["host"], plan.memory_bytes());
  EXPECT_EQ(tiers["nvme"], plan.nvme_total());
  EXPECT_EQ(tiers["gpu"], gpu);
  return lines;
}

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_SERVER_PLAN_FIXTURE_H_
