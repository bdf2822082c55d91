#ifndef ZEROSHARD_TESTS_FAKES_CUDA_FIXTURE_H_
#define ZEROSHARD_TESTS_FAKES_CUDA_FIXTURE_H_

#include <cuda.h>

#include <cstdint>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/fakes/cuda/fake_cuda.h"

namespace zeroshard::fake_cuda {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;

#define CU_OK(call) ASSERT_EQ(call, CUDA_SUCCESS)

// Starts each test with a fresh driver, whose first device is current.
class FakeCudaTest : public testing::Test {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    Start("devices=2,memory=64M");
  }
  void TearDown() override { ResetFakeCuda(""); }

  // Starts over with these settings.
  static void Start(const std::string& settings) {
    ResetFakeCuda(settings);
    CU_OK(cuInit(0));
    CUcontext context;
    CU_OK(cuDevicePrimaryCtxRetain(&context, 0));
    CU_OK(cuCtxSetCurrent(context));
  }

  static CUmemAllocationProp Prop(CUdevice device = 0) {
    CUmemAllocationProp prop = {};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    return prop;
  }

  static CUmemAccessDesc Access(CUdevice device = 0,
                                CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE) {
    CUmemAccessDesc access = {};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = flags;
    return access;
  }

  // Maps `handle` at a new address with access for device 0.
  static void MapNew(CUmemGenericAllocationHandle handle, uint64_t bytes, CUdeviceptr* address) {
    CU_OK(cuMemAddressReserve(address, bytes, 0, 0, 0));
    CU_OK(cuMemMap(*address, bytes, 0, handle, 0));
    const CUmemAccessDesc access = Access();
    CU_OK(cuMemSetAccess(*address, bytes, &access, 1));
  }

  static CUstream NewStream(unsigned flags = CU_STREAM_NON_BLOCKING) {
    CUstream stream = nullptr;
    EXPECT_EQ(cuStreamCreateWithPriority(&stream, flags, 0), CUDA_SUCCESS);
    return stream;
  }

  static uint64_t FreeBytes() {
    size_t free = 0;
    size_t total = 0;
    EXPECT_EQ(cuMemGetInfo(&free, &total), CUDA_SUCCESS);
    return free;
  }
};

}  // namespace zeroshard::fake_cuda

#endif  // ZEROSHARD_TESTS_FAKES_CUDA_FIXTURE_H_
