// CudaKernels on the fake device: the embedded image is loaded, kernels are found by name and
// launched with the addresses that the device knows; the bits are those of the host.
#include "worker/cuda/kernels.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "device/cuda/memory.h"
#include "device/cuda/stream.h"
#include "tests/fakes/cuda/fake_cuda.h"
#include "tests/worker/cuda/cuda_kernel_device.h"
#include "tests/worker/cuda/kernel_cases.h"

namespace zeroshard {
namespace {

class CudaKernelsTest : public ::testing::Test {
 protected:
  void SetUp() override { Start("devices=1,memory=1G"); }

  void Start(const std::string& settings) {
    device_.reset();
    fake_cuda::ResetFakeCuda(settings);
    auto device = CudaDevice::Open(0);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
  }

  std::unique_ptr<CudaDevice> device_;
};

TEST_F(CudaKernelsTest, GiveTheBitsOfTheHost) {
  const auto kernels = MakeCudaKernelDevice(*device_);
  ASSERT_TRUE(kernels.ok()) << kernels.status();
  // Others than these are no other launches.
  const std::set<std::string> chosen = {"update lion", "update of many parameters",
                                        "sum of several types", "squares", "conversions"};
  size_t ran = 0;
  for (const KernelCase& kernel_case : AllKernelCases()) {
    if (chosen.count(kernel_case.name) == 0) continue;
    ++ran;
    const absl::Status status = RunKernelCase(kernel_case, **kernels);
    EXPECT_TRUE(status.ok()) << kernel_case.name << ": " << status;
  }
  EXPECT_EQ(ran, chosen.size());
}

TEST_F(CudaKernelsTest, RefuseBeforeTheyLaunch) {
  auto kernels = CudaKernels::Load(*device_);
  ASSERT_TRUE(kernels.ok()) << kernels.status();
  auto stream = CudaStream::Create(*device_, StreamPriority::kLow);
  ASSERT_TRUE(stream.ok()) << stream.status();
  const uint64_t launches = FakeCudaCalls("cuLaunchKernel");
  EXPECT_EQ((*kernels)->Update(*stream, {}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*kernels)->Sum(*stream, {}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*kernels)->Squares(*stream, {}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*kernels)->Convert(*stream, {}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*kernels)->MergePresence(*stream, {}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(FakeCudaCalls("cuLaunchKernel"), launches);
}

TEST_F(CudaKernelsTest, SayWhichLaunchFailed) {
  Start("devices=1,memory=1G,fault=cuLaunchKernel:1:CUDA_ERROR_LAUNCH_FAILED");
  auto kernels = CudaKernels::Load(*device_);
  ASSERT_TRUE(kernels.ok()) << kernels.status();
  auto stream = CudaStream::Create(*device_, StreamPriority::kLow);
  ASSERT_TRUE(stream.ok()) << stream.status();
  auto memory = DeviceMemory::Create(*device_, 1 << 20);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const absl::Status status = (*kernels)->Convert(
      *stream, {.from = memory->address(), .to = memory->address() + 4096, .elements = 100});
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("zs_convert")) << status;
  EXPECT_THAT(std::string(status.message()), testing::HasSubstr("cuda:0")) << status;
}

}  // namespace
}  // namespace zeroshard
