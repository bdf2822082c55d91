// What the engine keeps in a copied window.
#include <gtest/gtest.h>

#include "tests/worker/engine_fixture.h"

namespace zeroshard {
namespace {

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

}  // namespace
}  // namespace zeroshard
