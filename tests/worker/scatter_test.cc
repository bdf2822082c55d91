// A scatter returns at once and is overlapped with the rest of the backward pass: it completes, and
// its slot of the gradient window is free, as soon as every rank's gradient of that unit was read;
// of small units, when some have been.
#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "tests/fakes/local_job.h"
#include "worker/reduce_kernel.h"

namespace zeroshard {
namespace {

constexpr uint64_t kElements = 40000;

LocalJobOptions ThreeUnits(uint32_t workers, uint64_t elements = kElements) {
  LocalJobOptions options;
  options.manifest = MakeManifest({elements, elements, elements}, model::v1::DTYPE_FLOAT32);
  options.config = MakeConfig(2, 2, model::v1::DTYPE_FLOAT32);
  options.config.set_optimizer(model::v1::OPTIMIZER_SGD);
  options.config.clear_state_slots();
  options.config.set_accumulation_steps(2);
  options.workers = workers;
  return options;
}

uint64_t Scatter(LocalJob& job, uint32_t rank, uint32_t unit, uint32_t micro_step, float value) {
  const std::vector<float> gradient(job.layout().units()[unit].elements(), value);
  std::memcpy(job.gradient_window(rank), gradient.data(), gradient.size() * sizeof(float));
  trainer::v1::SessionRequest request;
  request.mutable_scatter()->set_unit(unit);
  request.mutable_scatter()->set_micro_step(micro_step);
  request.mutable_scatter()->set_present("\x01");
  return job.Send(rank, request);
}

TEST(ScatterTest, ASlotIsFreeWhenItsUnitIsSummedBeforeAnyOtherIsSent) {
  for (uint32_t workers : {1u, 2u}) {
    LocalJob job(ThreeUnits(workers));
    job.PutParameters(std::vector<std::vector<float>>(3, std::vector<float>(kElements, 0.0f)));
    for (uint32_t micro_step = 0; micro_step < 2; ++micro_step) {
      // Backward order. Every unit goes through the same slot: what was there is overwritten.
      for (uint32_t unit : {2u, 1u, 0u}) {
        const uint64_t first = Scatter(job, 0, unit, micro_step, 1.0f + static_cast<float>(unit));
        job.Run();
        EXPECT_FALSE(job.Done(0, first)) << "rank 1 has not sent its gradient of unit " << unit;
        const uint64_t second = Scatter(job, 1, unit, micro_step, 3.0f + static_cast<float>(unit));
        job.Run();
        EXPECT_TRUE(job.Done(0, first)) << "unit " << unit << ", " << workers << " workers";
        EXPECT_TRUE(job.Done(1, second)) << "unit " << unit << ", " << workers << " workers";
      }
    }
    for (uint32_t rank : {0u, 1u}) {
      trainer::v1::SessionRequest request;
      request.mutable_step()->set_micro_steps(2);
      request.mutable_step()->add_groups()->set_lr(1.0);
      job.Send(rank, request);
    }
    job.Run();
    for (uint32_t unit = 0; unit < 3; ++unit) {
      EXPECT_EQ(job.Parameter(unit)[kElements - 1], -2.0f - static_cast<float>(unit));
    }
  }
}

TEST(ScatterTest, ARankThatIsAheadWaitsForNobody) {
  LocalJob job(ThreeUnits(1));
  job.PutParameters(std::vector<std::vector<float>>(3, std::vector<float>(kElements, 0.0f)));
  // Rank 0 has finished its backward pass before rank 1 sends anything; units complete in the
  // order of rank 1.
  std::vector<uint64_t> first(3);
  for (uint32_t unit : {2u, 1u, 0u}) first[unit] = Scatter(job, 0, unit, 0, 1.0f);
  job.Run();
  for (uint32_t unit : {0u, 2u, 1u}) {
    Scatter(job, 1, unit, 0, 1.0f);
    job.Run();
    EXPECT_TRUE(job.Done(0, first[unit]));
  }
}

// Sends all gradients of three units at once, runs the job, and returns how many of the scatters
// what the worker lets in between two sums sees complete.
std::vector<size_t> CompleteBetweenSums(uint64_t elements) {
  LocalJob job(ThreeUnits(1, elements));
  job.PutParameters(std::vector<std::vector<float>>(3, std::vector<float>(elements, 0.0f)));
  std::vector<uint64_t> ids;
  for (uint32_t unit : {0u, 1u, 2u}) {
    Scatter(job, 0, unit, 0, 1.0f);
    ids.push_back(Scatter(job, 1, unit, 0, 1.0f));
  }
  std::vector<size_t> complete;
  job.engine(0).SetPump([&] {
    complete.push_back(0);
    for (uint64_t id : ids) complete.back() += job.Done(1, id) ? 1 : 0;
  });
  job.Run();
  for (uint64_t id : ids) EXPECT_TRUE(job.Done(1, id));
  return complete;
}

TEST(ScatterTest, ScattersCompleteOneByOneWhileOthersAreSummed) {
  EXPECT_EQ(CompleteBetweenSums(300'000), (std::vector<size_t>{0, 1, 2}));
}

TEST(ScatterTest, ScattersOfSmallUnitsCompleteWhenSomeAreSummed) {
  // 160,000 elements are summed before anything is let in, 320,000 are not.
  EXPECT_EQ(CompleteBetweenSums(160'000), (std::vector<size_t>{0, 2}));
  EXPECT_EQ(CompleteBetweenSums(40'000), (std::vector<size_t>{0}));
}

}  // namespace
}  // namespace zeroshard
