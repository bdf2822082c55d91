#include <cstring>
#include <vector>

#include "tests/fakes/cuda/fixture.h"

namespace zeroshard::fake_cuda {
namespace {

// A fat binary with one entry, as nvcc -fatbin writes it.
std::vector<char> Fatbin(uint16_t kind, uint32_t arch) {
  std::vector<char> image(16 + 64 + 8);
  const uint32_t magic = 0xba55ed50;
  const uint16_t version_and_header[2] = {1, 16};
  const uint64_t bytes = 64 + 8;
  std::memcpy(image.data(), &magic, 4);
  std::memcpy(image.data() + 4, version_and_header, 4);
  std::memcpy(image.data() + 8, &bytes, 8);
  const uint32_t header = 64;
  const uint64_t payload = 8;
  std::memcpy(image.data() + 16, &kind, 2);
  std::memcpy(image.data() + 20, &header, 4);
  std::memcpy(image.data() + 24, &payload, 8);
  std::memcpy(image.data() + 44, &arch, 4);
  return image;
}

class KernelTest : public FakeCudaTest {
 protected:
  void SetUp() override {
    FakeCudaTest::SetUp();
    CU_OK(cuModuleLoadData(&module_, image_.data()));
    CU_OK(cuModuleGetFunction(&add_, module_, "fake_cuda_add"));
    stream_ = NewStream();
  }

  CUresult Add(CUdeviceptr values, uint32_t count, float addend, unsigned block = 64) {
    void* params[] = {&values, &count, &addend};
    return cuLaunchKernel(add_, 1, 1, 1, block, 1, 1, 0, stream_, params, nullptr);
  }

  const std::vector<char> image_ = Fatbin(2, 90);
  CUmodule module_ = nullptr;
  CUfunction add_ = nullptr;
  CUstream stream_ = nullptr;
};

using KernelDeathTest = KernelTest;

TEST_F(KernelTest, RunsWithTheArgumentsOfTheLaunch) {
  CUdeviceptr values = 0;
  CU_OK(cuMemAlloc(&values, 64 * sizeof(float)));
  CU_OK(cuMemsetD8Async(values, 0, 64 * sizeof(float), stream_));
  for (int i = 1; i <= 3; ++i) CU_OK(Add(values, 64, static_cast<float>(i)));
  CU_OK(cuStreamSynchronize(stream_));
  float last = 0;
  CU_OK(cuMemcpyDtoH(&last, values + 63 * sizeof(float), sizeof(float)));
  EXPECT_EQ(last, 6);
}

TEST_F(KernelTest, ImagesAreCheckedAgainstTheDevice) {
  CUmodule module;
  EXPECT_EQ(cuModuleLoadData(&module, "nothing"), CUDA_ERROR_INVALID_IMAGE);
  EXPECT_EQ(cuModuleLoadData(&module, Fatbin(2, 80).data()), CUDA_ERROR_NO_BINARY_FOR_GPU);
  EXPECT_EQ(cuModuleLoadData(&module, Fatbin(1, 100).data()), CUDA_ERROR_NO_BINARY_FOR_GPU);
  CU_OK(cuModuleLoadData(&module, Fatbin(1, 80).data()));
  CUfunction function;
  EXPECT_EQ(cuModuleGetFunction(&function, module, "fake_cuda_none"), CUDA_ERROR_NOT_FOUND);
  CU_OK(cuModuleUnload(module));
  EXPECT_EQ(cuModuleGetFunction(&function, module, "fake_cuda_add"), CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(KernelTest, LibrariesGiveTheSameKernels) {
  CUlibrary library;
  CU_OK(cuLibraryLoadData(&library, image_.data(), nullptr, nullptr, 0, nullptr, nullptr, 0));
  CUkernel kernel;
  CU_OK(cuLibraryGetKernel(&kernel, library, "fake_cuda_add"));
  size_t offset = 0;
  size_t bytes = 0;
  CU_OK(cuKernelGetParamInfo(kernel, 2, &offset, &bytes));
  EXPECT_EQ(offset, 12u);
  EXPECT_EQ(bytes, 4u);
  EXPECT_EQ(cuKernelGetParamInfo(kernel, 3, &offset, &bytes), CUDA_ERROR_INVALID_VALUE);
  CUdeviceptr values = 0;
  CU_OK(cuMemAlloc(&values, 4));
  uint32_t count = 1;
  float addend = 2;
  void* params[] = {&values, &count, &addend};
  CU_OK(cuLaunchKernel(reinterpret_cast<CUfunction>(kernel), 1, 1, 1, 1, 1, 1, 0, stream_, params,
                       nullptr));
  CU_OK(cuStreamSynchronize(stream_));
}

TEST_F(KernelTest, ImpossibleLaunchesAreRefused) {
  EXPECT_EQ(Add(0, 0, 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(Add(0, 0, 0, 1025), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuLaunchKernel(add_, 1, 1, 1, 1, 1, 1, 0, stream_, nullptr, nullptr),
            CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuLaunchKernel(nullptr, 1, 1, 1, 1, 1, 1, 0, stream_, nullptr, nullptr),
            CUDA_ERROR_INVALID_HANDLE);
}

TEST_F(KernelDeathTest, WrongAddressesAreNamed) {
  CUdeviceptr values = 0;
  CU_OK(cuMemAlloc(&values, 64 * sizeof(float)));
  EXPECT_DEATH(
      {
        Add(values + 4, 64, 1);
        cuStreamSynchronize(stream_);
      },
      "fake_cuda_add: values at 0x[0-9a-f]+ \\(256 bytes\\) goes past the end of its allocation");
  std::vector<float> host(64);
  EXPECT_DEATH(
      {
        Add(reinterpret_cast<CUdeviceptr>(host.data()), 64, 1);
        cuStreamSynchronize(stream_);
      },
      "is host memory that is not registered, not device memory");
  EXPECT_DEATH(
      {
        cuMemFree(values);
        Add(values, 64, 1);
        cuStreamSynchronize(stream_);
      },
      "is device memory that was freed");
}

TEST_F(KernelDeathTest, AnotherDevicesMemoryNeedsAccess) {
  CUcontext second;
  CU_OK(cuDevicePrimaryCtxRetain(&second, 1));
  CU_OK(cuCtxPushCurrent(second));
  CUdeviceptr values = 0;
  CU_OK(cuMemAlloc(&values, 64 * sizeof(float)));
  CU_OK(cuCtxPopCurrent(nullptr));
  EXPECT_DEATH(
      {
        Add(values, 64, 1);
        cuStreamSynchronize(stream_);
      },
      "is memory of device 1 that device 0 has no access to");
}

TEST_F(KernelDeathTest, UndeclaredMemoryStaysInaccessible) {
  CUdeviceptr value = 0;
  CU_OK(cuMemAlloc(&value, 4));
  CUfunction function;
  CU_OK(cuModuleGetFunction(&function, module_, "fake_cuda_undeclared"));
  void* params[] = {&value};
  EXPECT_DEATH(
      {
        cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream_, params, nullptr);
        cuStreamSynchronize(stream_);
      },
      "");
}

}  // namespace
}  // namespace zeroshard::fake_cuda
