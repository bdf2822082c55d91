// Copies and fills of the fake driver.

#include <cuda.h>

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "tests/fakes/cuda/runtime.h"

using zeroshard::fake_cuda::Complain;
using zeroshard::fake_cuda::Completion;
using zeroshard::fake_cuda::MemoryMap;
using zeroshard::fake_cuda::NameOf;
using zeroshard::fake_cuda::Need;
using zeroshard::fake_cuda::Range;
using zeroshard::fake_cuda::Runtime;
using zeroshard::fake_cuda::Stream;
using zeroshard::fake_cuda::Work;

namespace {

enum class Place { kHost, kDevice, kEither };
enum class Waits { kNo, kYes };

// One end of a copy.
struct End {
  uint64_t address = 0;
  Place place = Place::kEither;
  bool pageable = false;
};

Runtime& Fake() { return Runtime::Get(); }

End HostEnd(const void* memory) { return {reinterpret_cast<uint64_t>(memory), Place::kHost}; }
End DeviceEnd(CUdeviceptr address) { return {address, Place::kDevice}; }
End EitherEnd(CUdeviceptr address) { return {address, Place::kEither}; }

// Finds out what `end` is and adds what has to be checked; false, with a complaint, when it is not
// what the call wants.
bool Resolve(const char* call, const char* what, bool writes, uint64_t bytes, End* end,
             Work* work) {
  MemoryMap& memory = Fake().memory();
  const bool known = memory.Locate(end->address).has_value();
  if (end->place == Place::kEither) end->place = known ? Place::kDevice : Place::kHost;
  if (end->place == Place::kHost && memory.TouchesDevice(end->address, bytes)) {
    Complain(std::string(call) + ": " + what + " at " + zeroshard::fake_cuda::Hex(end->address) +
             " should be host memory, but is a device address");
    return false;
  }
  if (end->place == Place::kHost && !known) {
    end->pageable = true;
    return true;
  }
  work->ranges.push_back({end->address, bytes, writes, what, true});
  const std::optional<std::string> wrong = memory.Check(0, {work->ranges.back()});
  if (wrong.has_value()) Complain(std::string(call) + ": " + *wrong);
  return !wrong.has_value();
}

CUresult Finish(const std::shared_ptr<Stream>& stream, Work work, Waits waits) {
  const std::shared_ptr<Completion> done = stream->Enqueue(std::move(work));
  if (waits == Waits::kNo) return CUDA_SUCCESS;
  done->Wait();
  return Fake().LostError(stream->context()->device);
}

CUresult Copy(const char* call, End to, End from, uint64_t bytes, CUstream handle, Waits waits) {
  const std::shared_ptr<Stream> stream = Fake().FindStream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (bytes == 0) return CUDA_SUCCESS;
  Work work;
  work.name = call;
  if (!Resolve(call, "the destination", true, bytes, &to, &work) ||
      !Resolve(call, "the source", false, bytes, &from, &work)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (waits == Waits::kNo && (to.pageable || from.pageable)) Fake().Count("pageable copies");
  auto* const destination = reinterpret_cast<void*>(to.address);
  const auto* const source = reinterpret_cast<const char*>(from.address);
  if (from.pageable && !to.pageable && waits == Waits::kNo) {  // the driver copies it aside first
    auto aside = std::make_shared<std::vector<char>>(source, source + bytes);
    work.run = [destination, aside] {
      std::memcpy(destination, aside->data(), aside->size());
      return CUDA_SUCCESS;
    };
    return Finish(stream, std::move(work), waits);
  }
  work.run = [destination, source, bytes] {
    std::memmove(destination, source, bytes);
    return CUDA_SUCCESS;
  };
  if (to.pageable) waits = Waits::kYes;
  return Finish(stream, std::move(work), waits);
}

template <typename T>
CUresult Fill(const char* call, CUdeviceptr to, T value, uint64_t count, CUstream handle) {
  const std::shared_ptr<Stream> stream = Fake().FindStream(handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (count == 0) return CUDA_SUCCESS;
  if (to % sizeof(T) != 0) return CUDA_ERROR_INVALID_VALUE;
  Work work;
  work.name = call;
  End end = DeviceEnd(to);
  if (!Resolve(call, "the destination", true, count * sizeof(T), &end, &work)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  work.run = [to, value, count] {
    T* const begin = reinterpret_cast<T*>(to);
    for (uint64_t i = 0; i < count; ++i) begin[i] = value;
    return CUDA_SUCCESS;
  };
  return Finish(stream, std::move(work), Waits::kNo);
}

}  // namespace

extern "C" {

CUresult CUDAAPI cuMemcpyHtoD(CUdeviceptr dst, const void* src, size_t bytes) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Copy("cuMemcpyHtoD", DeviceEnd(dst), HostEnd(src), bytes, nullptr, Waits::kYes);
}

CUresult CUDAAPI cuMemcpyDtoH(void* dst, CUdeviceptr src, size_t bytes) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Copy("cuMemcpyDtoH", HostEnd(dst), DeviceEnd(src), bytes, nullptr, Waits::kYes);
}

CUresult CUDAAPI cuMemcpyDtoD(CUdeviceptr dst, CUdeviceptr src, size_t bytes) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Copy("cuMemcpyDtoD", DeviceEnd(dst), DeviceEnd(src), bytes, nullptr, Waits::kYes);
}

CUresult CUDAAPI cuMemcpy(CUdeviceptr dst, CUdeviceptr src, size_t bytes) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Copy("cuMemcpy", EitherEnd(dst), EitherEnd(src), bytes, nullptr, Waits::kYes);
}

