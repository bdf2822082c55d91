#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "tests/fakes/cuda/fixture.h"

namespace zeroshard::fake_cuda {
namespace {

using MemoryTest = FakeCudaTest;
using MemoryDeathTest = FakeCudaTest;

TEST_F(MemoryTest, AllocationsCountAgainstTheDevice) {
  EXPECT_EQ(FreeBytes(), 64 * kMiB);
  CUdeviceptr memory = 0;
  CU_OK(cuMemAlloc(&memory, 40 * kMiB));
  EXPECT_EQ(FreeBytes(), 24 * kMiB);
  CUdeviceptr more = 0;
  EXPECT_EQ(cuMemAlloc(&more, 25 * kMiB), CUDA_ERROR_OUT_OF_MEMORY);
  CU_OK(cuMemFree(memory));
  EXPECT_EQ(FreeBytes(), 64 * kMiB);
  EXPECT_EQ(cuMemFree(memory), CUDA_ERROR_INVALID_VALUE);
  EXPECT_TRUE(LiveAllocations().empty());
}

TEST_F(MemoryTest, PhysicalMemoryLivesWithItsHandlesMappingsAndDescriptors) {
  const CUmemAllocationProp prop = Prop();
  size_t granularity = 0;
  CU_OK(cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  ASSERT_EQ(granularity, 2 * kMiB);
  CUmemGenericAllocationHandle handle;
  EXPECT_EQ(cuMemCreate(&handle, kMiB, &prop, 0), CUDA_ERROR_INVALID_VALUE);
  CU_OK(cuMemCreate(&handle, 4 * kMiB, &prop, 0));
  CUdeviceptr address = 0;
  MapNew(handle, 4 * kMiB, &address);
  int fd = -1;
  CU_OK(cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0));
  CU_OK(cuMemRelease(handle));
  CU_OK(cuMemsetD8(address, 7, 4 * kMiB));
  CU_OK(cuCtxSynchronize());
  EXPECT_EQ(FreeBytes(), 60 * kMiB);
  CU_OK(cuMemUnmap(address, 4 * kMiB));
  CU_OK(cuMemAddressFree(address, 4 * kMiB));
  EXPECT_EQ(FreeBytes(), 60 * kMiB) << "the descriptor keeps it";
  CU_OK(cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(intptr_t{fd}),
                                       CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  close(fd);
  MapNew(handle, 4 * kMiB, &address);
  char byte = 0;
  CU_OK(cuMemcpyDtoH(&byte, address + 4 * kMiB - 1, 1));
  EXPECT_EQ(byte, 7);
  CU_OK(cuMemRelease(handle));
  EXPECT_EQ(cuMemRelease(handle), CUDA_ERROR_INVALID_VALUE);
  CU_OK(cuMemUnmap(address, 4 * kMiB));
  EXPECT_EQ(FreeBytes(), 64 * kMiB);
  CU_OK(cuMemAddressFree(address, 4 * kMiB));
  EXPECT_TRUE(LiveAllocations().empty());
}

TEST_F(MemoryTest, OnlyDescriptorsOfDeviceMemoryAreImported) {
  const int fd = memfd_create("other", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(fd, 4 * kMiB), 0);
  CUmemGenericAllocationHandle handle;
  EXPECT_EQ(cuMemImportFromShareableHandle(&handle, reinterpret_cast<void*>(intptr_t{fd}),
                                           CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
            CUDA_ERROR_INVALID_VALUE);
  close(fd);
}

TEST_F(MemoryTest, AWindowIsMappedOnDemand) {
  CUdeviceptr window = 0;
  CU_OK(cuMemAddressReserve(&window, 8 * kMiB, 0, 0, 0));
  const CUmemAllocationProp prop = Prop();
  const CUmemAccessDesc access = Access();
  CUmemGenericAllocationHandle handles[2];
  for (int i = 0; i < 2; ++i) {
    CU_OK(cuMemCreate(&handles[i], 2 * kMiB, &prop, 0));
    CU_OK(cuMemMap(window + (2 + 2 * i) * kMiB, 2 * kMiB, 0, handles[i], 0));
  }
  CU_OK(cuMemSetAccess(window + 2 * kMiB, 4 * kMiB, &access, 1));
  EXPECT_EQ(cuMemMap(window + 2 * kMiB, 2 * kMiB, 0, handles[0], 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemMap(window + 8 * kMiB, 2 * kMiB, 0, handles[0], 0), CUDA_ERROR_INVALID_VALUE);
  // A copy over both segments works, one past them does not.
  std::vector<char> bytes(4 * kMiB, 3);
  CU_OK(cuMemcpyHtoD(window + 2 * kMiB, bytes.data(), bytes.size()));
  EXPECT_EQ(cuMemcpyHtoD(window + 3 * kMiB, bytes.data(), bytes.size()), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemAddressFree(window, 8 * kMiB), CUDA_ERROR_INVALID_VALUE) << "still mapped";
  EXPECT_EQ(cuMemUnmap(window + 2 * kMiB, kMiB), CUDA_ERROR_INVALID_VALUE) << "half of a segment";
  CU_OK(cuMemUnmap(window + 2 * kMiB, 4 * kMiB));
  EXPECT_EQ(cuMemcpyHtoD(window + 2 * kMiB, bytes.data(), 1), CUDA_ERROR_INVALID_VALUE);
  CU_OK(cuMemAddressFree(window, 8 * kMiB));
  for (const auto handle : handles) CU_OK(cuMemRelease(handle));
}

TEST_F(MemoryTest, MemoryWithoutAccessIsNotTouched) {
  const CUmemAllocationProp prop = Prop();
  CUmemGenericAllocationHandle handle;
  CU_OK(cuMemCreate(&handle, 2 * kMiB, &prop, 0));
  CUdeviceptr address = 0;
  CU_OK(cuMemAddressReserve(&address, 2 * kMiB, 0, 0, 0));
  CU_OK(cuMemMap(address, 2 * kMiB, 0, handle, 0));
  char byte = 1;
  EXPECT_EQ(cuMemcpyHtoD(address, &byte, 1), CUDA_ERROR_INVALID_VALUE);
  const CUmemAccessDesc read_only = Access(0, CU_MEM_ACCESS_FLAGS_PROT_READ);
  CU_OK(cuMemSetAccess(address, 2 * kMiB, &read_only, 1));
  CU_OK(cuMemcpyDtoH(&byte, address, 1));
  EXPECT_EQ(byte, 0);
  EXPECT_EQ(cuMemcpyHtoD(address, &byte, 1), CUDA_ERROR_INVALID_VALUE);
}

TEST_F(MemoryTest, PoisonShowsWhoForgetsToZero) {
  Start("poison=1");
  CUdeviceptr memory = 0;
  CU_OK(cuMemAlloc(&memory, 64));
  unsigned char byte = 0;
  CU_OK(cuMemcpyDtoH(&byte, memory + 63, 1));
  EXPECT_EQ(byte, 0xcd);
}

TEST_F(MemoryTest, CopiesAndFillsOfAllKinds) {
  Start("devices=2,memory=64M,jitter=1");
  CUdeviceptr a = 0;
  CUdeviceptr b = 0;
  CU_OK(cuMemAlloc(&a, 1024));
  CU_OK(cuMemAlloc(&b, 1024));
  void* pinned = nullptr;
  CU_OK(cuMemHostAlloc(&pinned, 1024, 0));
  auto* const words = static_cast<uint32_t*>(pinned);
  const CUstream stream = NewStream();
  CU_OK(cuMemsetD32Async(a, 0x01020304, 256, stream));
  CU_OK(cuMemsetD8Async(a, 9, 1, stream));
  CU_OK(cuMemcpyDtoDAsync(b, a, 1024, stream));
  CU_OK(cuMemcpyDtoHAsync(pinned, b, 1024, stream));
  CU_OK(cuStreamSynchronize(stream));
  EXPECT_EQ(words[0], 0x01020309u);
  EXPECT_EQ(words[255], 0x01020304u);
  words[0] = 5;
  CU_OK(cuMemcpyAsync(a, reinterpret_cast<CUdeviceptr>(pinned), 4, stream));
  CU_OK(cuStreamSynchronize(stream));
  uint32_t read = 0;
  CU_OK(cuMemcpyDtoH(&read, a, 4));
  EXPECT_EQ(read, 5u);
  EXPECT_EQ(FakeCudaCalls("pageable copies"), 0u);
  EXPECT_EQ(FakeCudaCalls("operations"), 6u);
}

TEST_F(MemoryTest, APageableSourceIsCopiedAsideAtTheCall) {
  CUdeviceptr memory = 0;
  CU_OK(cuMemAlloc(&memory, 8));
  const CUstream stream = NewStream();
  uint64_t value = 1;
  CU_OK(cuStreamWriteValue64(stream, memory, 0, 0));
  CU_OK(cuMemcpyHtoDAsync(memory, &value, 8, stream));
  value = 2;
  uint64_t read = 0;
  CU_OK(cuMemcpyDtoHAsync(&read, memory, 8, stream));
  EXPECT_EQ(read, 1u) << "and a pageable destination is awaited";
  EXPECT_EQ(FakeCudaCalls("pageable copies"), 2u);
}

TEST_F(MemoryTest, RegisteredHostMemoryIsKnownToDevices) {
  const int fd = memfd_create("shared", MFD_CLOEXEC);
  ASSERT_EQ(ftruncate(fd, 8192), 0);
  void* const map = mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  CUdeviceptr address = 0;
  EXPECT_EQ(cuMemHostGetDevicePointer(&address, map, 0), CUDA_ERROR_INVALID_VALUE);
  CU_OK(cuMemHostRegister(map, 8192, CU_MEMHOSTREGISTER_PORTABLE));
  EXPECT_EQ(cuMemHostRegister(map, 4096, 0), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  CU_OK(cuMemHostGetDevicePointer(&address, map, 0));
  CUmemorytype type;
  CU_OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address));
  EXPECT_EQ(type, CU_MEMORYTYPE_HOST);
  const CUstream stream = NewStream();
  CU_OK(cuStreamWriteValue64(stream, address + 8, 77, 0));
  CU_OK(cuStreamSynchronize(stream));
  EXPECT_EQ(static_cast<uint64_t*>(map)[1], 77u);
  CU_OK(cuMemHostUnregister(map));
  EXPECT_EQ(cuMemHostUnregister(map), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  EXPECT_EQ(cuStreamWriteValue64(stream, address, 1, 0), CUDA_ERROR_INVALID_VALUE);
  munmap(map, 8192);
  EXPECT_EQ(cuMemHostRegister(map, 8192, 0), CUDA_ERROR_INVALID_VALUE) << "no longer mapped";
  void* const read_only = mmap(nullptr, 8192, PROT_READ, MAP_SHARED, fd, 0);
  EXPECT_EQ(cuMemHostRegister(read_only, 8192, 0), CUDA_ERROR_INVALID_VALUE);
  CU_OK(cuMemHostRegister(read_only, 8192, CU_MEMHOSTREGISTER_READ_ONLY));
  EXPECT_EQ(cuStreamWriteValue64(stream, reinterpret_cast<CUdeviceptr>(read_only), 1, 0),
            CUDA_ERROR_INVALID_VALUE);
  CU_OK(cuMemHostUnregister(read_only));
  munmap(read_only, 8192);
  close(fd);
}

TEST_F(MemoryTest, HostAndDeviceAddressesAreToldApart) {
  CUdeviceptr memory = 0;
  CU_OK(cuMemAlloc(&memory, 64));
  char host[64];
  EXPECT_EQ(cuMemcpyHtoD(reinterpret_cast<CUdeviceptr>(host), host, 64), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemcpyDtoH(reinterpret_cast<void*>(memory), memory, 64), CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuMemcpyHtoD(memory + 1, host, 64), CUDA_ERROR_INVALID_VALUE) << "a byte too far";
  CU_OK(cuMemFree(memory));
  EXPECT_EQ(cuMemcpyHtoD(memory, host, 64), CUDA_ERROR_INVALID_VALUE) << "freed";
}

TEST_F(MemoryDeathTest, TheHostCanNotTouchDeviceMemory) {
  CUdeviceptr memory = 0;
  CU_OK(cuMemAlloc(&memory, 64));
  CU_OK(cuMemsetD8(memory, 1, 64));
  CU_OK(cuCtxSynchronize());
  EXPECT_DEATH(*reinterpret_cast<volatile char*>(memory) = 1, "");
  EXPECT_DEATH((void)*reinterpret_cast<volatile char*>(memory), "");
}

// The host waits in the middle of a stream until told otherwise.
void Block(void* gate) {
  while (!static_cast<std::atomic<bool>*>(gate)->load()) usleep(1000);
}

TEST_F(MemoryDeathTest, WhatGoesAwayBeforeItsTurnIsNamed) {
  EXPECT_DEATH(
      {
        char* const host = static_cast<char*>(malloc(4096));
        cuMemHostRegister(host, 4096, 0);
        CUdeviceptr memory = 0;
        cuMemAlloc(&memory, 64);
        std::atomic<bool> gate{false};
        const CUstream stream = NewStream();
        cuLaunchHostFunc(stream, &Block, &gate);
        cuMemcpyHtoDAsync(memory, host, 64, stream);
        CUdeviceptr window = 0;
        CUmemGenericAllocationHandle handle;
        const CUmemAllocationProp prop = Prop();
        cuMemCreate(&handle, 2 * kMiB, &prop, 0);
        MapNew(handle, 2 * kMiB, &window);
        cuMemsetD8Async(window, 0, 64, stream);
        cuMemUnmap(window, 2 * kMiB);
        gate = true;
        cuStreamSynchronize(stream);
      },
      "cuMemsetD8Async: the destination at 0x[0-9a-f]+ \\(64 bytes\\) is a reserved device address "
      "without memory");
}

}  // namespace
}  // namespace zeroshard::fake_cuda
