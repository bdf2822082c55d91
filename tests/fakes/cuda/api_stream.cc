// Streams, events and memory operations of the fake driver.

#include <cuda.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "tests/fakes/cuda/runtime.h"

using zeroshard::fake_cuda::Complain;
using zeroshard::fake_cuda::Completion;
using zeroshard::fake_cuda::Context;
using zeroshard::fake_cuda::Event;
using zeroshard::fake_cuda::Need;
using zeroshard::fake_cuda::Runtime;
using zeroshard::fake_cuda::Stream;
using zeroshard::fake_cuda::Work;

namespace {

Runtime& Fake() { return Runtime::Get(); }

template <typename T>
bool Holds(T found, T value, unsigned condition) {
  using Signed = std::make_signed_t<T>;
  switch (condition) {
    case CU_STREAM_WAIT_VALUE_GEQ:  // cyclic: ~0 is less than 0
      return static_cast<Signed>(found - value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ:
      return found == value;
    case CU_STREAM_WAIT_VALUE_AND:
      return (found & value) != 0;
    default:
      return ~(found | value) != 0;
  }
}

// Adds the 4 or 8 bytes to what is checked now and when their turn comes.
template <typename T>
CUresult AddValue(const char* call, Stream* stream, CUdeviceptr address, bool writes, Work* work) {
  if (address % sizeof(T) != 0) return CUDA_ERROR_INVALID_VALUE;
  work->name = call;
  work->ranges.push_back({address, sizeof(T), writes, "the address"});
  const auto wrong = Fake().memory().Check(stream->context()->device, work->ranges);
  if (!wrong.has_value()) return CUDA_SUCCESS;
  Complain(std::string(call) + ": " + *wrong);
  return CUDA_ERROR_INVALID_VALUE;
}

template <typename T>
CUresult WriteValue(const char* call, CUstream handle, CUdeviceptr address, T value,
                    unsigned flags) {
  const std::shared_ptr<Stream> stream = Fake().FindStream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if ((flags & ~unsigned{CU_STREAM_WRITE_VALUE_NO_MEMORY_BARRIER}) != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  Work work;
  const CUresult result = AddValue<T>(call, stream.get(), address, true, &work);
  if (result != CUDA_SUCCESS) return result;
  work.run = [address, value] {
    std::atomic_ref<T>(*reinterpret_cast<T*>(address)).store(value, std::memory_order_release);
    return CUDA_SUCCESS;
  };
  stream->Enqueue(std::move(work));
  return CUDA_SUCCESS;
}

// Polls, ever less often.
template <typename T>
void AwaitValue(CUdeviceptr address, T value, unsigned condition) {
  auto pause = std::chrono::microseconds(5);
  const std::atomic_ref<T> found(*reinterpret_cast<T*>(address));
  while (!Holds(found.load(std::memory_order_acquire), value, condition) && !Stream::GivenUp()) {
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(200));
  }
}

template <typename T>
CUresult WaitValue(const char* call, CUstream handle, CUdeviceptr address, T value,
                   unsigned flags) {
  const std::shared_ptr<Stream> stream = Fake().FindStream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if ((flags & CU_STREAM_WAIT_VALUE_FLUSH) != 0) return CUDA_ERROR_NOT_SUPPORTED;
  if (flags > CU_STREAM_WAIT_VALUE_NOR) return CUDA_ERROR_INVALID_VALUE;
  Work work;
  const CUresult result = AddValue<T>(call, stream.get(), address, false, &work);
  if (result != CUDA_SUCCESS) return result;
  work.run = [address, value, flags] {
    AwaitValue<T>(address, value, flags);
    return CUDA_SUCCESS;
  };
  stream->Enqueue(std::move(work));
  return CUDA_SUCCESS;
}

CUresult RecordEvent(CUevent event, CUstream handle) {
  const std::shared_ptr<Stream> stream = Fake().FindStream(handle);
  const std::shared_ptr<Event> found = Fake().events.Find(event);
  if (stream == nullptr || found == nullptr || found->context != stream->context()) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  Work work;
  work.name = "cuEventRecord";
  work.counts = false;
  std::lock_guard<std::mutex> lock(found->mu);
  found->record = stream->Enqueue(std::move(work));
  return CUDA_SUCCESS;
}

// What was recorded last; null when nothing was.
std::shared_ptr<Completion> RecordOf(Event* event) {
  std::lock_guard<std::mutex> lock(event->mu);
  return event->record;
}

}  // namespace

extern "C" {

CUresult CUDAAPI cuStreamCreate(CUstream* phStream, unsigned int Flags) {
  FAKE_CUDA_ENTER(Need::kContext);
  if (Flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  *phStream = reinterpret_cast<CUstream>(Fake().NewStream(Runtime::Current(), Flags, 0).get());
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamCreateWithPriority(CUstream* phStream, unsigned int flags, int priority) {
  FAKE_CUDA_ENTER(Need::kContext);
  if (flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  const int clamped = std::clamp(priority, -5, 0);
  *phStream =
      reinterpret_cast<CUstream>(Fake().NewStream(Runtime::Current(), flags, clamped).get());
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamDestroy(CUstream hStream) {
  FAKE_CUDA_ENTER(Need::kInit);
  const std::shared_ptr<Stream> stream = Fake().streams.Remove(hStream);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  stream->Close();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamQuery(CUstream hStream) {
  FAKE_CUDA_ENTER(Need::kInit);
  const std::shared_ptr<Stream> stream = Fake().FindStream(hStream);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const CUresult lost = Fake().LostError(stream->context()->device);
  if (lost != CUDA_SUCCESS) return lost;
  const std::shared_ptr<Completion> last = stream->Last();
  return last == nullptr || last->Done() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult CUDAAPI cuStreamSynchronize(CUstream hStream) {
  FAKE_CUDA_ENTER(Need::kInit);
  const std::shared_ptr<Stream> stream = Fake().FindStream(hStream);
  return stream == nullptr ? CUDA_ERROR_INVALID_HANDLE : stream->Synchronize();
}

CUresult CUDAAPI cuStreamGetPriority(CUstream hStream, int* priority) {
  FAKE_CUDA_ENTER(Need::kInit);
  const std::shared_ptr<Stream> stream = Fake().FindStream(hStream);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *priority = stream->priority();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetFlags(CUstream hStream, unsigned int* flags) {
  FAKE_CUDA_ENTER(Need::kInit);
  const std::shared_ptr<Stream> stream = Fake().FindStream(hStream);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *flags = stream->flags();
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamGetCtx(CUstream hStream, CUcontext* pctx) {
  FAKE_CUDA_ENTER(Need::kInit);
  const std::shared_ptr<Stream> stream = Fake().FindStream(hStream);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  *pctx = reinterpret_cast<CUcontext>(stream->context());
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamWaitEvent(CUstream hStream, CUevent hEvent, unsigned int) {
  FAKE_CUDA_ENTER(Need::kContext);
  const std::shared_ptr<Stream> stream = Fake().FindStream(hStream);
  const std::shared_ptr<Event> event = Fake().events.Find(hEvent);
  if (stream == nullptr || event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  std::shared_ptr<Completion> record = RecordOf(event.get());
  if (record == nullptr) return CUDA_SUCCESS;
  Work work;
  work.name = "cuStreamWaitEvent";
  work.counts = false;
  work.after.push_back(std::move(record));
  stream->Enqueue(std::move(work));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuLaunchHostFunc(CUstream hStream, CUhostFn fn, void* userData) {
  FAKE_CUDA_ENTER(Need::kContext);
  const std::shared_ptr<Stream> stream = Fake().FindStream(hStream);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Work work;
  work.name = "cuLaunchHostFunc";
  work.is_callback = true;
  work.run = [fn, userData] {
    fn(userData);
    return CUDA_SUCCESS;
  };
  stream->Enqueue(std::move(work));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuStreamWriteValue32(CUstream stream, CUdeviceptr addr, cuuint32_t value,
                                      unsigned int flags) {
  FAKE_CUDA_ENTER(Need::kContext);
  return WriteValue<uint32_t>("cuStreamWriteValue32", stream, addr, value, flags);
}

CUresult CUDAAPI cuStreamWriteValue64(CUstream stream, CUdeviceptr addr, cuuint64_t value,
                                      unsigned int flags) {
  FAKE_CUDA_ENTER(Need::kContext);
  return WriteValue<uint64_t>("cuStreamWriteValue64", stream, addr, value, flags);
}

CUresult CUDAAPI cuStreamWaitValue32(CUstream stream, CUdeviceptr addr, cuuint32_t value,
                                     unsigned int flags) {
  FAKE_CUDA_ENTER(Need::kContext);
  return WaitValue<uint32_t>("cuStreamWaitValue32", stream, addr, value, flags);
}

CUresult CUDAAPI cuStreamWaitValue64(CUstream stream, CUdeviceptr addr, cuuint64_t value,
                                     unsigned int flags) {
  FAKE_CUDA_ENTER(Need::kContext);
  return WaitValue<uint64_t>("cuStreamWaitValue64", stream, addr, value, flags);
}

CUresult CUDAAPI cuEventCreate(CUevent* phEvent, unsigned int Flags) {
  FAKE_CUDA_ENTER(Need::kContext);
  if (Flags > (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING)) return CUDA_ERROR_INVALID_VALUE;
  auto event = std::make_shared<Event>();
  event->flags = Flags;
  event->context = Runtime::Current();
  *phEvent = Fake().events.Add<CUevent>(std::move(event));
  return CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventDestroy(CUevent hEvent) {
  FAKE_CUDA_ENTER(Need::kInit);
  return Fake().events.Remove(hEvent) == nullptr ? CUDA_ERROR_INVALID_HANDLE : CUDA_SUCCESS;
}

CUresult CUDAAPI cuEventRecord(CUevent hEvent, CUstream hStream) {
  FAKE_CUDA_ENTER(Need::kContext);
  return RecordEvent(hEvent, hStream);
}

CUresult CUDAAPI cuEventRecordWithFlags(CUevent hEvent, CUstream hStream, unsigned int) {
  FAKE_CUDA_ENTER(Need::kContext);
  return RecordEvent(hEvent, hStream);
}

CUresult CUDAAPI cuEventQuery(CUevent hEvent) {
  FAKE_CUDA_ENTER(Need::kInit);
  const std::shared_ptr<Event> event = Fake().events.Find(hEvent);
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const CUresult lost = Fake().LostError(event->context->device);
  if (lost != CUDA_SUCCESS) return lost;
  const std::shared_ptr<Completion> record = RecordOf(event.get());
  return record == nullptr || record->Done() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult CUDAAPI cuEventSynchronize(CUevent hEvent) {
  FAKE_CUDA_ENTER(Need::kInit);
  const std::shared_ptr<Event> event = Fake().events.Find(hEvent);
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const std::shared_ptr<Completion> record = RecordOf(event.get());
  if (record != nullptr) record->Wait();
  return Fake().LostError(event->context->device);
}

CUresult CUDAAPI cuEventElapsedTime(float* pMilliseconds, CUevent hStart, CUevent hEnd) {
  FAKE_CUDA_ENTER(Need::kInit);
  const std::shared_ptr<Event> start = Fake().events.Find(hStart);
  const std::shared_ptr<Event> end = Fake().events.Find(hEnd);
  if (start == nullptr || end == nullptr ||
      ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) != 0) {
    return CUDA_ERROR_INVALID_HANDLE;
  }
  const std::shared_ptr<Completion> from = RecordOf(start.get());
  const std::shared_ptr<Completion> to = RecordOf(end.get());
  if (from == nullptr || to == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (!from->Done() || !to->Done()) return CUDA_ERROR_NOT_READY;
  *pMilliseconds = std::chrono::duration<float, std::milli>(to->time() - from->time()).count();
  return CUDA_SUCCESS;
}

}  // extern "C"
