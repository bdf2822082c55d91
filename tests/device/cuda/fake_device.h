// A fixture with a fake GPU (tests/fakes/cuda) of its own settings, which checks that nothing is
// left of what a test made.
#ifndef ZEROSHARD_TESTS_DEVICE_CUDA_FAKE_DEVICE_H_
#define ZEROSHARD_TESTS_DEVICE_CUDA_FAKE_DEVICE_H_

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/shared_memory.h"
#include "device/cuda/device.h"
#include "device/cuda/memory.h"
#include "device/cuda/stream.h"
#include "tests/fakes/cuda/fake_cuda.h"

namespace zeroshard {

inline constexpr uint64_t kMiB = uint64_t{1} << 20;
// More than any test's work takes, even under a sanitizer on a busy machine.
inline constexpr absl::Duration kLongEnough = absl::Seconds(30);

// What is alive in the fake, one line each; "" when there is nothing.
inline std::string Leftovers() {
  std::string text;
  for (const FakeCudaAllocation& allocation : fake_cuda::LiveAllocations()) {
    absl::StrAppend(&text, allocation.kind, " of ", allocation.bytes, " bytes\n");
  }
  return text;
}

class FakeDeviceTest : public testing::Test {
 protected:
  void SetUp() override { Restart("memory=64M,poison=1"); }

  void TearDown() override {
    device_.reset();
    EXPECT_EQ(Leftovers(), "");
    fake_cuda::ResetFakeCuda("");
  }

  // A new fake device 0; nothing of the last may be in use.
  void Restart(const std::string& settings) {
    device_.reset();
    fake_cuda::ResetFakeCuda(settings);
    absl::StatusOr<std::unique_ptr<CudaDevice>> opened = CudaDevice::Open(0);
    ASSERT_TRUE(opened.ok()) << opened.status();
    device_ = *std::move(opened);
  }

  const CudaDevice& device() { return *device_; }

  CudaStream NewStream(StreamPriority priority = StreamPriority::kNormal) {
    absl::StatusOr<CudaStream> stream = CudaStream::Create(device(), priority);
    EXPECT_TRUE(stream.ok()) << stream.status();
    return *std::move(stream);
  }

  std::unique_ptr<CudaDevice> device_;
};

// Host memory that the device can use: a memfd, as regions of the daemon are.
struct PinnedPages {
  explicit PinnedPages(const CudaDevice& device, size_t bytes = 4096) {
    absl::StatusOr<UniqueFd> fd = CreateSealedMemfd("test", bytes);
    EXPECT_TRUE(fd.ok()) << fd.status();
    absl::StatusOr<MappedRegion> mapped = MappedRegion::Map(fd->get(), bytes, Access::kReadWrite);
    EXPECT_TRUE(mapped.ok()) << mapped.status();
    region = *std::move(mapped);
    absl::StatusOr<RegisteredHost> host = RegisteredHost::Register(device, region.bytes());
    EXPECT_TRUE(host.ok()) << host.status();
    registered = *std::move(host);
  }
  template <typename T>
  T* As() const {
    return region.As<T>();
  }
  DeviceAddress address() const { return registered.address(); }

  MappedRegion region;
  RegisteredHost registered;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_DEVICE_CUDA_FAKE_DEVICE_H_
