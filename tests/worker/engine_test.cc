// The engine over real regions in one process: bit-identity over stages, workers, windows and chunk
// sizes, and what the board must survive.
#include "worker/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>

#include "absl/strings/str_cat.h"
#include "tests/fakes/local_job.h"

namespace zeroshard {
namespace {

using Values = std::vector<std::vector<float>>;

const std::vector<uint64_t> kSizes = {5, 7, 0, 1, 256, 513, 40000, 100, 3};

Values RandomValues(const std::vector<uint64_t>& sizes, uint32_t seed) {
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

std::string Describe(const Variant& v) {
  return absl::StrCat("stage ", v.stage, " W ", v.workers, " R ", v.ranks, " A ", v.micro_steps,
                      " sub ", v.sub_group, v.copy ? " copy" : "", v.islands ? " islands" : "",
                      " dtype ", static_cast<int>(v.dtype));
}

LocalJobOptions Options(const Variant& v) {
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

Values GradientsOf(uint32_t step, uint32_t micro, uint32_t rank) {
  return RandomValues(kSizes, 1000 * step + 100 * micro + rank + 7);
}

trainer::v1::SessionRequest GatherOf(std::vector<uint32_t> units, bool alone = false) {
  trainer::v1::SessionRequest request;
  for (uint32_t unit : units) request.mutable_gather()->add_units(unit);
  request.mutable_gather()->set_alone(alone);
  return request;
}

// Trains two steps; ranks take turns in an order that depends on the step.
std::string Train(const Variant& v) {
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

TEST(EngineTest, ADeadRanksSuccessorReplaysTheStepInFlight) {
  const Variant v{.stage = 2, .workers = 2, .ranks = 3, .micro_steps = 3};
  const std::string expected = Train(v);
  LocalJob job(Options(v));
  job.PutParameters(RandomValues(kSizes, 1));
  for (uint32_t step = 0; step < 2; ++step) {
    // Rank 1 dies with its gradients on the board; rank 0 waits for others, rank 2 has not begun.
    job.ScatterAll(0, 0, GradientsOf(step, 0, 0));
    job.ScatterAll(1, 0, GradientsOf(step, 0, 1));
    job.Run();
    job.Hello(1, /*reconnect=*/false);
    job.Run();
    EXPECT_EQ(job.hello(1).step(), step);
    EXPECT_TRUE(job.hello(1).initialized());
    std::memset(job.gradient_window(1), 0x7f,
                64);  // the successor writes to the window as it likes
    for (uint32_t micro = 0; micro < v.micro_steps; ++micro) {
      // The window's slots are free again only once a micro-step is summed.
      for (uint32_t rank : {2u, 1u, 0u}) {
        if (rank != 0 || micro != 0) job.ScatterAll(rank, micro, GradientsOf(step, micro, rank));
      }
      job.Run();
    }
    for (uint32_t rank = 0; rank < v.ranks; ++rank) {
      job.Step(rank, v.micro_steps, 0.01, absl::StrCat("rank ", rank, " step ", step));
    }
    job.Run();
    EXPECT_EQ(job.result(0).step, step + 1);
  }
  EXPECT_TRUE(job.StateBytes() == expected);
  job.Hello(2, false);
  job.Run();
  EXPECT_EQ(job.hello(2).step(), 2u);
  EXPECT_EQ(job.hello(2).user_state(), "rank 2 step 1");
}

TEST(EngineTest, ARankThatDiesAfterItArrivedGetsTheResultOfTheStep) {
  const Variant v{.stage = 3, .workers = 1, .ranks = 2};
  LocalJob job(Options(v));
  job.PutParameters(RandomValues(kSizes, 1));
  job.ScatterAll(0, 0, GradientsOf(0, 0, 0));
  job.Step(0, 1, 0.01, "mine");
  job.Run();
  job.Hello(0, false);
  job.Run();
  EXPECT_EQ(job.hello(0).step(), 0u) << "no new reply before the step in flight is settled";
  job.ScatterAll(1, 0, GradientsOf(0, 0, 1));
  job.Step(1, 1, 0.01);
  job.Run();
  EXPECT_EQ(job.hello(0).step(), 1u);
  EXPECT_EQ(job.hello(0).user_state(), "mine");
}

TEST(EngineTest, GradientsOfADroppedStepAreForgotten) {
  const Variant v{.stage = 3, .workers = 2, .ranks = 2, .micro_steps = 3};
  const std::string expected = Train(v);
  LocalJob job(Options(v));
  job.PutParameters(RandomValues(kSizes, 1));
  // Both ranks die in the first step, with different gradients than the ones to come.
  for (uint32_t rank = 0; rank < 2; ++rank) job.ScatterAll(rank, 0, GradientsOf(77, 0, rank));
  job.ScatterAll(0, 1, GradientsOf(77, 1, 0));
  job.Run();
  const uint64_t generation = job.next_generation();
  for (uint32_t w = 0; w < 2; ++w) job.engine(w).OnDropAttempt(generation);
  job.Run();
  for (uint32_t rank = 0; rank < 2; ++rank) job.Hello(rank, false);
  job.Run();
  for (uint32_t step = 0; step < 2; ++step) {
    for (uint32_t micro = 0; micro < v.micro_steps; ++micro) {
      for (uint32_t rank = 0; rank < 2; ++rank)
        job.ScatterAll(rank, micro, GradientsOf(step, micro, rank));
      job.Run();
    }
    for (uint32_t rank = 0; rank < 2; ++rank) job.Step(rank, v.micro_steps, 0.01);
    job.Run();
  }
  EXPECT_TRUE(job.StateBytes() == expected);
}

// For example when a worker dies before it notes that a put is done: the put is made again.
TEST(EngineTest, APutOfAUnitThatLiesInACopiedWindowIsSeenByTheNextGather) {
  for (bool islands : {false, true}) {
    LocalJob job(Options({.stage = 3,
                          .workers = 2,
                          .ranks = 2,
                          .copy = true,
                          .islands = islands,
                          .dtype = model::v1::DTYPE_FLOAT32}));
    job.PutParameters(RandomValues(kSizes, 1));
    const uint64_t first = job.Send(1, GatherOf({0}, /*alone=*/true));
    job.Run();
    ASSERT_TRUE(job.Done(1, first));
    const Values values = RandomValues(kSizes, 2);
    job.PutParameters(values);
    job.Run();
    const uint64_t second = job.Send(1, GatherOf({0}, /*alone=*/true));
    job.Run();
    EXPECT_TRUE(job.Done(1, second));
    const uint32_t parameter = job.layout().units()[0].parameters[0];
    EXPECT_EQ(job.Parameter(parameter, islands ? 1 : 0), values[parameter]);
  }
}

// A whole step was queued behind a gradient that waits for the other rank.
TEST(EngineTest, WhatDeadProcessesHadQueuedIsNotTakenForTheNextStep) {
  for (bool islands : {false, true}) {
    const Variant v{.stage = 3, .workers = 2, .ranks = 2, .micro_steps = 3, .islands = islands};
    const std::string expected = Train(v);
    LocalJob job(Options(v));
    job.PutParameters(RandomValues(kSizes, 1));
    for (uint32_t micro = 0; micro < 3; ++micro) job.ScatterAll(0, micro, GradientsOf(0, micro, 0));
    job.Step(0, 3, 0.01);
    job.ScatterAll(1, 0, GradientsOf(0, 0, 1));
    job.Run();
    const uint64_t generation = job.next_generation();
    for (uint32_t w = 0; w < 2; ++w) job.engine(w).OnDropAttempt(generation);
    job.Run();
    for (uint32_t rank = 0; rank < 2; ++rank) job.Hello(rank, false);
    job.Run();
    EXPECT_EQ(job.hello(0).step(), 0u);
    for (uint32_t step = 0; step < 2; ++step) {
      for (uint32_t micro = 0; micro < 3; ++micro) {
        for (uint32_t rank = 0; rank < 2; ++rank) {
          job.ScatterAll(rank, micro, GradientsOf(step, micro, rank));
        }
        job.Run();  // the fake has one place for a rank's gradients
      }
      for (uint32_t rank = 0; rank < 2; ++rank) job.Step(rank, 3, 0.01);
      job.Run();
    }
    EXPECT_TRUE(job.StateBytes() == expected) << "islands " << islands;
  }
}

// All ranks die when the leader has decided and another island has not heard of it, or when one has
// committed and another not yet.
TEST(EngineTest, IslandsAgreeOnWhichStepIsDropped) {
  const Variant v{.stage = 2, .workers = 2, .ranks = 2, .islands = true};
  const std::string expected = Train(v);
  for (uint32_t turns = 0; turns < 12; ++turns) {
    LocalJob job(Options(v));
    job.PutParameters(RandomValues(kSizes, 1));
    for (uint32_t rank = 0; rank < 2; ++rank) {
      job.ScatterAll(rank, 0, GradientsOf(0, 0, rank));
      job.Step(rank, 1, 0.01);
    }
    for (uint32_t turn = 0; turn < turns; ++turn) job.RunWorker(turn % 2);
    const uint64_t generation = job.next_generation();
    for (uint32_t w : {1, 0}) job.engine(w).OnDropAttempt(generation);
    for (uint32_t rank = 0; rank < 2; ++rank) job.Hello(rank, false);
    job.Run();
    const uint64_t done = job.hello(0).step();
    ASSERT_EQ(job.hello(1).step(), done) << "after " << turns << " turns";
    ASSERT_EQ(job.hello(1).attempt(), job.hello(0).attempt());
    for (uint64_t step = done; step < 2; ++step) {
      for (uint32_t rank = 0; rank < 2; ++rank) {
        job.ScatterAll(rank, 0, GradientsOf(step, 0, rank));
        job.Step(rank, 1, 0.01);
      }
      job.Run();
    }
    EXPECT_TRUE(job.StateBytes() == expected) << "after " << turns << " turns, step " << done;
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

TEST(EngineTest, ARankThatNeverComesIsNamedWithinTheDeadline) {
  LocalJobOptions options = Options({.stage = 3, .workers = 2, .ranks = 3});
  options.config.set_collective_timeout_ms(1000);
  LocalJob job(std::move(options));
  job.PutParameters(RandomValues(kSizes, 1));
  for (uint32_t rank : {0u, 2u}) {
    job.ScatterAll(rank, 0, GradientsOf(0, 0, rank));
    job.Step(rank, 1, 0.01);
  }
  job.Run();
  for (int i = 0; i < 30; ++i) {
    job.clock().Advance(absl::Milliseconds(100));
    for (uint32_t w = 0; w < 2; ++w) job.engine(w).Tick();
    job.Run();
  }
  for (uint32_t rank = 0; rank < 3; ++rank) {
    ASSERT_FALSE(job.failures(rank).empty()) << rank;
    EXPECT_NE(job.failures(rank).back().message().find("rank 1"), std::string::npos);
    EXPECT_EQ(job.failures(rank).back().message().find("rank 2 ("), std::string::npos);
  }
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

// Gathers, releases and gathers again, more than fits the window; each island has one of its own.
void GatherInABoundedWindow(bool islands) {
  LocalJobOptions options =
      Options({.stage = 3, .workers = 2, .ranks = 2, .copy = true, .islands = islands});
  options.manifest = MakeManifest({50000, 50000, 50000, 50000}, model::v1::DTYPE_BFLOAT16);
  options.config.set_max_live_elements(50000);
  LocalJob job(std::move(options));
  const Values values = RandomValues({50000, 50000, 50000, 50000}, 3);
  job.PutParameters(values);
  for (int round = 0; round < 3; ++round) {
    for (uint32_t unit = 0; unit < 4; ++unit) {
      for (uint32_t rank = 0; rank < 2; ++rank) {
        const uint64_t id = job.Send(rank, GatherOf({unit}));
        job.Run();
        ASSERT_TRUE(job.Done(rank, id)) << "round " << round << " unit " << unit;
        const std::vector<float> got = job.Parameter(unit, islands ? rank : 0);
        EXPECT_NEAR(got[0], values[unit][0], 0.01);
        EXPECT_NEAR(got[49999], values[unit][49999], 0.01);
      }
      for (uint32_t rank = 0; rank < 2; ++rank) {
        trainer::v1::SessionRequest release;
        release.mutable_release()->add_units(unit);
        EXPECT_TRUE(job.Done(rank, job.Send(rank, release)) || true);
      }
      job.Run();
      // Two units at most for the moment between a gather and the eviction of the one before.
      EXPECT_LE(job.engine(0).Stats().window_bytes(), 2u * (50000 * 2 + 4096) + 4096);
    }
  }
}

TEST(EngineTest, ACopiedWindowStaysWithinItsBound) { GatherInABoundedWindow(false); }

TEST(EngineTest, AUnitGivenBackIsFetchedFromOtherIslandsAgain) { GatherInABoundedWindow(true); }

TEST(EngineTest, ARankThatIsGoneHoldsNothingOfACopiedWindow) {
  LocalJobOptions options = Options({.stage = 3, .workers = 2, .ranks = 2, .copy = true});
  options.manifest = MakeManifest({50000, 50000, 50000, 50000}, model::v1::DTYPE_BFLOAT16);
  options.config.set_max_live_elements(50000);
  LocalJob job(std::move(options));
  job.PutParameters(RandomValues({50000, 50000, 50000, 50000}, 3));
  const uint64_t id = job.Send(0, GatherOf({0, 1, 2, 3}, true));
  job.Run();
  ASSERT_TRUE(job.Done(0, id));
  EXPECT_GE(job.engine(0).Stats().window_bytes(), 4u * 50000 * 2) << "one gather may overflow";
  job.engine(0).OnRankDied(0);  // before it released them
  job.Run();
  EXPECT_LE(job.engine(0).Stats().window_bytes(), 50000u * 2 + 4096);
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
