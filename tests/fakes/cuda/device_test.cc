#include <dlfcn.h>

#include <cstring>
#include <string>
#include <thread>

#include "tests/fakes/cuda/fixture.h"

namespace zeroshard::fake_cuda {
namespace {

using DeviceTest = FakeCudaTest;

TEST_F(DeviceTest, TellsWhatTheSettingsSay) {
  Start("devices=3,memory=1G,driver=12080,cc=8.6,name=Some GPU");
  int count = 0;
  CU_OK(cuDeviceGetCount(&count));
  EXPECT_EQ(count, 3);
  int version = 0;
  CU_OK(cuDriverGetVersion(&version));
  EXPECT_EQ(version, 12080);
  char name[64];
  CU_OK(cuDeviceGetName(name, sizeof(name), 2));
  EXPECT_STREQ(name, "Some GPU");
  int major = 0;
  CU_OK(cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0));
  EXPECT_EQ(major, 8);
  size_t bytes = 0;
  CU_OK(cuDeviceTotalMem(&bytes, 1));
  EXPECT_EQ(bytes, size_t{1} << 30);
  CUdevice device;
  EXPECT_EQ(cuDeviceGet(&device, 3), CUDA_ERROR_INVALID_DEVICE);
}

TEST_F(DeviceTest, DevicesHaveTheirOwnUuidAndBusId) {
  CUuuid first;
  CUuuid second;
  CU_OK(cuDeviceGetUuid(&first, 0));
  CU_OK(cuDeviceGetUuid(&second, 1));
  EXPECT_NE(std::memcmp(&first, &second, sizeof(first)), 0);
  char id[16];
  CU_OK(cuDeviceGetPCIBusId(id, sizeof(id), 1));
  EXPECT_STREQ(id, "0000:11:00.0");
  CUdevice found = -1;
  CU_OK(cuDeviceGetByPCIBusId(&found, id));
  EXPECT_EQ(found, 1);
}

TEST_F(DeviceTest, CudaVisibleDevicesNumbersAnew) {
  CUuuid second;
  CU_OK(cuDeviceGetUuid(&second, 1));
  setenv("CUDA_VISIBLE_DEVICES", "1", 1);
  Start("devices=2");
  unsetenv("CUDA_VISIBLE_DEVICES");
  int count = 0;
  CU_OK(cuDeviceGetCount(&count));
  EXPECT_EQ(count, 1);
  CUuuid visible;
  CU_OK(cuDeviceGetUuid(&visible, 0));
  EXPECT_EQ(std::memcmp(&second, &visible, sizeof(second)), 0);
}

TEST_F(DeviceTest, AMigSliceIsToldFromItsGpu) {
  Start("mig=1");
  char name[64];
  CU_OK(cuDeviceGetName(name, sizeof(name), 0));
  EXPECT_NE(std::string(name).find("MIG"), std::string::npos);
}

TEST_F(DeviceTest, WithoutDevicesInitFails) {
  ResetFakeCuda("devices=0");
  EXPECT_EQ(cuInit(0), CUDA_ERROR_NO_DEVICE);
}

TEST_F(DeviceTest, NothingWorksBeforeInit) {
  ResetFakeCuda("");
  int count = 0;
  EXPECT_EQ(cuDeviceGetCount(&count), CUDA_ERROR_NOT_INITIALIZED);
  const char* name = nullptr;
  CU_OK(cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &name));
  EXPECT_STREQ(name, "CUDA_ERROR_OUT_OF_MEMORY");
  EXPECT_EQ(cuGetErrorName(static_cast<CUresult>(998), &name), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(DeviceTest, AThreadHasItsOwnCurrentContext) {
  CUdeviceptr memory = 0;
  std::thread([&] {
    EXPECT_EQ(cuMemAlloc(&memory, 64), CUDA_ERROR_INVALID_CONTEXT);
    CUcontext context = nullptr;
    EXPECT_EQ(cuCtxGetCurrent(&context), CUDA_SUCCESS);
    EXPECT_EQ(context, nullptr);
  }).join();
}

TEST_F(DeviceTest, TheLastReleaseEndsThePrimaryContext) {
  CUcontext again;
  CU_OK(cuDevicePrimaryCtxRetain(&again, 0));
  const CUstream stream = NewStream();
  CU_OK(cuDevicePrimaryCtxRelease(0));
  CU_OK(cuStreamSynchronize(stream));
  CU_OK(cuDevicePrimaryCtxRelease(0));
  EXPECT_EQ(cuStreamSynchronize(stream), CUDA_ERROR_INVALID_HANDLE);
  CUdeviceptr memory = 0;
  EXPECT_EQ(cuMemAlloc(&memory, 64), CUDA_ERROR_CONTEXT_IS_DESTROYED);
  EXPECT_EQ(cuDevicePrimaryCtxRelease(0), CUDA_ERROR_INVALID_CONTEXT);
}

TEST_F(DeviceTest, FunctionsAreFoundByNameInTheirNewestVersion) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  ASSERT_NE(library, nullptr);
  EXPECT_NE(dlsym(library, "cuMemAlloc_v2"), nullptr);
  EXPECT_EQ(dlsym(library, "cuMemAlloc"), nullptr) << "takes 32-bit sizes in the driver";
  void* function = nullptr;
  CUdriverProcAddressQueryResult status;
  CU_OK(cuGetProcAddress("cuMemAlloc", &function, CUDA_VERSION, 0, &status));
  EXPECT_EQ(function, dlsym(library, "cuMemAlloc_v2"));
  EXPECT_EQ(cuGetProcAddress("cuNone", &function, CUDA_VERSION, 0, &status), CUDA_ERROR_NOT_FOUND);
  Start("driver=11040");
  EXPECT_EQ(cuGetProcAddress("cuMemAlloc", &function, CUDA_VERSION, 0, &status),
            CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(status, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
  dlclose(library);
}

TEST_F(DeviceTest, SettingsThatAreNoneAreSaid) {
  EXPECT_DEATH(ResetFakeCuda("devises=2"), "unknown key 'devises'");
  EXPECT_DEATH(ResetFakeCuda("memory=8X"), "memory is '8X', not a number");
  EXPECT_DEATH(ResetFakeCuda("fault=cuInit:1:CUDA_ERROR_NONE"), "no error 'CUDA_ERROR_NONE'");
}

}  // namespace
}  // namespace zeroshard::fake_cuda
