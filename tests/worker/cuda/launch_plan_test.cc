// What launches are cut into, and what they refuse.
#include "worker/cuda/launch_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "tests/fakes/cuda/host_kernels.h"
#include "worker/reduction_tree.h"

namespace zeroshard {
namespace {

std::string Refusal(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

UpdateLaunch GoodUpdate() {
  UpdateLaunch launch;
  launch.elements = 4096;
  launch.grad = 0x10000;
  launch.master = {0x20000, 0x30000};
  launch.state[0] = {0x40000, 0x50000};
  launch.state[1] = {0x60000, 0x70000};
  launch.scales[0] = {0x80000, 0x80100};
  launch.scales[1] = {0x80200, 0x80300};
  launch.parameter = 0x90000;
  return launch;
}

TEST(KernelNamesTest, AreThoseOfTheKernels) {
  ASSERT_EQ(HostKernels().size(), gpu::KernelNames().size());
  for (size_t i = 0; i < HostKernels().size(); ++i) {
    EXPECT_STREQ(HostKernels()[i].name, gpu::KernelNames()[i]);
  }
}

TEST(PlanUpdateTest, JoinsSegmentsThatTouchAndCutsWhatDoesNotFit) {
  UpdateLaunch launch = GoodUpdate();
  launch.first = 256;
  std::vector<UpdateSegment> segments;
  const std::vector<UpdateArgs> args(3);
  for (uint64_t at = 0; at < 8192; at += 32) {  // of those within, half touch the next
    segments.push_back({at, at + (at % 64 == 0 ? 32 : 30), static_cast<uint32_t>(at / 64 % 3)});
  }
  launch.segments = segments;
  launch.args = args;
  const auto calls = gpu::PlanUpdates({&launch, 1});
  ASSERT_TRUE(calls.ok()) << calls.status();
  ASSERT_EQ(calls->size(), 1u);
  EXPECT_EQ((*calls)[0].params.chunk[0].runs, 64u);
  EXPECT_EQ((*calls)[0].params.chunk[0].first, 256u);
  EXPECT_EQ((*calls)[0].blocks, 4u);
  EXPECT_EQ((*calls)[0].params.run[0].end, 62u);

  for (UpdateSegment& segment : segments) segment.end = segment.begin + 30;
  const auto cut = gpu::PlanUpdates({&launch, 1});
  ASSERT_TRUE(cut.ok()) << cut.status();
  ASSERT_EQ(cut->size(), 2u);
  const gpu::UpdateChunk& second = (*cut)[1].params.chunk[0];
  EXPECT_EQ((*cut)[0].params.chunk[0].elements + second.elements, 4096u);
  EXPECT_EQ(second.first, 256 + 64 * 32u);
  EXPECT_EQ(second.master_after, 0x30000 + 64 * 32 * sizeof(float));
  EXPECT_EQ(second.parameter, 0x90000 + 64 * 32 * sizeof(uint16_t));
  EXPECT_EQ((*cut)[1].params.run[0].begin, 0u);
}

TEST(PlanUpdateTest, ChunksThatAreAlikeShareACall) {
  std::vector<UpdateLaunch> launches(10, GoodUpdate());
  const std::vector<UpdateArgs> args(1);
  const std::vector<UpdateSegment> segments = {{0, 4096, 0}};
  for (UpdateLaunch& launch : launches) launch.segments = segments, launch.args = args;
  launches[3].elements = 8192;
  auto calls = gpu::PlanUpdates(launches);
  ASSERT_TRUE(calls.ok()) << calls.status();
  ASSERT_EQ(calls->size(), 2u);
  EXPECT_EQ((*calls)[0].rows, 8u);
  EXPECT_EQ((*calls)[0].blocks, 8192 / 4 / 256u);
  EXPECT_EQ((*calls)[0].params.chunk[7].first_run, 7u);
  EXPECT_EQ((*calls)[1].rows, 2u);
  EXPECT_EQ((*calls)[1].blocks, 4096 / 4 / 256u);

  launches[5].grad_scale = 2.0f;  // and its neighbours must not
  calls = gpu::PlanUpdates(launches);
  ASSERT_TRUE(calls.ok()) << calls.status();
  ASSERT_EQ(calls->size(), 3u);
  EXPECT_EQ((*calls)[0].rows, 5u);
  EXPECT_EQ((*calls)[1].rows, 1u);
  EXPECT_EQ((*calls)[1].params.grad_scale, 2.0f);
}

// The second chunk begins with arguments for which the first one's call has no place.
TEST(PlanUpdateTest, AChunkThatDoesNotFitAtAllBeginsTheNextCall) {
  std::vector<UpdateLaunch> launches(2, GoodUpdate());
  const std::vector<UpdateArgs> args(17);
  std::vector<UpdateSegment> segments;
  for (uint32_t i = 0; i < 16; ++i) segments.push_back({i * 32u, i * 32u + 16, i});
  const std::vector<UpdateSegment> others = {{0, 16, 16}};
  launches[0].segments = segments;
  launches[1].segments = others;
  launches[0].args = launches[1].args = args;
  const auto calls = gpu::PlanUpdates(launches);
  ASSERT_TRUE(calls.ok()) << calls.status();
  ASSERT_EQ(calls->size(), 2u);
  EXPECT_EQ((*calls)[0].rows, 1u);
  EXPECT_EQ((*calls)[1].rows, 1u);
  EXPECT_EQ((*calls)[1].params.chunk[0].elements, 4096u);
}

// What has no master, which is twice the elements a thread; 8-bit states keep their kernel.
TEST(PlanUpdateTest, ParametersWithoutAMasterHaveKernelsOfTheirOwn) {
  const std::vector<UpdateArgs> args(1);
  std::vector<UpdateSegment> segments;
  for (uint32_t i = 0; i < 65; ++i) segments.push_back({i * 32u, i * 32u + 16, 0});
  UpdateLaunch launch = GoodUpdate();
  launch.master_kind = MasterKind::kStochastic;
  launch.random_key = 77;
  launch.segments = segments;
  launch.args = args;
  for (const auto& [format, name] : {std::pair{StateFormat::kFloat32, "zs_update_AdamW_none_fp32"},
                                     {StateFormat::kBfloat16, "zs_update_AdamW_none_bf16"},
                                     {StateFormat::kInt8, "zs_update_AdamW_int8"}}) {
    launch.state_format = format;
    const auto calls = gpu::PlanUpdates({&launch, 1});
    ASSERT_TRUE(calls.ok()) << calls.status();
    ASSERT_EQ(calls->size(), 2u);
    const auto& second = (*calls)[1];
    EXPECT_STREQ(gpu::KernelNames()[second.kernel], name);
    EXPECT_EQ((*calls)[0].blocks, 64 * 32 / (format == StateFormat::kInt8 ? 4 : 8) / 256u);
    EXPECT_EQ(second.params.chunk[0].master_after, 0x30000 + 64 * 32 * sizeof(uint16_t));
    EXPECT_EQ(second.params.chunk[0].parameter, 0x90000 + 64 * 32 * sizeof(uint16_t));
    EXPECT_EQ(second.params.chunk[0].random_key, 77u);
  }
  launch.kind = OptimizerKind::kSgd;
  EXPECT_STREQ(gpu::KernelNames()[(*gpu::PlanUpdates({&launch, 1}))[0].kernel],
               "zs_update_Sgd_none_fp32");
}

TEST(PlanUpdateTest, CoversARangeWithoutSegments) {
  const auto calls = gpu::PlanUpdates({GoodUpdate()});
  ASSERT_TRUE(calls.ok()) << calls.status();
  ASSERT_EQ(calls->size(), 1u);
  EXPECT_EQ((*calls)[0].params.chunk[0].runs, 0u);
  EXPECT_EQ((*calls)[0].params.chunk[0].elements, 4096u);
}

TEST(PlanUpdateTest, RefusesWhatHasNoKernel) {
  const auto refusal = [](auto change) {
    UpdateLaunch launch = GoodUpdate();
    change(launch);
    return Refusal(gpu::PlanUpdates({&launch, 1}).status());
  };
  const std::vector<UpdateSegment> odd = {{24, 48, 0}};
  const std::vector<UpdateSegment> crossing = {{0, 48, 0}, {32, 64, 0}};
  const std::vector<UpdateSegment> unknown = {{0, 48, 1}};
  const std::vector<UpdateArgs> args(1);
  EXPECT_THAT(refusal([](auto& l) { l.elements = 4090; }), testing::HasSubstr("multiples of 16"));
  EXPECT_THAT(refusal([](auto& l) { l.elements = 0; }), testing::HasSubstr("0 elements"));
  EXPECT_THAT(refusal([](auto& l) { l.elements = uint64_t{1} << 31; }),
              testing::HasSubstr("at once"));
  EXPECT_THAT(refusal([](auto& l) { l.master_kind = MasterKind::kSplit; }),
              testing::HasSubstr("split"));
  EXPECT_THAT(refusal([](auto& l) {
                l.master_kind = MasterKind::kStochastic;
                l.parameter_dtype = DType::kFloat16;
              }),
              testing::HasSubstr("not bf16"));
  EXPECT_THAT(refusal([](auto& l) { l.grad = 0; }), testing::HasSubstr("without gradient"));
  EXPECT_THAT(refusal([](auto& l) { l.state[1].after = 0x70008; }),
              testing::HasSubstr("state at address 70008"));
  EXPECT_THAT(refusal([](auto& l) {
                l.kind = OptimizerKind::kAdagrad;
                l.state_format = StateFormat::kInt8;
              }),
              testing::HasSubstr("without 8-bit"));
  EXPECT_THAT(refusal([&](auto& l) { l.segments = odd, l.args = args; }),
              testing::HasSubstr("[24, 48)"));
  EXPECT_THAT(refusal([&](auto& l) { l.segments = crossing, l.args = args; }),
              testing::HasSubstr("[32, 64)"));
  EXPECT_THAT(refusal([&](auto& l) { l.segments = unknown, l.args = args; }),
              testing::HasSubstr("arguments 1 of 1"));
}

TEST(PlanSumTest, ChoosesTheKernel) {
  const auto kernel = [](uint32_t ranks, DType first, DType others) {
    const ReductionProgram program = ReductionTree::Create(ranks, ranks)->RankPlan().Program();
    std::vector<SumInput> inputs(ranks, SumInput{.data = 0x1000, .dtype = others});
    inputs[0].dtype = first;
    const auto call = gpu::PlanSum({.inputs = inputs,
                                    .program = &program,
                                    .parameters = 0x2000,
                                    .parameter_count = 1,
                                    .elements = 16,
                                    .accumulator = 0x3000});
    EXPECT_TRUE(call.ok()) << call.status();
    return std::string(gpu::KernelNames()[call->kernel]);
  };
  EXPECT_EQ(kernel(1, DType::kFloat32, DType::kFloat32), "zs_sum_any");
  EXPECT_EQ(kernel(8, DType::kBfloat16, DType::kBfloat16), "zs_sum_bf16");
  EXPECT_EQ(kernel(9, DType::kFloat16, DType::kFloat16), "zs_sum_fp16");
  EXPECT_EQ(kernel(8, DType::kFloat32, DType::kBfloat16), "zs_sum_any");
  EXPECT_EQ(kernel(64, DType::kBfloat16, DType::kBfloat16), "zs_sum_any_deep");
}

// Whatever ranks and group, the stack suffices.
TEST(PlanSumTest, TakesEveryTreeOf64Ranks) {
  for (uint32_t ranks = 1; ranks <= 64; ++ranks) {
    for (uint32_t group = 1; group <= ranks; ++group) {
      const ReductionProgram program = ReductionTree::Create(ranks, group)->RankPlan().Program();
      EXPECT_LE(program.stack_depth, gpu::kDeepStack) << ranks << " in groups of " << group;
    }
  }
}

TEST(PlanSumTest, RefusesTooManyInputsAndProgramsOfOthers) {
  const ReductionProgram program = ReductionTree::Create(65, 65)->RankPlan().Program();
  const std::vector<SumInput> inputs(65, SumInput{.data = 0x1000});
  SumLaunch launch{.inputs = inputs,
                   .program = &program,
                   .parameters = 0x2000,
                   .parameter_count = 1,
                   .elements = 16,
                   .accumulator = 0x3000};
  EXPECT_THAT(Refusal(gpu::PlanSum(launch).status()), testing::HasSubstr("65 inputs"));
  launch.inputs = absl::MakeConstSpan(inputs).first(64);
  EXPECT_THAT(Refusal(gpu::PlanSum(launch).status()), testing::HasSubstr("its program's 65"));
  launch.program = nullptr;
  EXPECT_THAT(Refusal(gpu::PlanSum(launch).status()), testing::HasSubstr("its program's 0"));
}

TEST(PlanOthersTest, RefuseMissingAddresses) {
  EXPECT_THAT(Refusal(gpu::PlanSquares({.elements = 256}).status()),
              testing::HasSubstr("without accumulator"));
  EXPECT_THAT(Refusal(gpu::PlanSquares({.accumulator = 16, .elements = 16}).status()),
              testing::HasSubstr("multiples of 256"));
  EXPECT_THAT(Refusal(gpu::PlanMergePresence({}).status()), testing::HasSubstr("presence"));
  EXPECT_THAT(Refusal(gpu::PlanConvert({.from = 8, .to = 16, .elements = 1}).status()),
              testing::HasSubstr("source at address 8"));
}

}  // namespace
}  // namespace zeroshard
