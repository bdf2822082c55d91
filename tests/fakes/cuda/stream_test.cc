#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "tests/fakes/cuda/fixture.h"

namespace zeroshard::fake_cuda {
namespace {

using StreamTest = FakeCudaTest;

struct Gate {
  std::atomic<bool> open{false};
  std::atomic<int> passed{0};
};

void Pass(void* user) {
  auto* const gate = static_cast<Gate*>(user);
  while (!gate->open) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  ++gate->passed;
}

TEST_F(StreamTest, WorkIsAsynchronousAndInOrder) {
  Gate gate;
  CUdeviceptr memory = 0;
  CU_OK(cuMemAlloc(&memory, 64));
  const CUstream stream = NewStream();
  CU_OK(cuStreamQuery(stream));
  CU_OK(cuLaunchHostFunc(stream, &Pass, &gate));
  CU_OK(cuMemsetD8Async(memory, 1, 64, stream));
  EXPECT_EQ(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
  gate.open = true;
  CU_OK(cuStreamSynchronize(stream));
  CU_OK(cuStreamQuery(stream));
  EXPECT_EQ(gate.passed, 1);
  CU_OK(cuStreamDestroy(stream));
  EXPECT_EQ(cuStreamDestroy(stream), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(StreamTest, ADestroyedStreamStillDoesItsWork) {
  Gate gate;
  const CUstream stream = NewStream();
  CU_OK(cuLaunchHostFunc(stream, &Pass, &gate));
  CU_OK(cuStreamDestroy(stream));
  gate.open = true;
  while (gate.passed == 0) std::this_thread::yield();
}

TEST_F(StreamTest, StreamsRunBesideEachOtherUntilAnEventOrdersThem) {
  Gate gate;
  const CUstream first = NewStream();
  const CUstream second = NewStream();
  CUevent event = nullptr;
  CU_OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
  CU_OK(cuEventQuery(event));
  CU_OK(cuStreamWaitEvent(second, event, 0));  // never recorded: no wait
  CU_OK(cuStreamSynchronize(second));
  CU_OK(cuLaunchHostFunc(first, &Pass, &gate));
  CU_OK(cuEventRecord(event, first));
  Gate free;
  free.open = true;
  CU_OK(cuLaunchHostFunc(second, &Pass, &free));
  CU_OK(cuStreamSynchronize(second));
  EXPECT_EQ(free.passed, 1) << "second does not wait for first";
  CU_OK(cuStreamWaitEvent(second, event, 0));
  CU_OK(cuLaunchHostFunc(second, &Pass, &free));
  EXPECT_EQ(cuEventQuery(event), CUDA_ERROR_NOT_READY);
  EXPECT_EQ(cuStreamQuery(second), CUDA_ERROR_NOT_READY);
  gate.open = true;
  CU_OK(cuEventSynchronize(event));
  CU_OK(cuStreamSynchronize(second));
  EXPECT_EQ(free.passed, 2);
  CU_OK(cuEventDestroy(event));
  EXPECT_EQ(cuEventRecord(event, first), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(StreamTest, EventsMeasureTime) {
  CUevent from = nullptr;
  CUevent to = nullptr;
  CU_OK(cuEventCreate(&from, CU_EVENT_DEFAULT));
  CU_OK(cuEventCreate(&to, CU_EVENT_DEFAULT));
  Gate gate;
  const CUstream stream = NewStream();
  CU_OK(cuEventRecord(from, stream));
  CU_OK(cuLaunchHostFunc(stream, &Pass, &gate));
  CU_OK(cuEventRecord(to, stream));
  float milliseconds = 0;
  EXPECT_EQ(cuEventElapsedTime(&milliseconds, from, to), CUDA_ERROR_NOT_READY);
  gate.open = true;
  CU_OK(cuStreamSynchronize(stream));
  CU_OK(cuEventElapsedTime(&milliseconds, from, to));
  EXPECT_GT(milliseconds, 0);
  CUevent untimed = nullptr;
  CU_OK(cuEventCreate(&untimed, CU_EVENT_DISABLE_TIMING));
  CU_OK(cuEventRecord(untimed, stream));
  EXPECT_EQ(cuEventElapsedTime(&milliseconds, from, untimed), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(StreamTest, TheLegacyStreamWaitsForBlockingStreamsAndTheyForIt) {
  Gate gate;
  Gate free;
  free.open = true;
  const CUstream blocking = NewStream(CU_STREAM_DEFAULT);
  const CUstream other = NewStream(CU_STREAM_NON_BLOCKING);
  CU_OK(cuLaunchHostFunc(blocking, &Pass, &gate));
  CU_OK(cuLaunchHostFunc(nullptr, &Pass, &free));
  CU_OK(cuLaunchHostFunc(other, &Pass, &free));
  CU_OK(cuStreamSynchronize(other));
  EXPECT_EQ(free.passed, 1);
  EXPECT_EQ(cuStreamQuery(nullptr), CUDA_ERROR_NOT_READY);
  gate.open = true;
  CU_OK(cuStreamSynchronize(nullptr));
  EXPECT_EQ(free.passed, 2);
  Gate second;
  CU_OK(cuLaunchHostFunc(nullptr, &Pass, &second));
  CU_OK(cuLaunchHostFunc(blocking, &Pass, &free));
  EXPECT_EQ(cuStreamQuery(blocking), CUDA_ERROR_NOT_READY);
  second.open = true;
  CU_OK(cuCtxSynchronize());
  EXPECT_EQ(free.passed, 3);
}

TEST_F(StreamTest, PrioritiesAreKeptInTheRangeOfTheDevice) {
  int least = 0;
  int greatest = 0;
  CU_OK(cuCtxGetStreamPriorityRange(&least, &greatest));
  EXPECT_LT(greatest, least);
  CUstream stream = nullptr;
  CU_OK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, greatest - 7));
  int priority = 0;
  CU_OK(cuStreamGetPriority(stream, &priority));
  EXPECT_EQ(priority, greatest);
}

TEST_F(StreamTest, ValuesOrderStreams) {
  CUdeviceptr memory = 0;
  CU_OK(cuMemAlloc(&memory, 64));
  CU_OK(cuMemsetD8(memory, 0, 64));
  CU_OK(cuCtxSynchronize());
  Gate free;
  free.open = true;
  const CUstream waits = NewStream();
  const CUstream writes = NewStream();
  CU_OK(cuStreamWaitValue64(waits, memory + 8, 5, CU_STREAM_WAIT_VALUE_GEQ));
  CU_OK(cuLaunchHostFunc(waits, &Pass, &free));
  CU_OK(cuStreamWriteValue64(writes, memory + 8, 4, 0));
  CU_OK(cuStreamSynchronize(writes));
  EXPECT_EQ(cuStreamQuery(waits), CUDA_ERROR_NOT_READY);
  // GEQ is cyclic, as in the driver: ~0 is before 5.
  CU_OK(cuStreamWriteValue64(writes, memory + 8, ~0ull, 0));
  CU_OK(cuStreamSynchronize(writes));
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_EQ(cuStreamQuery(waits), CUDA_ERROR_NOT_READY);
  CU_OK(cuStreamWriteValue64(writes, memory + 8, 6, 0));
  CU_OK(cuStreamSynchronize(waits));
  EXPECT_EQ(free.passed, 1);
  CU_OK(cuStreamWaitValue32(waits, memory + 8, 6, CU_STREAM_WAIT_VALUE_EQ));
  CU_OK(cuStreamWaitValue64(waits, memory + 8, 2, CU_STREAM_WAIT_VALUE_AND));
  CU_OK(cuStreamSynchronize(waits));
  EXPECT_EQ(cuStreamWriteValue64(writes, memory + 4, 0, 0), CUDA_ERROR_INVALID_VALUE);
  uint64_t local = 0;
  EXPECT_EQ(cuStreamWaitValue64(writes, reinterpret_cast<CUdeviceptr>(&local), 0, 0),
            CUDA_ERROR_INVALID_VALUE)
      << "not registered";
}

void CallTheDriver(void* result) { *static_cast<CUresult*>(result) = cuCtxSynchronize(); }

TEST_F(StreamTest, AHostFunctionMayNotCallTheDriver) {
  CUresult result = CUDA_SUCCESS;
  const CUstream stream = NewStream();
  CU_OK(cuLaunchHostFunc(stream, &CallTheDriver, &result));
  CU_OK(cuStreamSynchronize(stream));
  EXPECT_EQ(result, CUDA_ERROR_NOT_PERMITTED);
}

// Two streams that forget to order themselves end differently for different seeds.
int LastWriter(int seed) {
  ResetFakeCuda("jitter=" + std::to_string(seed));
  cuInit(0);
  CUcontext context;
  cuDevicePrimaryCtxRetain(&context, 0);
  cuCtxSetCurrent(context);
  CUdeviceptr memory = 0;
  cuMemAlloc(&memory, 4);
  CUstream streams[2];
  for (CUstream& stream : streams) cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
  for (int i = 0; i < 2; ++i) cuMemsetD32Async(memory, static_cast<unsigned>(i), 1, streams[i]);
  cuCtxSynchronize();
  int value = 0;
  cuMemcpyDtoH(&value, memory, 4);
  return value;
}

TEST_F(StreamTest, JitterShowsMissingOrder) {
  bool seen[2] = {};
  for (int seed = 0; seed < 100 && !(seen[0] && seen[1]); ++seed) {
    seen[LastWriter(seed)] = true;
  }
  EXPECT_TRUE(seen[0] && seen[1]);
}

struct Door {
  std::atomic<bool> entered{false};
  float* value = nullptr;
};

CUresult Enter(void* user) {
  auto* const door = static_cast<Door*>(user);
  *door->value = 2;
  door->entered = true;
  while (!FakeCudaGivenUp()) std::this_thread::yield();
  return CUDA_SUCCESS;
}

TEST_F(StreamTest, OtherFakesPutWorkOnStreams) {
  CUdeviceptr memory = 0;
  CU_OK(cuMemAlloc(&memory, 4));
  Door door;
  door.value = reinterpret_cast<float*>(memory);
  const FakeCudaRange range = {memory, 4, 1, "the value"};
  const FakeCudaRange beyond = {memory, 5, 1, "the value"};
  const CUstream stream = NewStream();
  EXPECT_EQ(FakeCudaEnqueue(stream, "enter", &beyond, 1, &Enter, nullptr, &door),
            CUDA_ERROR_INVALID_VALUE);
  CU_OK(FakeCudaEnqueue(stream, "enter", &range, 1, &Enter, nullptr, &door));
  while (!door.entered) std::this_thread::yield();
  EXPECT_EQ(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
  ResetFakeCuda("");  // tells it to give up
}

}  // namespace
}  // namespace zeroshard::fake_cuda
