// What the library exports for tests and for other fakes.

#include <utility>

#include "tests/fakes/cuda/fake_cuda.h"
#include "tests/fakes/cuda/runtime.h"

using zeroshard::fake_cuda::Complain;
using zeroshard::fake_cuda::Need;
using zeroshard::fake_cuda::ParseSettings;
using zeroshard::fake_cuda::Runtime;
using zeroshard::fake_cuda::SettingsFromEnvironment;
using zeroshard::fake_cuda::Stream;
using zeroshard::fake_cuda::Work;

namespace {

Runtime& Fake() { return Runtime::Get(); }

// Appends the handles of one kind.
template <typename T>
void AddHandles(const char* kind, zeroshard::fake_cuda::Handles<T>& handles,
                std::vector<FakeCudaAllocation>* all) {
  for (const std::shared_ptr<T>& object : handles.All()) {
    all->push_back({kind, reinterpret_cast<uint64_t>(object.get()), 0});
  }
}

std::vector<FakeCudaAllocation> All() {
  std::vector<FakeCudaAllocation> all;
  for (const auto& live : Fake().memory().AllLive()) {
    all.push_back({live.kind, live.address, live.bytes});
  }
  for (const auto& handle : Fake().memories.All()) {
    all.push_back({"handle", reinterpret_cast<uint64_t>(handle.get()), handle->memory->bytes});
  }
  AddHandles("stream", Fake().streams, &all);
  AddHandles("event", Fake().events, &all);
  AddHandles("module", Fake().modules, &all);
  return all;
}

}  // namespace

extern "C" {

void FakeCudaReset(const char* settings) {
  Fake().Reset(settings == nullptr ? SettingsFromEnvironment() : ParseSettings(settings));
}

uint64_t FakeCudaCalls(const char* api) { return Fake().Calls(api); }

int FakeCudaAllocations(FakeCudaAllocation* out, int capacity) {
  const std::vector<FakeCudaAllocation> all = All();
  const int count = static_cast<int>(all.size());
  for (int i = 0; i < count && i < capacity; ++i) out[i] = all[static_cast<size_t>(i)];
  return count;
}

CUresult FakeCudaEnqueue(CUstream stream, const char* name, const FakeCudaRange* ranges, int count,
                         CUresult (*run)(void* user), void (*drop)(void* user), void* user) {
  FAKE_CUDA_ENTER(Need::kContext);
  const std::shared_ptr<Stream> found = Fake().FindStream(stream);
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Work work;
  work.name = name;
  for (int i = 0; i < count; ++i) {
    work.ranges.push_back({ranges[i].address, ranges[i].bytes, ranges[i].writes != 0,
                           ranges[i].what == nullptr ? "" : ranges[i].what});
  }
  const auto wrong = Fake().memory().Check(found->context()->device, work.ranges);
  if (wrong.has_value()) {
    Complain(std::string(name) + ": " + *wrong);
    return CUDA_ERROR_INVALID_VALUE;
  }
  work.run = [run, user] { return run(user); };
  if (drop != nullptr) work.drop = [drop, user] { drop(user); };
  found->Enqueue(std::move(work));
  return CUDA_SUCCESS;
}

int FakeCudaGivenUp(void) { return Stream::GivenUp() ? 1 : 0; }

}  // extern "C"
