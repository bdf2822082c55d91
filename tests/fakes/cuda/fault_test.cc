#include <atomic>
#include <chrono>
#include <thread>

#include "tests/fakes/cuda/fixture.h"

namespace zeroshard::fake_cuda {
namespace {

using FaultTest = FakeCudaTest;

TEST_F(FaultTest, TheKthCallFails) {
  Start("fault=cuMemAlloc:2:CUDA_ERROR_OUT_OF_MEMORY|cuStreamCreate:1:CUDA_ERROR_UNKNOWN");
  CUdeviceptr memory = 0;
  CU_OK(cuMemAlloc(&memory, 64));
  EXPECT_EQ(cuMemAlloc(&memory, 64), CUDA_ERROR_OUT_OF_MEMORY);
  CU_OK(cuMemAlloc(&memory, 64));
  EXPECT_EQ(FakeCudaCalls("cuMemAlloc"), 3u);
  CUstream stream = nullptr;
  EXPECT_EQ(cuStreamCreate(&stream, 0), CUDA_ERROR_UNKNOWN);
}

TEST_F(FaultTest, FaultsHitOnlyWhomTheyAreFor) {
  Start("only=another-program,fault=cuMemAlloc:1:CUDA_ERROR_OUT_OF_MEMORY");
  CUdeviceptr memory = 0;
  CU_OK(cuMemAlloc(&memory, 64));
}

TEST_F(FaultTest, ALostDeviceStaysLost) {
  Start("devices=2,memory=64M,fault=lost:3");
  CUdeviceptr memory = 0;
  CU_OK(cuMemAlloc(&memory, 64));
  const CUstream stream = NewStream();
  CUevent event = nullptr;
  CU_OK(cuEventCreate(&event, 0));
  CU_OK(cuMemsetD8Async(memory, 1, 64, stream));
  CU_OK(cuMemsetD8Async(memory, 2, 64, stream));
  CU_OK(cuStreamSynchronize(stream));
  CU_OK(cuMemsetD8Async(memory, 3, 64, stream));
  cuEventRecord(event, stream);
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_ERROR_ECC_UNCORRECTABLE);
  EXPECT_EQ(cuEventSynchronize(event), CUDA_ERROR_ECC_UNCORRECTABLE);
  EXPECT_EQ(cuStreamQuery(stream), CUDA_ERROR_ECC_UNCORRECTABLE);
  EXPECT_EQ(cuMemsetD8Async(memory, 3, 64, stream), CUDA_ERROR_ECC_UNCORRECTABLE);
  EXPECT_EQ(cuMemFree(memory), CUDA_ERROR_ECC_UNCORRECTABLE);
  EXPECT_EQ(cuCtxSynchronize(), CUDA_ERROR_ECC_UNCORRECTABLE);
  CUmemGenericAllocationHandle handle;
  CUmemAllocationProp prop = Prop();
  EXPECT_EQ(cuMemCreate(&handle, 2 * kMiB, &prop, 0), CUDA_ERROR_ECC_UNCORRECTABLE);
  prop = Prop(1);
  CU_OK(cuMemCreate(&handle, 2 * kMiB, &prop, 0));  // the other one works
}

TEST_F(FaultTest, LossEndsWaits) {
  Start("fault=lost:2:CUDA_ERROR_LAUNCH_FAILED");
  CUdeviceptr memory = 0;
  CU_OK(cuMemAlloc(&memory, 64));
  const CUstream waits = NewStream();
  const CUstream fails = NewStream();
  CU_OK(cuStreamWaitValue64(waits, memory, 1, CU_STREAM_WAIT_VALUE_GEQ));
  while (FakeCudaCalls("operations") < 1) std::this_thread::yield();
  CU_OK(cuMemsetD8Async(memory, 0, 64, fails));
  EXPECT_EQ(cuStreamSynchronize(waits), CUDA_ERROR_LAUNCH_FAILED);
}

TEST_F(FaultTest, AnOperationThatHangsHoldsItsStreamOnly) {
  Start("memory=64M,hang:1");
  CUdeviceptr memory = 0;
  CU_OK(cuMemAlloc(&memory, 64));
  const CUstream hangs = NewStream();
  const CUstream runs = NewStream();
  CU_OK(cuMemsetD8Async(memory, 1, 64, hangs));
  while (FakeCudaCalls("operations") < 1) std::this_thread::yield();
  CU_OK(cuMemsetD8Async(memory, 2, 64, runs));
  CU_OK(cuStreamSynchronize(runs));
  EXPECT_EQ(cuStreamQuery(hangs), CUDA_ERROR_NOT_READY);
  CU_OK(cuStreamDestroy(hangs));
  ResetFakeCuda("");  // ends it
}

}  // namespace
}  // namespace zeroshard::fake_cuda
