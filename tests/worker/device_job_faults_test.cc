// A fake GPU on which something fails: memory, calls, or the device. Every failure is
// told in words, the state survives, and the job goes on when the device is well again.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/fakes/cuda/fake_cuda.h"
#include "tests/worker/device_jobs.h"

namespace zeroshard {
namespace {

using fake_cuda::ResetFakeCuda;
using Where = DeviceJob::Where;

constexpr char kWell[] = "devices=1,memory=1G";

class DeviceJobFaultsTest : public ::testing::Test {
 protected:
  ~DeviceJobFaultsTest() override {
    EXPECT_EQ(fake_cuda::LiveAllocations().size(), 0u);
    ResetFakeCuda("");
  }

  // One step of a job of one rank, in which `fault` hits its worker: from its start on, with the
  // rank's gradients summed and what it waits for sent again. Returns what was said, or nothing
  // when there was nothing that failed.
  static std::string StepWithFault(DeviceJob& job, uint32_t step, const std::string& fault) {
    job.Scatter(step);
    job.plane().Boundary(0, job.job().memory(0).board().attempt());
    job.job().StopWorker(0);
    ResetFakeCuda(absl::StrCat(kWell, ",fault=", fault));
    std::string said;
    const absl::Status started = job.job().TryStartWorker(0);
    if (started.ok()) {
      job.job().Reconnect(0);
      job.Arrive();
      said = job.LastFailure();
      const absl::Status health = job.job().engine(0).health();
      EXPECT_TRUE(health.ok() || !said.empty());
      EXPECT_TRUE(health.ok() || absl::IsAborted(health)) << health;
    } else {
      said = absl::StrCat("start: ", started.message());
    }
    job.job().StopWorker(0);
    ResetFakeCuda(kWell);
    const absl::Status again = job.job().TryStartWorker(0);
    EXPECT_TRUE(again.ok()) << again;
    if (said.empty()) {
      job.job().Reconnect(0);
      job.job().Run();
    } else {
      const bool arrived = job.job().memory(0).board().rank(0).arrival.load() ==
                           job.job().memory(0).board().attempt();
      const bool decided = !job.job().engine(0).AtBoundary();
      job.NextGeneration();
      // A decided step is done; another one is done again.
      if (!decided || !arrived) {
        EXPECT_EQ(job.job().hello(0).step(), step) << said;
        job.Train(step, step + 1);
      }
    }
    EXPECT_EQ(job.job().memory(0).board().numbers().step, step + 1) << said;
    return said;
  }

  // The fault at its first place, its second, and so on until it is not reached any more.
  static void Sweep(const DeviceCase& c, const std::function<std::string(int)>& fault,
                    int at_least) {
    ResetFakeCuda(kWell);
    const std::string expected = TrainedOnHost(c, 3);
    int k = 1;
    for (bool clean = false; !clean; ++k) {
      ASSERT_LT(k, 300);
      DeviceJob job(c, Where::kDevice);
      const std::string said = StepWithFault(job, 0, fault(k));
      clean = said.empty();
      EXPECT_TRUE(clean || absl::StrContains(said, "start: ") || absl::StrContains(said, "step 1"))
          << said;
      EXPECT_TRUE(clean || absl::StrContains(said, "CUDA_ERROR")) << said;
      job.Train(1, 3);
      ASSERT_TRUE(job.State() == expected) << fault(k) << ": " << said;
    }
    EXPECT_GT(k, at_least);
  }
};

TEST_F(DeviceJobFaultsTest, TheDeviceIsLostAtAnyOperation) {
  Sweep(
      {.ranks = 1}, [](int k) { return absl::StrCat("lost:", k, ":CUDA_ERROR_ILLEGAL_ADDRESS"); },
      8);
}

TEST_F(DeviceJobFaultsTest, TheDeviceIsLostWhileStatesAreOnTheHost) {
  Sweep(
      {.ranks = 1, .tier = model::v1::TIER_HOST, .ratio = 0.5, .lanes = 2},
      [](int k) { return absl::StrCat("lost:", 3 * k); }, 5);
}

TEST_F(DeviceJobFaultsTest, TheDeviceIsLostWhileStatesAreOnDrives) {
  Sweep(
      {.ranks = 1, .tier = model::v1::TIER_NVME, .ratio = 0.8},
      [](int k) { return absl::StrCat("lost:", 3 * k); }, 5);
}

TEST_F(DeviceJobFaultsTest, AnyLaunchFails) {
  Sweep(
      {.ranks = 1},
      [](int k) { return absl::StrCat("cuLaunchKernel:", k, ":CUDA_ERROR_OUT_OF_MEMORY"); }, 4);
}

TEST_F(DeviceJobFaultsTest, AnyLaunchFailsWhileTheHostComputes) {
  Sweep(
      {.ranks = 1, .tier = model::v1::TIER_HOST, .ratio = 0.1},
      [](int k) { return absl::StrCat("cuLaunchKernel:", k, ":CUDA_ERROR_OUT_OF_MEMORY"); }, 4);
  Sweep(
      {.ranks = 1, .tier = model::v1::TIER_HOST, .ratio = 0.1},
      [](int k) { return absl::StrCat("cuEventRecord:", k, ":CUDA_ERROR_INVALID_VALUE"); }, 4);
}

TEST_F(DeviceJobFaultsTest, AnyCopyFails) {
  Sweep(
      {.ranks = 1, .tier = model::v1::TIER_HOST, .ratio = 0.5},
      [](int k) { return absl::StrCat("cuMemcpyDtoHAsync:", k, ":CUDA_ERROR_INVALID_VALUE"); }, 3);
  Sweep(
      {.ranks = 1, .tier = model::v1::TIER_HOST, .ratio = 0.5},
      [](int k) { return absl::StrCat("cuMemcpyHtoDAsync:", k, ":CUDA_ERROR_INVALID_VALUE"); }, 3);
  Sweep(
      {.ranks = 1, .tier = model::v1::TIER_NVME, .ratio = 0.5},
      [](int k) { return absl::StrCat("cuMemcpyDtoHAsync:", k, ":CUDA_ERROR_INVALID_VALUE"); }, 3);
  Sweep(
      {.ranks = 1, .tier = model::v1::TIER_NVME, .ratio = 0.5},
      [](int k) { return absl::StrCat("cuMemcpyHtoDAsync:", k, ":CUDA_ERROR_INVALID_VALUE"); }, 3);
}

TEST_F(DeviceJobFaultsTest, MemoryIsShort) {
  ResetFakeCuda("devices=1,memory=4M");
  LocalJobOptions options;
  options.manifest = MakeManifest({3000000}, model::v1::DTYPE_BFLOAT16);
  options.config = MakeConfig(2, 1, model::v1::DTYPE_BFLOAT16);
  options.config.set_data_plane(true);
  options.config.set_tiered(true);
  options.config.set_optimizer_tier(model::v1::TIER_GPU);
  options.config.set_parameter_tier(model::v1::TIER_GPU);
  options.config.set_window(model::v1::WINDOW_COPY);
  options.in_processes = true;
  options.open_device = [](JobMemory& memory) { return CudaShard::Open(memory); };
  LocalJob big(options);
  const absl::Status status = big.TryStartWorker(0);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "cuda:0")) << status;
  EXPECT_TRUE(absl::StrContains(status.message(), "free")) << status;
  big.StopWorker(0);
}

}  // namespace
}  // namespace zeroshard