CUresult CUDAAPI cuMemcpyHtoDAsync(CUdeviceptr dst, const void* src, size_t bytes,
                                   CUstream stream) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Copy("cuMemcpyHtoDAsync", DeviceEnd(dst), HostEnd(src), bytes, stream, Waits::kNo);
}

CUresult CUDAAPI cuMemcpyDtoHAsync(void* dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Copy("cuMemcpyDtoHAsync", HostEnd(dst), DeviceEnd(src), bytes, stream, Waits::kNo);
}

CUresult CUDAAPI cuMemcpyDtoDAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes,
                                   CUstream stream) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Copy("cuMemcpyDtoDAsync", DeviceEnd(dst), DeviceEnd(src), bytes, stream, Waits::kNo);
}

CUresult CUDAAPI cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Copy("cuMemcpyAsync", EitherEnd(dst), EitherEnd(src), bytes, stream, Waits::kNo);
}

CUresult CUDAAPI cuMemcpyPeerAsync(CUdeviceptr dst, CUcontext, CUdeviceptr src, CUcontext,
                                   size_t bytes, CUstream stream) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Copy("cuMemcpyPeerAsync", DeviceEnd(dst), DeviceEnd(src), bytes, stream, Waits::kNo);
}

CUresult CUDAAPI cuMemsetD8(CUdeviceptr dst, unsigned char value, size_t count) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Fill("cuMemsetD8", dst, value, count, nullptr);
}

CUresult CUDAAPI cuMemsetD16(CUdeviceptr dst, unsigned short value, size_t count) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Fill("cuMemsetD16", dst, value, count, nullptr);
}

CUresult CUDAAPI cuMemsetD32(CUdeviceptr dst, unsigned int value, size_t count) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Fill("cuMemsetD32", dst, value, count, nullptr);
}

CUresult CUDAAPI cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t count,
                                 CUstream stream) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Fill("cuMemsetD8Async", dst, value, count, stream);
}

CUresult CUDAAPI cuMemsetD16Async(CUdeviceptr dst, unsigned short value, size_t count,
                                  CUstream stream) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Fill("cuMemsetD16Async", dst, value, count, stream);
}

CUresult CUDAAPI cuMemsetD32Async(CUdeviceptr dst, unsigned int value, size_t count,
                                  CUstream stream) {
  FAKE_CUDA_ENTER(Need::kContext);
  return Fill("cuMemsetD32Async", dst, value, count, stream);
}

}  // extern "C"
