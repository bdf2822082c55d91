// What kills one generation of ranks and not the next.
#include <gtest/gtest.h>

#include <string>

#include "tests/fakes/local_job.h"

namespace zeroshard {
namespace {

constexpr uint32_t kRanks = 2;
constexpr uint32_t kWorkers = 2;

LocalJobOptions Options(bool islands) {
  LocalJobOptions options;
  options.manifest = MakeManifest({300, 20000}, model::v1::DTYPE_FLOAT32);
  options.config = MakeConfig(3, kRanks, model::v1::DTYPE_FLOAT32);
  if (islands) options.config.set_window(model::v1::WINDOW_COPY);
  options.islands = islands;
  options.workers = kWorkers;
  return options;
}

absl::Status Dead() { return absl::AbortedError("rank 1 is gone"); }

// All ranks of the generation leave and new ones come; returns the new generation.
uint64_t StartAgain(LocalJob& job) {
  const uint64_t generation = job.next_generation();
  for (uint32_t w = 0; w < kWorkers; ++w) job.engine(w).OnDropAttempt(generation);
  job.Run();
  return generation;
}

// Whether new ranks train a step.
bool Trains(LocalJob& job) {
  for (uint32_t rank = 0; rank < kRanks; ++rank) job.Hello(rank, /*reconnect=*/false);
  job.Run();
  std::vector<uint64_t> ids(kRanks);
  for (uint32_t rank = 0; rank < kRanks; ++rank) {
    job.ScatterAll(rank, 0, {std::vector<float>(300, 0.5f), std::vector<float>(20000, 0.25f)});
    ids[rank] = job.Step(rank, 1, 0.01);
  }
  job.Run();
  return job.Done(0, ids[0]) && job.Done(1, ids[1]);
}

class PoisonTest : public ::testing::TestWithParam<bool> {};

// The server tells every worker; one of them hears it only after another has dropped the step.
TEST_P(PoisonTest, ALateNoticeOfADeadGenerationIsVoid) {
  LocalJob job(Options(GetParam()));
  job.PutParameters({std::vector<float>(300), std::vector<float>(20000)});
  const uint64_t dead = job.next_generation();
  job.engine(0).OnPoison(Dead(), dead);
  job.Run();
  EXPECT_FALSE(Trains(job));
  StartAgain(job);
  job.engine(1).OnPoison(Dead(), dead);
  EXPECT_TRUE(Trains(job));
}

// The notice of the new generation's death overtakes the drop of the old one.
TEST_P(PoisonTest, AnEarlyNoticeIsNotForgotten) {
  LocalJob job(Options(GetParam()));
  job.PutParameters({std::vector<float>(300), std::vector<float>(20000)});
  const uint64_t next = job.next_generation() + 1;
  job.engine(1).OnPoison(Dead(), next);
  for (uint32_t w = 0; w < kWorkers; ++w) job.engine(w).OnDropAttempt(next);
  job.Run();
  EXPECT_FALSE(Trains(job));
  for (uint32_t w = 0; w < kWorkers; ++w) job.engine(w).OnDropAttempt(next + 20);
  job.Run();
  EXPECT_TRUE(Trains(job));
}

// A worker hears of the drop, and of a rank of the new generation, before the leader has dropped.
TEST_P(PoisonTest, IsNotToldToTheNextRanks) {
  LocalJob job(Options(GetParam()));
  job.PutParameters({std::vector<float>(300), std::vector<float>(20000)});
  job.engine(0).OnPoison(Dead(), job.next_generation());
  job.Run();
  const uint64_t next = job.next_generation();
  job.engine(1).OnDropAttempt(next);
  job.failures(1).clear();
  job.Hello(1, /*reconnect=*/false);
  job.RunWorker(1);
  EXPECT_TRUE(job.failures(1).empty());
  job.engine(0).OnDropAttempt(next);
  EXPECT_TRUE(Trains(job));
}

INSTANTIATE_TEST_SUITE_P(Exchange, PoisonTest, ::testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "islands" : "shared_memory");
});

}  // namespace
}  // namespace zeroshard
