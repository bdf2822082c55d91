#include "device/cuda/stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "tests/device/cuda/fake_device.h"

namespace zeroshard {
namespace {

using testing::HasSubstr;

class StreamTest : public FakeDeviceTest {
 protected:
  DeviceMemory NewMemory(uint64_t bytes) {
    absl::StatusOr<DeviceMemory> memory = DeviceMemory::Create(device(), bytes);
    EXPECT_TRUE(memory.ok()) << memory.status();
    return *std::move(memory);
  }

  // A stream that does nothing until the counter (at the start of `pages`) is 1.
  CudaStream HeldStream(const PinnedPages& pages) {
    CudaStream stream = NewStream();
    EXPECT_TRUE(stream.WaitValue(pages.address(), 1).ok());
    return stream;
  }

  static void Release(const PinnedPages& pages, uint64_t value = 1) {
    std::atomic_ref<uint64_t>(*pages.As<uint64_t>()).store(value, std::memory_order_release);
  }
};

TEST_F(StreamTest, CopiesRunInOrder) {
  const DeviceMemory memory = NewMemory(8192);
  const PinnedPages host(device(), 16384);
  uint8_t* const bytes = host.As<uint8_t>();
  for (int i = 0; i < 4096; ++i) bytes[i] = static_cast<uint8_t>(i * 7);
  for (const StreamPriority priority :
       {StreamPriority::kLow, StreamPriority::kNormal, StreamPriority::kHigh}) {
    CudaStream stream = NewStream(priority);
    ASSERT_TRUE(stream.Fill(memory.address(), 0x5a, 8192).ok());
    ASSERT_TRUE(stream.CopyToDevice(memory.address(), bytes, 4096).ok());
    ASSERT_TRUE(stream.CopyOnDevice(memory.address() + 4096, memory.address(), 2048).ok());
    ASSERT_TRUE(stream.CopyToHost(bytes + 4096, memory.address(), 8192).ok());
    ASSERT_TRUE(stream.Synchronize(kLongEnough).ok());
    EXPECT_EQ(memcmp(bytes + 4096, bytes, 4096), 0);
    EXPECT_EQ(memcmp(bytes + 8192, bytes, 2048), 0);
    EXPECT_EQ(bytes[8192 + 2048], 0x5a);
    EXPECT_EQ(bytes[8192 + 4095], 0x5a);
  }
  EXPECT_EQ(FakeCudaCalls("pageable copies"), 0u);
}

TEST_F(StreamTest, OfNoBytesNothingIsAsked) {
  CudaStream stream = NewStream();
  EXPECT_TRUE(stream.Fill(0, 1, 0).ok());
  EXPECT_TRUE(stream.CopyToDevice(0, nullptr, 0).ok());
  EXPECT_TRUE(stream.CopyToHost(nullptr, 0, 0).ok());
  EXPECT_TRUE(stream.CopyOnDevice(0, 0, 0).ok());
  EXPECT_EQ(FakeCudaCalls("operations"), 0u);
}

TEST_F(StreamTest, AWaitHoldsTheStreamAndNobodyElse) {
  const PinnedPages counters(device());
  CudaStream held = HeldStream(counters);
  CudaStream other = NewStream();
  EXPECT_FALSE(held.Query().value_or(true));
  EXPECT_TRUE(other.Synchronize(kLongEnough).ok());

  const absl::Time start = absl::Now();
  const absl::Status status = held.Synchronize(absl::Milliseconds(20));
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("cuda:0 is not done after 20ms"));
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(20));

  Release(counters);
  EXPECT_TRUE(held.Synchronize(kLongEnough).ok());
  EXPECT_TRUE(held.Query().value_or(false));
}

TEST_F(StreamTest, StreamsSignalOneAnotherByCounters) {
  const PinnedPages counters(device());
  const DeviceMemory memory = NewMemory(4096);
  CudaStream held = HeldStream(counters);
  CudaStream waiter = NewStream();
  ASSERT_TRUE(held.Fill(memory.address(), 0x11, 4096).ok());
  ASSERT_TRUE(held.WriteValue(counters.address() + 8, 41).ok());
  ASSERT_TRUE(held.WriteValue(counters.address() + 8, 42).ok());
  ASSERT_TRUE(waiter.WaitValue(counters.address() + 8, 42).ok());
  ASSERT_TRUE(waiter.CopyToHost(counters.As<uint8_t>() + 64, memory.address(), 8).ok());
  EXPECT_FALSE(waiter.Query().value_or(true));
  Release(counters);
  ASSERT_TRUE(waiter.Synchronize(kLongEnough).ok());
  EXPECT_EQ(counters.As<uint64_t>()[1], 42u);
  EXPECT_EQ(counters.As<uint8_t>()[64], 0x11);
}

