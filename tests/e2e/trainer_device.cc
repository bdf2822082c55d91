#include "tests/e2e/trainer_device.h"

#include <utility>

#include "base/status.h"
#include "device/cuda/device.h"
#include "device/cuda/stream.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kPatience = absl::Minutes(2);

class CudaTrainerDevice final : public TrainerDevice {
 public:
  CudaTrainerDevice(std::unique_ptr<CudaDevice> device, CudaStream stream)
      : device_(std::move(device)), stream_(std::move(stream)) {}

  StreamHandle stream() const override { return stream_.handle(); }
  absl::Status Read(DeviceAddress from, std::span<std::byte> to) override {
    ZS_RETURN_IF_ERROR(stream_.CopyToHost(to.data(), from, to.size()));
    return stream_.Synchronize(kPatience);
  }
  absl::Status Write(DeviceAddress to, std::span<const std::byte> from) override {
    ZS_RETURN_IF_ERROR(stream_.CopyToDevice(to, from.data(), from.size()));
    return stream_.Synchronize(kPatience);
  }

 private:
  const std::unique_ptr<CudaDevice> device_;
  CudaStream stream_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<TrainerDevice>> TrainerDevice::Open(int ordinal) {
  ZS_ASSIGN_OR_RETURN(std::unique_ptr<CudaDevice> device, CudaDevice::Open(ordinal));
  ZS_ASSIGN_OR_RETURN(CudaStream stream, CudaStream::Create(*device, StreamPriority::kNormal));
  return std::make_unique<CudaTrainerDevice>(std::move(device), std::move(stream));
}

}  // namespace zeroshard
