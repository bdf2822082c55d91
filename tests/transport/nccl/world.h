// A communicator over ranks that are threads of the test.
#ifndef ZEROSHARD_TESTS_TRANSPORT_NCCL_WORLD_H_
#define ZEROSHARD_TESTS_TRANSPORT_NCCL_WORLD_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "tests/fakes/cuda/fake_cuda.h"
#include "tests/fakes/nccl/fake_nccl.h"
#include "tests/transport/nccl/rank.h"
#include "transport/nccl/communicator.h"
#include "transport/nccl/library.h"

namespace zeroshard {

inline NcclOptions QuickOptions() {
  NcclOptions options;
  options.timeout = absl::Seconds(20);
  options.name = "job generation 1";
  return options;
}

// Runs `body` on each rank with a communicator of its own over all, which it closes or aborts.
inline void RunWorld(uint32_t ranks, const NcclOptions& options,
                     const std::function<void(Rank& rank, NcclCommunicator& world)>& body) {
  const absl::StatusOr<NcclLibrary> library = NcclLibrary::Load();
  ASSERT_TRUE(library.ok()) << library.status();
  const NcclUniqueId id = *library->MakeUniqueId();
  RunRanks(ranks, [&](uint32_t number) {
    auto rank = Rank::Create(number);
    ASSERT_TRUE(rank.ok()) << rank.status();
    auto world = NcclCommunicator::Create(*library, id, number, ranks, options);
    ASSERT_TRUE(world.ok()) << world.status();
    body(**rank, **world);
    EXPECT_TRUE((*world)->Abort(absl::Seconds(10)));
    EXPECT_TRUE((*rank)->Passed(absl::Seconds(10)));
  });
  EXPECT_EQ(FakeNcclCalls("communicators"), 0u);
}

// Four GPUs, and no faults but those that a test sets.
class WorldTest : public testing::Test {
 protected:
  void SetUp() override {
    FakeCudaReset("devices=4");
    FakeNcclReset("");
  }
  void TearDown() override { FakeNcclReset(""); }
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_TRANSPORT_NCCL_WORLD_H_