TEST_F(StreamTest, ADeadCounterEndsEveryWait) {
  const PinnedPages counters(device());
  CudaStream stream = NewStream();
  ASSERT_TRUE(stream.WaitValue(counters.address(), 1).ok());
  ASSERT_TRUE(stream.WaitValue(counters.address(), uint64_t{1} << 62).ok());
  Release(counters, kDeadCounter);
  EXPECT_TRUE(stream.Synchronize(kLongEnough).ok());
}

TEST_F(StreamTest, EventsOrderStreams) {
  const PinnedPages pages(device());
  const DeviceMemory memory = NewMemory(4096);
  CudaStream first = HeldStream(pages);
  CudaStream second = NewStream();
  absl::StatusOr<CudaEvent> event = CudaEvent::Create(device());
  ASSERT_TRUE(event.ok()) << event.status();
  EXPECT_TRUE(event->Query().value_or(false)) << "an event that was never recorded is done";
  ASSERT_TRUE(first.Fill(memory.address(), 0x22, 4096).ok());
  ASSERT_TRUE(first.Record(*event).ok());
  ASSERT_TRUE(second.WaitFor(*event).ok());
  ASSERT_TRUE(second.CopyToHost(pages.As<uint8_t>() + 64, memory.address(), 8).ok());
  EXPECT_FALSE(event->Query().value_or(true));
  EXPECT_EQ(event->Synchronize(absl::Milliseconds(5)).code(), absl::StatusCode::kDeadlineExceeded);
  Release(pages);
  ASSERT_TRUE(second.Synchronize(kLongEnough).ok());
  EXPECT_TRUE(event->Synchronize(kLongEnough).ok());
  EXPECT_EQ(pages.As<uint8_t>()[64], 0x22);
}

TEST_F(StreamTest, TimedEventsMeasure) {
  CudaStream stream = NewStream();
  absl::StatusOr<CudaEvent> start = CudaEvent::Create(device(), EventKind::kTimed);
  absl::StatusOr<CudaEvent> end = CudaEvent::Create(device(), EventKind::kTimed);
  ASSERT_TRUE(start.ok() && end.ok());
  ASSERT_TRUE(stream.Record(*start).ok());
  ASSERT_TRUE(stream.Notify([] { absl::SleepFor(absl::Milliseconds(3)); }).ok());
  ASSERT_TRUE(stream.Record(*end).ok());
  ASSERT_TRUE(end->Synchronize(kLongEnough).ok());
  const absl::StatusOr<absl::Duration> took = end->Since(*start);
  ASSERT_TRUE(took.ok()) << took.status();
  EXPECT_GE(*took, absl::Milliseconds(2));
  EXPECT_LT(*took, kLongEnough);
}

TEST_F(StreamTest, NotifyCallsAfterEarlierWorkOnAnotherThread) {
  const PinnedPages pages(device());
  CudaStream stream = HeldStream(pages);
  std::atomic<int> calls = 0;
  std::thread::id caller;
  ASSERT_TRUE(stream
                  .Notify([&] {
                    caller = std::this_thread::get_id();
                    ++calls;
                  })
                  .ok());
  EXPECT_EQ(calls, 0);
  Release(pages);
  ASSERT_TRUE(stream.Synchronize(kLongEnough).ok());
  EXPECT_EQ(calls, 1);
  EXPECT_NE(caller, std::this_thread::get_id());
}

TEST_F(StreamTest, AStreamThatIsDestroyedStillFinishes) {
  const PinnedPages pages(device());
  std::atomic<bool> called = false;
  {
    CudaStream stream = HeldStream(pages);
    ASSERT_TRUE(stream.Notify([&] { called = true; }).ok());
  }
  Release(pages);
  for (int i = 0; i < 3000 && !called; ++i) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_TRUE(called);
}

TEST_F(StreamTest, OnALostDeviceFunctionsAreDroppedNotCalled) {
  Restart("memory=64M,lost:2");
  auto held = std::make_shared<int>(7);
  std::atomic<bool> called = false;
  {
    const DeviceMemory memory = NewMemory(4096);
    CudaStream stream = NewStream();
    ASSERT_TRUE(stream.Fill(memory.address(), 1, 16).ok());
    ASSERT_TRUE(stream.Synchronize(kLongEnough).ok());
    (void)stream.Fill(memory.address(), 2, 16);
    // Errors of work come back from a later call.
    absl::Status status = stream.Synchronize(kLongEnough);
    for (int i = 0; i < 3000 && status.ok(); ++i) {
      absl::SleepFor(absl::Milliseconds(1));
      status = stream.Synchronize(kLongEnough);
    }
    EXPECT_TRUE(IsDeviceLost(status)) << status;
    (void)stream.Notify([held, &called] { called = true; });
    EXPECT_TRUE(IsDeviceLost(stream.Query().status()));
    EXPECT_TRUE(IsDeviceLost(stream.Fill(memory.address(), 3, 16)));
    EXPECT_TRUE(IsDeviceLost(device().Memory().status()));
  }
  EXPECT_FALSE(called);
  EXPECT_EQ(held.use_count(), 1);
}

