#include "device/cuda/device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/status.h"
#include "tests/device/cuda/fake_device.h"

namespace zeroshard {
namespace {

using testing::AllOf;
using testing::HasSubstr;

std::string Text(const absl::Status& status) { return std::string(status.message()); }

TEST_F(FakeDeviceTest, AnOpenDeviceSaysWhatItIs) {
  Restart("memory=1G,cc=9.0,name=Fake H100");
  EXPECT_EQ(device().label(), "cuda:0");
  EXPECT_EQ(device().name(), "Fake H100");
  EXPECT_EQ(device().compute_capability(), (ComputeCapability{9, 0}));
  EXPECT_EQ(device().total_memory(), 1024 * kMiB);
  EXPECT_GT(device().multiprocessors(), 0);
  EXPECT_EQ(device().granularity() % 4096, 0u);
  EXPECT_NE(device().uuid(), DeviceUuid());
  EXPECT_EQ(device().driver().version, kCudaToolkitVersion);
}

TEST_F(FakeDeviceTest, FreeMemoryIsTheDevices) {
  const auto before = device().Memory();
  ASSERT_TRUE(before.ok()) << before.status();
  EXPECT_EQ(before->total, 64 * kMiB);
  auto memory = DeviceMemory::Create(device(), 4 * kMiB);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(device().Memory()->free, before->free - 4 * kMiB);
}

TEST_F(FakeDeviceTest, AllDevicesAreListedEachWithItsOwnName) {
  Restart("devices=3,memory=64M");
  const auto devices = ListCudaDevices();
  ASSERT_TRUE(devices.ok()) << devices.status();
  ASSERT_EQ(devices->size(), 3u);
  for (size_t i = 0; i < devices->size(); ++i) {
    EXPECT_EQ((*devices)[i].ordinal, static_cast<int>(i));
    EXPECT_TRUE((*devices)[i].usable.ok()) << (*devices)[i].usable;
    for (size_t j = 0; j < i; ++j) {
      EXPECT_NE((*devices)[i].uuid, (*devices)[j].uuid);
      EXPECT_NE((*devices)[i].pci_bus_id, (*devices)[j].pci_bus_id);
    }
  }
}

TEST_F(FakeDeviceTest, ADeviceThatIsNotThereIsNamed) {
  Restart("devices=2,memory=64M");
  const absl::Status status = CudaDevice::Open(2).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(Text(status), AllOf(HasSubstr("no device cuda:2"), HasSubstr("sees 2"),
                                  HasSubstr("CUDA_VISIBLE_DEVICES")));
  EXPECT_EQ(CudaDevice::Open(-1).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(FakeDeviceTest, NoDeviceAtAllSaysWhatToLookFor) {
  device_.reset();
  fake_cuda::ResetFakeCuda("devices=0");
  const absl::Status status = CudaDevice::Open(0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(Text(status), AllOf(HasSubstr("no CUDA device"), HasSubstr("nvidia-smi")));
}

TEST_F(FakeDeviceTest, ADeviceThatIsTooOldIsListedAndRefused) {
  device_.reset();
  fake_cuda::ResetFakeCuda("cc=7.5");
  const absl::Status status = CudaDevice::Open(0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Text(status), AllOf(HasSubstr("compute capability 7.5, which is too old"),
                                  HasSubstr("8.0 to 12.x")));
  const auto devices = ListCudaDevices();
  ASSERT_TRUE(devices.ok()) << devices.status();
  EXPECT_EQ(devices->front().usable, status);
}

TEST(ComputeCapabilityTest, BoundsAreThoseOfTheKernels) {
  EXPECT_TRUE(CheckComputeCapability({8, 0}, "cuda:0").ok());
  EXPECT_TRUE(CheckComputeCapability({8, 9}, "cuda:0").ok());
  EXPECT_TRUE(CheckComputeCapability({12, 1}, "cuda:0").ok());
  EXPECT_FALSE(CheckComputeCapability({7, 9}, "cuda:0").ok());
  EXPECT_THAT(Text(CheckComputeCapability({13, 0}, "cuda:0")), HasSubstr("not known"));
}

TEST_F(FakeDeviceTest, AMigSliceIsRefusedByName) {
  device_.reset();
  fake_cuda::ResetFakeCuda("mig=1");
  const absl::Status status = CudaDevice::Open(0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Text(status), HasSubstr("MIG slice"));
  EXPECT_TRUE(IsMigSlice("NVIDIA A100-SXM4-40GB MIG 1g.5gb"));
  EXPECT_FALSE(IsMigSlice("NVIDIA A100-SXM4-40GB"));
}

TEST_F(FakeDeviceTest, CallsLeaveTheThreadsCurrentDeviceAlone) {
  CUcontext current = nullptr;
  ASSERT_EQ(device().driver().CtxSetCurrent(nullptr), CUDA_SUCCESS);
  CudaStream stream = NewStream();
  ASSERT_TRUE(device().Memory().ok());
  ASSERT_EQ(device().driver().CtxGetCurrent(&current), CUDA_SUCCESS);
  EXPECT_EQ(current, nullptr);
  ASSERT_TRUE(device().MakeCurrent().ok());
  ASSERT_EQ(device().driver().CtxGetCurrent(&current), CUDA_SUCCESS);
  EXPECT_EQ(current, device().context());
  ASSERT_EQ(device().driver().CtxSetCurrent(nullptr), CUDA_SUCCESS);
}

// Each call that opening makes fails once.
TEST_F(FakeDeviceTest, OpeningFailsWhereACallFailsAndLeavesNothing) {
  for (const char* api :
       {"cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetUuid",
        "cuDeviceGetPCIBusId", "cuDeviceTotalMem", "cuDeviceGetAttribute",
        "cuMemGetAllocationGranularity", "cuDevicePrimaryCtxRetain"}) {
    device_.reset();
    fake_cuda::ResetFakeCuda(absl::StrCat("fault=", api, ":1:CUDA_ERROR_OPERATING_SYSTEM"));
    const absl::Status status = CudaDevice::Open(0).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << api;
    EXPECT_THAT(Text(status), HasSubstr("CUDA_ERROR_OPERATING_SYSTEM")) << api;
    EXPECT_TRUE(CudaDevice::Open(0).ok()) << api;
  }
}

TEST(CudaStatusTest, CodesTellWhoseFaultItIs) {
  EXPECT_TRUE(CudaStatus(CUDA_SUCCESS, "x").ok());
  const auto code = [](CUresult result) { return CudaStatus(result, "x").code(); };
  EXPECT_EQ(code(CUDA_ERROR_OUT_OF_MEMORY), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(code(CUDA_ERROR_NO_DEVICE), absl::StatusCode::kUnavailable);
  EXPECT_EQ(code(CUDA_ERROR_NOT_INITIALIZED), absl::StatusCode::kUnavailable);
  EXPECT_EQ(code(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(code(CUDA_ERROR_INVALID_DEVICE), absl::StatusCode::kNotFound);
  EXPECT_EQ(code(CUDA_ERROR_INVALID_VALUE), absl::StatusCode::kInternal);
  EXPECT_EQ(code(static_cast<CUresult>(998)), absl::StatusCode::kInternal);
}

TEST(CudaStatusTest, ALostDeviceIsKnownAlsoAfterAnnotation) {
  for (const CUresult result : {CUDA_ERROR_ECC_UNCORRECTABLE, CUDA_ERROR_ILLEGAL_ADDRESS,
                                CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_CONTAINED}) {
    const absl::Status status = Annotate(CudaStatus(result, "cuStreamQuery"), "step 7");
    EXPECT_TRUE(IsDeviceLost(status)) << status;
    EXPECT_EQ(CudaErrorOf(status), result);
    EXPECT_THAT(Text(status), AllOf(HasSubstr("device lost"), HasSubstr("cuStreamQuery")));
  }
  EXPECT_FALSE(IsDeviceLost(CudaStatus(CUDA_ERROR_OUT_OF_MEMORY, "x")));
  EXPECT_FALSE(IsDeviceLost(absl::AbortedError("device lost")));
  EXPECT_FALSE(CudaErrorOf(absl::OkStatus()).has_value());
}

TEST(CudaNamesTest, OrdinalsAndVersions) {
  EXPECT_EQ(CudaOrdinal("cuda:12").value_or(-1), 12);
  for (const char* name :
       {"", "cuda", "cuda:", "cuda:-1", "cuda:01", "cuda:1x", "cpu:0", "cuda: 1"}) {
    EXPECT_EQ(CudaOrdinal(name).status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
  EXPECT_EQ(CudaVersionText(12080), "12.8");
  EXPECT_EQ(UuidText({0x9d, 0x62, 0xdd, 0x2b, 0x3b, 0x2a, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0xff}),
            "GPU-9d62dd2b-3b2a-0001-0203-0405060708ff");
}

}  // namespace
}  // namespace zeroshard
