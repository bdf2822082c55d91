// What a build without the CUDA Toolkit says; it is compiled here beside the other answers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "device/cuda/available.h"

namespace zeroshard {
namespace {

TEST(UnavailableTest, ABuildWithoutTheToolkitSaysSoAndWhatToDo) {
  const absl::Status status = CheckCudaUsable();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(
      std::string(status.message()),
      testing::AllOf(testing::HasSubstr("no CUDA device: this build has no CUDA"),
                     testing::HasSubstr("CUDA_HOME"), testing::HasSubstr("--device cpu:0")));
  EXPECT_EQ(CheckCudaDevice("cuda:0"), status);
  EXPECT_EQ(DescribeCudaDevices().status(), status);
}

}  // namespace
}  // namespace zeroshard
