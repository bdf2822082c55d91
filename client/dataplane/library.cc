// What libzeroshard-dataplane.so exports.
#include <cstring>

#include "base/config.h"
#include "base/status.h"
#include "client/dataplane/data_plane.h"
#include "client/dataplane/trainer_data_plane.h"
#include "device/cuda/device.h"

namespace zeroshard {
namespace {

absl::StatusOr<DeviceFacts> DescribeDevice(int ordinal) {
  ZS_ASSIGN_OR_RETURN(const std::vector<CudaDeviceInfo> devices, ListCudaDevices());
  for (const CudaDeviceInfo& device : devices) {
    if (device.ordinal != ordinal) continue;
    ZS_RETURN_IF_ERROR(device.usable);
    DeviceFacts facts{.ordinal = ordinal, .name = device.name};
    std::memcpy(facts.uuid.data(), device.uuid.data(), facts.uuid.size());
    return facts;
  }
  return absl::NotFoundError("no CUDA device cuda:" + std::to_string(ordinal) +
                             ": this process sees " + std::to_string(devices.size()));
}

constexpr DataPlaneLibrary kLibrary = {
    .version = kDataPlaneVersion,
    .device = &DescribeDevice,
    .create = &TrainerDataPlane::Create,
};

}  // namespace
}  // namespace zeroshard

extern "C" __attribute__((visibility("default"))) const zeroshard::DataPlaneLibrary*
zeroshard_data_plane(uint32_t version) {
  if (version != zeroshard::kDataPlaneVersion) return nullptr;
  // The library has fault points of its own.
  static const absl::Status armed = zeroshard::ArmFaultPointsFromEnv();
  return armed.ok() ? &zeroshard::kLibrary : nullptr;
}
