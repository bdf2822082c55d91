// The engine over real regions in one process: bit-identity over stages, workers, windows and chunk
// sizes, and what requests do.
#include "worker/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "tests/worker/engine_fixture.h"

namespace zeroshard {
namespace {

TEST(EngineTest, TrainsBitIdenticallyWhateverTheStageAndTheNumberOfWorkers) {
  for (model::v1::DType dtype :
       {model::v1::DTYPE_BFLOAT16, model::v1::DTYPE_FLOAT16, model::v1::DTYPE_FLOAT32}) {
    for (uint32_t ranks : {1u, 2u, 3u, 4u, 6u}) {
      for (uint32_t micro_steps : {1u, 3u}) {
        Variant reference{
            .stage = 2, .workers = 1, .ranks = ranks, .micro_steps = micro_steps, .dtype = dtype};
        const std::string expected = Train(reference);
        for (uint32_t stage : {0u, 1u, 2u, 3u}) {
          for (uint32_t workers : {1u, 2u, 3u, 4u}) {
            Variant v = reference;
            v.stage = stage;
            v.workers = workers;
            v.sub_group = workers * 256;
            ASSERT_TRUE(Train(v) == expected) << Describe(v);
            v.islands = true;
            ASSERT_TRUE(Train(v) == expected) << Describe(v);
          }
        }
        Variant v = reference;
        v.stage = 3;
        v.workers = 3;
        v.copy = true;
        ASSERT_TRUE(Train(v) == expected) << Describe(v);
      }
    }
  }
}

TEST(EngineTest, StageOneAccumulatesEveryRankFirstUnlessToldOtherwise) {
  // fp32: sums of a few bf16 numbers are exact in any order.
  Variant v{.stage = 1,
            .workers = 2,
            .ranks = 3,
            .micro_steps = 3,
            .ranks_first = false,
            .dtype = model::v1::DTYPE_FLOAT32};
  const std::string local = Train(v);
  v.workers = 1;
  EXPECT_TRUE(Train(v) == local);
  v.ranks_first = true;
  EXPECT_FALSE(Train(v) == local) << "the two orders differ in some bit";
  v.micro_steps = 1;
  Variant other = v;
  other.ranks_first = false;
  EXPECT_TRUE(Train(v) == Train(other)) << "with one micro-step there is one order";
}

// Trains with a worker restarted (or the mesh broken) after every micro-step, before others have
// summed it.
std::string TrainWithRestarts(const Variant& v) {
  LocalJob job(Options(v));
  job.PutParameters(RandomValues(kSizes, 1));
  for (uint32_t step = 0; step < 2; ++step) {
    for (uint32_t micro = 0; micro < v.micro_steps; ++micro) {
      const uint32_t victim = micro % v.workers;
      for (uint32_t i = 0; i < v.ranks; ++i) {
        const uint32_t rank = (i + step) % v.ranks;
        job.ScatterAll(rank, micro, GradientsOf(step, micro, rank));
        job.Run();
        job.RestartWorker(victim);
        for (uint32_t other = 0; other < v.ranks; ++other) {
          if (other % v.workers == victim) job.Hello(other, /*reconnect=*/true);
        }
        job.Run();
      }
    }
    for (uint32_t rank = 0; rank < v.ranks; ++rank) {
      job.Step(rank, v.micro_steps, 0.01);
      if (rank + 1 < v.ranks) job.Run();
      if (v.islands) job.BreakMesh();
    }
    job.Run();
    EXPECT_EQ(job.result(0).step, step + 1) << Describe(v);
  }
  return job.StateBytes();
}

TEST(EngineTest, ARestartedWorkerChangesNothing) {
  for (bool islands : {false, true}) {
    for (uint32_t stage : {1u, 2u, 3u}) {
      const Variant v{
          .stage = stage, .workers = 2, .ranks = 3, .micro_steps = 3, .islands = islands};
      EXPECT_TRUE(TrainWithRestarts(v) == Train(v)) << Describe(v);
    }
  }
}

TEST(EngineTest, EveryIslandSeesAllParameters) {
  for (uint32_t stage : {2u, 3u}) {
    LocalJob job(Options({.stage = stage, .workers = 3, .ranks = 3, .islands = true}));
    const Values values = RandomValues(kSizes, 1);
    job.PutParameters(values);
    for (uint32_t rank = 0; rank < 3; ++rank) {
      trainer::v1::SessionRequest request;
      for (uint32_t unit = 0; unit < job.layout().units().size(); ++unit)
        request.mutable_gather()->add_units(unit);
      const uint64_t id = job.Send(rank, request);
      job.Run();
      ASSERT_TRUE(job.Done(rank, id)) << "stage " << stage << " rank " << rank;
      for (uint32_t p = 0; p < kSizes.size(); ++p) {
        const std::vector<float> got = job.Parameter(p, rank);
        for (size_t i = 0; i < got.size(); ++i)
          ASSERT_NEAR(got[i], values[p][i], 0.01) << p << " " << i;
      }
    }
  }
}

TEST(EngineTest, SwappedGathersNameBothRanksAndBothUnits) {
  LocalJob job(Options({.stage = 3, .workers = 2, .ranks = 2}));
  job.PutParameters(RandomValues(kSizes, 1));
  const uint32_t units = static_cast<uint32_t>(job.layout().units().size());
  ASSERT_GE(units, 2u);
  EXPECT_TRUE(job.Done(0, job.Send(0, GatherOf({0}))) || true);
  job.Send(0, GatherOf({1}));
  job.Send(1, GatherOf({1}));
  job.Run();
  for (uint32_t rank = 0; rank < 2; ++rank) {
    ASSERT_FALSE(job.failures(rank).empty()) << "rank " << rank;
    const std::string& text = job.failures(rank).back().message();
    EXPECT_NE(text.find("unit 0 (m0) on rank 0 but unit 1 (m"), std::string::npos) << text;
    EXPECT_NE(text.find("on rank 1"), std::string::npos) << text;
  }
  // Whoever asks afterwards learns the same.
  job.Send(1, GatherOf({0}));
  EXPECT_EQ(job.failures(1).back().id(), 2u);
}

TEST(EngineTest, GathersAloneAreInNoOrder) {
  LocalJob job(Options({.stage = 3, .workers = 1, .ranks = 2}));
  job.PutParameters(RandomValues(kSizes, 1));
  const uint64_t a = job.Send(0, GatherOf({0}, true));
  const uint64_t b = job.Send(1, GatherOf({1}, true));
  job.Run();
  EXPECT_TRUE(job.Done(0, a));
  EXPECT_TRUE(job.Done(1, b));
}

TEST(EngineTest, ExpertsThatOnlySomeRanksUse) {
  // e0: rank 0; e1: both; e2: rank 1; e3: nobody. Mean over the world; what nobody used is not
  // touched.
  LocalJobOptions options;
  options.manifest = MakeManifest({40000, 40000, 40000, 40000}, model::v1::DTYPE_FLOAT32);
  options.config = MakeConfig(3, 2, model::v1::DTYPE_FLOAT32);
  options.config.set_optimizer(model::v1::OPTIMIZER_SGD);
  options.config.clear_state_slots();
  options.workers = 2;
  LocalJob job(std::move(options));
  const Values ones(4, std::vector<float>(40000, 1.0f));
  job.PutParameters(ones);
  const std::vector<float> g(40000, 0.5f);
  job.ScatterAll(0, 0, {g, g, {}, {}});
  job.ScatterAll(1, 0, {{}, g, g, {}});
  auto step = [&](uint32_t rank) {
    trainer::v1::SessionRequest request;
    request.mutable_step()->set_micro_steps(1);
    request.mutable_step()->add_groups()->set_lr(1.0);
    return job.Send(rank, request);
  };
  const uint64_t a = step(0);
  const uint64_t b = step(1);
  job.Run();
  EXPECT_TRUE(job.Done(0, a));
  EXPECT_TRUE(job.Done(1, b));
  EXPECT_EQ(job.Parameter(0)[39999], 0.75f);
  EXPECT_EQ(job.Parameter(1)[39999], 0.5f);
  EXPECT_EQ(job.Parameter(2)[39999], 0.75f);
  EXPECT_EQ(job.Parameter(3)[39999], 1.0f);
}

TEST(EngineTest, AnOverflowOnOneRankSkipsTheStepOnAll) {
  LocalJobOptions options =
      Options({.stage = 2, .workers = 2, .ranks = 2, .dtype = model::v1::DTYPE_FLOAT16});
  options.config.mutable_loss_scale()->set_dynamic(true);
  options.config.mutable_loss_scale()->set_initial(65536.0);
  options.config.mutable_loss_scale()->set_window(1000);
  options.config.mutable_loss_scale()->set_hysteresis(1);
  options.config.mutable_loss_scale()->set_minimum(1.0);
  LocalJob job(std::move(options));
  job.PutParameters(RandomValues(kSizes, 1));
  const std::string before = job.StateBytes();
  Values bad = GradientsOf(0, 0, 1);
  bad[6][12345] = std::numeric_limits<float>::infinity();
  job.ScatterAll(0, 0, GradientsOf(0, 0, 0));
  job.ScatterAll(1, 0, bad);
  for (uint32_t rank = 0; rank < 2; ++rank) job.Step(rank, 1, 0.01);
  job.Run();
  for (uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(job.result(rank).step, 1u);
    EXPECT_EQ(job.result(rank).updates, 0u);
    EXPECT_EQ(job.result(rank).skipped, 1u);
    EXPECT_EQ(job.result(rank).norm_valid, 0u);
    EXPECT_EQ(job.result(rank).loss_scale, 32768.0);
  }
  EXPECT_TRUE(job.StateBytes() == before) << "a skipped step leaves no trace but the scale";
}

TEST(EngineTest, WeightedAccumulationIsTheMeanOverTokens) {
  LocalJobOptions options;
  options.manifest = MakeManifest({512}, model::v1::DTYPE_FLOAT32);
  options.config = MakeConfig(3, 2, model::v1::DTYPE_FLOAT32);
  options.config.set_optimizer(model::v1::OPTIMIZER_SGD);
  options.config.clear_state_slots();
  options.config.set_accumulation_steps(2);
  LocalJob job(std::move(options));
  job.PutParameters({std::vector<float>(512, 0.0f)});
  // Mean of per-token gradients: (1*10 + 2*30 + 3*20 + 4*40) / 100 = 2.9.
  const float gradient[2][2] = {{1, 2}, {3, 4}};
  const float tokens[2][2] = {{10, 30}, {20, 40}};
  for (uint32_t micro = 0; micro < 2; ++micro) {
    for (uint32_t rank = 0; rank < 2; ++rank) {
      job.ScatterAll(rank, micro, {std::vector<float>(512, gradient[rank][micro])},
                     tokens[rank][micro]);
    }
    job.Run();
  }
  for (uint32_t rank = 0; rank < 2; ++rank) {
    trainer::v1::SessionRequest request;
    request.mutable_step()->set_micro_steps(2);
    request.mutable_step()->set_weight_total(tokens[rank][0] + tokens[rank][1]);
    request.mutable_step()->add_groups()->set_lr(1.0);
    job.Send(rank, request);
  }
  job.Run();
  EXPECT_FLOAT_EQ(job.Parameter(0)[511], -2.9f);
}

TEST(EngineTest, BadRequestsChangeNothingAndSayWhatIsWrong) {
  LocalJob job(Options({.stage = 3, .workers = 1, .ranks = 1}));
  job.PutParameters(RandomValues(kSizes, 1));
  const std::string before = job.StateBytes();
  auto fails = [&](trainer::v1::SessionRequest request, const std::string& text) {
    const size_t count = job.failures(0).size();
    job.Send(0, std::move(request));
    job.Run();
    ASSERT_EQ(job.failures(0).size(), count + 1);
    EXPECT_NE(job.failures(0).back().message().find(text), std::string::npos)
        << job.failures(0).back().message();
  };
  fails(GatherOf({99}), "unit 99 of");
  trainer::v1::SessionRequest scatter;
  scatter.mutable_scatter()->set_window_offset(uint64_t{1} << 60);
  fails(scatter, "gradient window");
  scatter.mutable_scatter()->set_window_offset(8);
  fails(scatter, "multiples of 64");
  scatter.mutable_scatter()->set_window_offset(0);
  scatter.mutable_scatter()->set_weight(NAN);
  fails(scatter, "weight");
  trainer::v1::SessionRequest put;
  put.mutable_put()->set_elements(100);
  fails(put, "whole grains");
  trainer::v1::SessionRequest step;
  step.mutable_step()->set_micro_steps(1);
  fails(step, "parameter groups");
  step.mutable_step()->add_groups()->set_lr(NAN);
  fails(step, "lr is nan");
  EXPECT_TRUE(job.StateBytes() == before);
}

}  // namespace
}  // namespace zeroshard
