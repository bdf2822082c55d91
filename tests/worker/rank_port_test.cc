// What a home worker must keep right for a rank when it is replaced, in one process (LocalJob).
// (tests/fakes/local_job.h).
#include "worker/rank_port.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "tests/fakes/local_job.h"

namespace zeroshard {
namespace {

// Two workers, two ranks, stage 3 with a copied window: a gather waits for both workers.
LocalJobOptions CopiedWindow() {
  LocalJobOptions options;
  options.manifest = MakeManifest({20000, 30000, 40000}, model::v1::DTYPE_FLOAT32);
  options.config = MakeConfig(3, 2, model::v1::DTYPE_FLOAT32);
  options.config.set_window(model::v1::WINDOW_COPY);
  options.workers = 2;
  return options;
}

void PutAnything(LocalJob& job) {
  job.PutParameters({std::vector<float>(20000, 1.0f), std::vector<float>(30000, 2.0f),
                     std::vector<float>(40000, 3.0f)});
}

trainer::v1::SessionRequest GatherOf(uint32_t unit) {
  trainer::v1::SessionRequest request;
  request.mutable_gather()->add_units(unit);
  return request;
}

TEST(RankPortTest, GathersSentAgainKeepTheirPlaceInTheOrder) {
  LocalJob job(CopiedWindow());
  PutAnything(job);
  std::vector<trainer::v1::SessionRequest> pending;
  for (uint32_t unit : {0u, 1u}) {
    pending.push_back(GatherOf(unit));
    pending.back().set_id(job.Send(1, pending.back()));
  }
  job.engine(1).Advance();  // posted; worker 0 has not filled its part
  for (const auto& request : pending) ASSERT_FALSE(job.Done(1, request.id()));

  job.RestartWorker(1);
  job.Hello(1, /*reconnect=*/true);
  job.engine(1).Advance();
  for (const auto& request : pending) job.Resend(1, request);
  job.Run();
  for (const auto& request : pending) EXPECT_TRUE(job.Done(1, request.id()));

  const uint64_t third = job.Send(1, GatherOf(2));
  std::vector<uint64_t> others;
  for (uint32_t unit : {0u, 1u, 2u}) others.push_back(job.Send(0, GatherOf(unit)));
  job.Run();
  EXPECT_TRUE(job.Done(1, third));
  for (uint64_t id : others) EXPECT_TRUE(job.Done(0, id));
  for (uint32_t rank : {0u, 1u}) {
    EXPECT_TRUE(job.failures(rank).empty()) << job.failures(rank).front().message();
  }
}

TEST(RankPortTest, ARestoreShowsInTheEpochOfThePage) {
  LocalJob job(CopiedWindow());
  PutAnything(job);
  const RankPage* page = job.engine(0).context().memory().rank_page(0);
  const uint64_t before = page->epoch.load();
  for (uint32_t w : {0u, 1u}) {
    ASSERT_TRUE(job.engine(w).FinishRestore({}, /*parameters_only=*/true).ok());
  }
  job.Run();
  EXPECT_GT(page->epoch.load(), before);
}

}  // namespace
}  // namespace zeroshard
