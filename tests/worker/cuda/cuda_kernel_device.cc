#include "tests/worker/cuda/cuda_kernel_device.h"

#include <utility>

#include "absl/time/time.h"
#include "base/status.h"
#include "device/cuda/memory.h"
#include "device/cuda/stream.h"
#include "worker/cuda/kernels.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kDeadline = absl::Seconds(60);

class CudaKernelDevice : public KernelDevice {
 public:
  CudaKernelDevice(DeviceMemory memory, CudaStream stream, std::unique_ptr<CudaKernels> kernels)
      : KernelDevice(memory.address(), kKernelArenaBytes),
        memory_(std::move(memory)),
        stream_(std::move(stream)),
        kernels_(std::move(kernels)) {}

  absl::Status Get(DeviceAddress from, void* data, size_t bytes) override {
    ZS_RETURN_IF_ERROR(stream_.CopyToHost(data, from, bytes));
    return stream_.Synchronize(kDeadline);
  }
  absl::Status Write(DeviceAddress to, const void* data, size_t bytes) override {
    ZS_RETURN_IF_ERROR(stream_.CopyToDevice(to, data, bytes));
    return stream_.Synchronize(kDeadline);
  }
  absl::Status Update(absl::Span<const UpdateLaunch> launches) override {
    if (launches.size() == 1) return kernels_->Update(stream_, launches[0]);
    return kernels_->UpdateChunks(stream_, launches);
  }
  absl::Status Sum(const SumLaunch& launch) override { return kernels_->Sum(stream_, launch); }
  absl::Status MergePresence(const MergePresenceLaunch& launch) override {
    return kernels_->MergePresence(stream_, launch);
  }
  absl::Status Squares(const SquaresLaunch& launch) override {
    return kernels_->Squares(stream_, launch);
  }
  absl::Status Convert(const ConvertLaunch& launch) override {
    return kernels_->Convert(stream_, launch);
  }

 private:
  DeviceMemory memory_;
  CudaStream stream_;
  std::unique_ptr<CudaKernels> kernels_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<KernelDevice>> MakeCudaKernelDevice(const CudaDevice& device) {
  ZS_ASSIGN_OR_RETURN(DeviceMemory memory, DeviceMemory::Create(device, kKernelArenaBytes));
  ZS_ASSIGN_OR_RETURN(CudaStream stream, CudaStream::Create(device, StreamPriority::kNormal));
  ZS_ASSIGN_OR_RETURN(std::unique_ptr<CudaKernels> kernels, CudaKernels::Load(device));
  return std::unique_ptr<KernelDevice>(
      new CudaKernelDevice(std::move(memory), std::move(stream), std::move(kernels)));
}

}  // namespace zeroshard
