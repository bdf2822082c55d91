#include "tests/fakes/nccl/driver_door.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "tests/fakes/nccl/settings.h"

namespace zeroshard::fake_nccl {
namespace {

template <class Function>
void Resolve(void* library, Function& function, const char* name) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  if (function == nullptr)
    Misuse(std::string("libcuda.so.1 has no ") + name + ": not the fake one");
}

DriverDoor Open() {
  void* library = ::dlopen("libcuda.so.1", RTLD_NOW);
  if (library == nullptr) Misuse(std::string("no libcuda.so.1: ") + ::dlerror());
  DriverDoor door;
  Resolve(library, door.ctx_get_current, "cuCtxGetCurrent");
  Resolve(library, door.ctx_get_device, "cuCtxGetDevice");
  Resolve(library, door.ctx_push, "cuCtxPushCurrent_v2");
  Resolve(library, door.ctx_pop, "cuCtxPopCurrent_v2");
  Resolve(library, door.device_get_uuid, "cuDeviceGetUuid_v2");
  Resolve(library, door.enqueue, "FakeCudaEnqueue");
  Resolve(library, door.given_up, "FakeCudaGivenUp");
  Resolve(library, door.allocations, "FakeCudaAllocations");
  return door;
}

}  // namespace

const DriverDoor& TheDriver() {
  static const DriverDoor door = Open();
  return door;
}

std::optional<CurrentDevice> DeviceOfThisThread() {
  const DriverDoor& driver = TheDriver();
  CUcontext context = nullptr;
  CUdevice device = 0;
  CUuuid uuid = {};
  if (driver.ctx_get_current(&context) != CUDA_SUCCESS || context == nullptr ||
      driver.ctx_get_device(&device) != CUDA_SUCCESS ||
      driver.device_get_uuid(&uuid, device) != CUDA_SUCCESS) {
    return std::nullopt;
  }
  CurrentDevice current;
  current.context = context;
  std::memcpy(current.uuid.data(), uuid.bytes, current.uuid.size());
  return current;
}

bool IsInOneMapping(uint64_t address, uint64_t bytes) {
  // Other threads may map more between the two calls.
  constexpr size_t kMore = 64;
  const auto& list = TheDriver().allocations;
  std::vector<FakeCudaAllocation> live(static_cast<size_t>(list(nullptr, 0)) + kMore);
  const int found = list(live.data(), static_cast<int>(live.size()));
  live.resize(std::min(live.size(), static_cast<size_t>(found)));
  return std::any_of(live.begin(), live.end(), [&](const FakeCudaAllocation& one) {
    return std::strcmp(one.kind, "mapping") == 0 && one.address <= address &&
           address + bytes <= one.address + one.bytes;
  });
}

}  // namespace zeroshard::fake_nccl
