// The GPU kernels, compiled as host code, against the loops of the host.
#include <gtest/gtest.h>

#include "tests/worker/cuda/kernel_cases.h"

namespace zeroshard {
namespace {

class KernelsTest : public ::testing::TestWithParam<KernelCase> {};

TEST_P(KernelsTest, GiveTheBitsOfTheHost) {
  const std::unique_ptr<KernelDevice> device = MakeHostKernelDevice();
  const absl::Status status = RunKernelCase(GetParam(), *device);
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(All, KernelsTest, ::testing::ValuesIn(AllKernelCases()),
                         [](const auto& info) {
                           std::string name = info.param.name;
                           for (char& c : name) c = isalnum(c) != 0 ? c : '_';
                           return name;
                         });

}  // namespace
}  // namespace zeroshard
