#include "tests/fakes/cuda/kernels.h"

#include <cstring>
#include <map>
#include <utility>

#include "tests/fakes/cuda/errors.h"
#include "tests/fakes/cuda/runtime.h"

namespace zeroshard::fake_cuda {
namespace {

// Filled by static initialisers of other files, so made on first use.
std::map<std::string, FakeKernel>& Kernels() {
  static auto* const kernels = new std::map<std::string, FakeKernel>;
  return *kernels;
}

}  // namespace

void RegisterFakeKernel(const std::string& name, FakeKernel kernel) {
  if (!Kernels().emplace(name, std::move(kernel)).second) {
    Die("the kernel " + name + " was registered twice");
  }
}

const FakeKernel* FindFakeKernel(const std::string& name) {
  const auto it = Kernels().find(name);
  return it == Kernels().end() ? nullptr : &it->second;
}

void ReadDevice(uint64_t address, void* to, size_t bytes) {
  MemoryMap& memory = Runtime::Get().memory();
  const std::vector<Range> ranges = {{address, bytes, false, "an argument of a kernel", true}};
  const std::optional<std::string> wrong = memory.Open(0, ranges);
  if (wrong.has_value()) Die("ReadDevice: " + *wrong);
  std::memcpy(to, reinterpret_cast<const void*>(address), bytes);
  memory.Close(ranges);
}

}  // namespace zeroshard::fake_cuda
