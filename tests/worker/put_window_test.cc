// Puts during training and copied windows of islands: whatever order frames arrive in, no window
// keeps a shard of before.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tests/fakes/local_job.h"

namespace zeroshard {
namespace {

constexpr uint64_t kElements = 40000;

// Three islands with one rank each, one parameter that all of them have a shard of.
class PutWindowTest : public ::testing::Test {
 protected:
  PutWindowTest() : job_(Options()) { job_.PutParameters({std::vector<float>(kElements, 1.0f)}); }

  static LocalJobOptions Options() {
    LocalJobOptions options;
    options.manifest = MakeManifest({kElements}, model::v1::DTYPE_FLOAT32);
    options.config = MakeConfig(3, 3, model::v1::DTYPE_FLOAT32);
    options.config.set_window(model::v1::WINDOW_COPY);
    options.islands = true;
    options.workers = 3;
    return options;
  }

  // Rank 0 puts `value` everywhere; nobody has taken it yet.
  uint64_t StartPut(float value) {
    const Unit& unit = job_.layout().units()[0];
    const std::vector<float> values(unit.elements(), value);
    std::memcpy(job_.gradient_window(0), values.data(), values.size() * sizeof(float));
    trainer::v1::SessionRequest request;
    request.mutable_put()->set_unit(0);
    request.mutable_put()->set_elements(unit.elements());
    return job_.Send(0, request);
  }

  uint64_t StartGather(uint32_t rank) {
    trainer::v1::SessionRequest request;
    request.mutable_gather()->add_units(0);
    request.mutable_gather()->set_alone(true);
    return job_.Send(rank, request);
  }
  void Gather(uint32_t rank) {
    const uint64_t id = StartGather(rank);
    job_.Run();
    ASSERT_TRUE(job_.Done(rank, id));
  }

  // Finishes the put, gathers again, and looks at the rank's window.
  void ExpectEverywhere(uint32_t rank, uint64_t put, float value) {
    job_.Run();
    EXPECT_TRUE(job_.Done(0, put));
    Gather(rank);
    EXPECT_EQ(job_.Parameter(0, rank), std::vector<float>(kElements, value)) << "rank " << rank;
  }

  LocalJob job_;
};

TEST_F(PutWindowTest, IsSeenOnAllIslands) {
  for (uint32_t rank = 0; rank < 3; ++rank) Gather(rank);
  const uint64_t put = StartPut(2.0f);
  for (uint32_t rank = 0; rank < 3; ++rank) ExpectEverywhere(rank, put, 2.0f);
}

// Was taken as it was before: worker 2 answered before the put had come to it.
TEST_F(PutWindowTest, AShardIsNotPulledFromAWorkerThatThePutHasNotReached) {
  Gather(1);
  const uint64_t put = StartPut(2.0f);
  job_.RunWorkerWithFrames(0, 1);  // sends it to both
  job_.RunWorkerWithFrames(1, 0);  // pulls anew
  job_.RunWorkerWithFrames(2, 1);
  job_.RunWorkerWithFrames(1, 2);
  ExpectEverywhere(1, put, 2.0f);
}

// Was taken for the answer to the second pull: a gather was complete before that came.
TEST_F(PutWindowTest, AnAnswerFromBeforeThePutIsDropped) {
  StartGather(1);
  job_.RunWorkerWithFrames(1, 0);
  job_.RunWorkerWithFrames(1, 0);  // pulls
  job_.RunWorkerWithFrames(2, 1);  // answers with what it has
  const uint64_t put = StartPut(2.0f);
  job_.RunWorkerWithFrames(0, 1);  // sends it to both
  job_.RunWorkerWithFrames(1, 0);  // pulls anew
  job_.RunWorkerWithFrames(1, 2);  // the first answer
  job_.RunWorkerWithFrames(2, 0);
  job_.RunWorker(0);
  ASSERT_TRUE(job_.Done(0, put));
  const uint64_t gather = StartGather(1);
  job_.RunWorkerWithFrames(1, 0);
  job_.RunWorkerWithFrames(1, 0);
  EXPECT_FALSE(job_.Done(1, gather));
  ExpectEverywhere(1, put, 2.0f);
}

// A put that is sent again, because the word that it is done was lost, does not come twice: a later
// one may have been made since.
TEST_F(PutWindowTest, IsMadeOnceByEachWorker) {
  for (uint32_t rank = 0; rank < 3; ++rank) Gather(rank);
  const uint64_t put = StartPut(2.0f);
  job_.RunWorkerWithFrames(0, 1);
  job_.RunWorkerWithFrames(1, 0);
  job_.BreakMesh();  // its answer is lost
  for (uint32_t rank = 0; rank < 3; ++rank) ExpectEverywhere(rank, put, 2.0f);
}

}  // namespace
}  // namespace zeroshard
