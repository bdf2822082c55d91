#include "worker/nvme_tier.h"

#include <string>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/tier_fixture.h"

namespace zeroshard {
namespace {

// Every combination of the aio block on both backends: the same bytes.
using Aio = std::tuple<IoBackend, bool, bool, bool, bool, uint64_t, uint32_t>;

class NvmeTierAioTest : public ::testing::TestWithParam<Aio> {};

INSTANTIATE_TEST_SUITE_P(
    All, NvmeTierAioTest,
    ::testing::Combine(::testing::Values(IoBackend::kUring, IoBackend::kThreads), ::testing::Bool(),
                       ::testing::Bool(), ::testing::Bool(), ::testing::Bool(),
                       ::testing::Values(4096, 1 << 20), ::testing::Values(1, 4)));

TEST_P(NvmeTierAioTest, StepsGiveTheSameBytes) {
  TierJob job({.paths = 2});
  const auto& [backend, read, write, submit, overlap, block, depth] = GetParam();
  job.options().backend = backend;
  job.options().config.set_pipeline_read(read);
  job.options().config.set_pipeline_write(write);
  job.options().config.set_single_submit(submit);
  job.options().config.set_overlap_events(overlap);
  job.options().config.set_block_bytes(block);
  job.options().config.set_queue_depth(depth);
  ASSERT_EQ(job.Open(), absl::OkStatus());
  ASSERT_EQ(job.Fill(), absl::OkStatus());
  ASSERT_EQ(job.Check(), absl::OkStatus());
  for (uint64_t attempt = 1; attempt < 4; ++attempt) {
    ASSERT_EQ(job.StepAndCommit(attempt), absl::OkStatus());
    ASSERT_EQ(job.Check(), absl::OkStatus());
  }
  EXPECT_EQ(job.Open(/*recover=*/true, 3), absl::OkStatus());
  EXPECT_EQ(job.Check(), absl::OkStatus());
}

}  // namespace
}  // namespace zeroshard