TEST_F(StreamTest, AFunctionThatCouldNotBeEnqueuedIsGone) {
  Restart("memory=64M,fault=cuLaunchHostFunc:1:CUDA_ERROR_INVALID_VALUE");
  auto held = std::make_shared<int>(7);
  CudaStream stream = NewStream();
  EXPECT_EQ(stream.Notify([held] {}).code(), absl::StatusCode::kInternal);
  EXPECT_EQ(held.use_count(), 1);
}

TEST_F(StreamTest, AHangingDeviceDoesNotHoldTheCaller) {
  Restart("memory=64M,hang:1");
  const DeviceMemory memory = NewMemory(4096);
  CudaStream stream = NewStream();
  ASSERT_TRUE(stream.Fill(memory.address(), 1, 16).ok());
  EXPECT_EQ(stream.Synchronize(absl::Milliseconds(10)).code(), absl::StatusCode::kDeadlineExceeded);
  absl::StatusOr<CudaEvent> event = CudaEvent::Create(device());
  ASSERT_TRUE(event.ok());
  ASSERT_TRUE(stream.Record(*event).ok());
  EXPECT_EQ(event->Synchronize(absl::ZeroDuration()).code(), absl::StatusCode::kDeadlineExceeded);
  FakeCudaReset("memory=64M");  // the operation that hangs ends
}

TEST_F(StreamTest, AForeignStreamIsUsedAndLeft) {
  CUstream handle = nullptr;
  ASSERT_TRUE(device().MakeCurrent().ok());
  ASSERT_EQ(device().driver().StreamCreateWithPriority(&handle, CU_STREAM_NON_BLOCKING, 0),
            CUDA_SUCCESS);
  const DeviceMemory memory = NewMemory(4096);
  {
    CudaStream stream = CudaStream::FromHandle(device(), handle);
    CudaStream moved = std::move(stream);
    ASSERT_TRUE(moved.Fill(memory.address(), 1, 16).ok());
    ASSERT_TRUE(moved.Synchronize(kLongEnough).ok());
    EXPECT_EQ(moved.handle(), handle);
  }
  EXPECT_EQ(device().driver().StreamQuery(handle), CUDA_SUCCESS);
  EXPECT_EQ(device().driver().StreamDestroy(handle), CUDA_SUCCESS);
  EXPECT_EQ(device().driver().CtxSetCurrent(nullptr), CUDA_SUCCESS);
  // The default stream, too, is somebody else's.
  CudaStream everyones = CudaStream::FromHandle(device(), nullptr);
  ASSERT_TRUE(everyones.Fill(memory.address(), 2, 16).ok());
  EXPECT_TRUE(everyones.Synchronize(kLongEnough).ok());
}

// Every call of the driver's fails once; each is reported by who made it.
TEST_F(StreamTest, FailuresOfCallsAreReported) {
  const auto run = [this](const std::string& api) -> absl::Status {
    Restart(absl::StrCat("memory=64M,fault=", api, ":1:CUDA_ERROR_NOT_PERMITTED"));
    const DeviceMemory memory = NewMemory(4096);
    std::vector<std::byte> host(16);
    absl::StatusOr<CudaStream> stream = CudaStream::Create(device(), StreamPriority::kHigh);
    if (!stream.ok()) return stream.status();
    absl::StatusOr<CudaEvent> event = CudaEvent::Create(device());
    if (!event.ok()) return event.status();
    absl::Status first;
    const auto keep = [&first](const absl::Status& status) { first.Update(status); };
    keep(stream->Fill(memory.address(), 1, 16));
    keep(stream->CopyToDevice(memory.address(), host.data(), 16));
    keep(stream->CopyOnDevice(memory.address() + 16, memory.address(), 16));
    keep(stream->CopyToHost(host.data(), memory.address(), 16));
    keep(stream->WriteValue(memory.address(), 1));
    keep(stream->WaitValue(memory.address(), 0));
    keep(stream->Record(*event));
    keep(stream->WaitFor(*event));
    keep(stream->Notify([] {}));
    keep(event->Query().status());
    keep(stream->Synchronize(kLongEnough));
    EXPECT_TRUE(stream->Synchronize(kLongEnough).ok()) << api << " failed once";
    return first;
  };
  for (const char* api :
       {"cuCtxGetStreamPriorityRange", "cuStreamCreateWithPriority", "cuEventCreate",
        "cuMemsetD8Async", "cuMemcpyHtoDAsync", "cuMemcpyDtoDAsync", "cuMemcpyDtoHAsync",
        "cuStreamWriteValue64", "cuStreamWaitValue64", "cuEventRecord", "cuStreamWaitEvent",
        "cuLaunchHostFunc", "cuEventQuery", "cuStreamQuery"}) {
    const absl::Status status = run(api);
    EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied) << api << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(api));
    EXPECT_THAT(std::string(status.message()), HasSubstr("cuda:0"));
  }
}

}  // namespace
}  // namespace zeroshard
