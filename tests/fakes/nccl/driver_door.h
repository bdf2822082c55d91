// What the fake NCCL needs of the fake driver (tests/fakes/cuda), which it finds in the process.
#ifndef ZEROSHARD_TESTS_FAKES_NCCL_DRIVER_DOOR_H_
#define ZEROSHARD_TESTS_FAKES_NCCL_DRIVER_DOOR_H_

#include <cuda.h>

#include <array>
#include <cstdint>
#include <optional>

#include "tests/fakes/cuda/fake_cuda.h"

namespace zeroshard::fake_nccl {

struct DriverDoor {
  decltype(&cuCtxGetCurrent) ctx_get_current = nullptr;
  decltype(&cuCtxGetDevice) ctx_get_device = nullptr;
  CUresult (*ctx_push)(CUcontext context) = nullptr;
  CUresult (*ctx_pop)(CUcontext* context) = nullptr;
  CUresult (*device_get_uuid)(CUuuid* uuid, CUdevice device) = nullptr;
  decltype(&FakeCudaEnqueue) enqueue = nullptr;
  decltype(&FakeCudaGivenUp) given_up = nullptr;
  decltype(&FakeCudaAllocations) allocations = nullptr;
};

// Ends the process where libcuda.so.1 is none or not the fake one.
const DriverDoor& TheDriver();

struct CurrentDevice {
  CUcontext context = nullptr;
  std::array<uint8_t, 16> uuid = {};
};
// Of the calling thread's context; nothing where it has none.
std::optional<CurrentDevice> DeviceOfThisThread();

// Whether these bytes lie in one allocation of device memory that is mapped now.
bool IsInOneMapping(uint64_t address, uint64_t bytes);

}  // namespace zeroshard::fake_nccl

#endif  // ZEROSHARD_TESTS_FAKES_NCCL_DRIVER_DOOR_H_
