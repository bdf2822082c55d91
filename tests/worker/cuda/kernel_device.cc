#include "tests/worker/cuda/kernel_device.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "tests/fakes/cuda/host_kernels.h"
#include "worker/cuda/launch_plan.h"

namespace zeroshard {
namespace {

constexpr size_t kAlignment = 256;
constexpr std::byte kGuard{0xa7};

class HostKernelDevice : public KernelDevice {
 public:
  HostKernelDevice() : KernelDevice(0, kKernelArenaBytes), memory_(kKernelArenaBytes + kAlignment) {
    const auto address = reinterpret_cast<uint64_t>(memory_.data());
    SetArena((address + kAlignment - 1) / kAlignment * kAlignment);
  }

  absl::Status Get(DeviceAddress from, void* data, size_t bytes) override {
    std::memcpy(data, reinterpret_cast<const void*>(from), bytes);
    return absl::OkStatus();
  }
  absl::Status Write(DeviceAddress to, const void* data, size_t bytes) override {
    std::memcpy(reinterpret_cast<void*>(to), data, bytes);
    return absl::OkStatus();
  }

  absl::Status Update(absl::Span<const UpdateLaunch> launches) override {
    ZS_ASSIGN_OR_RETURN(const auto calls, gpu::PlanUpdates(launches));
    for (const UpdateLaunch& launch : launches) {
      if (launch.state_format != StateFormat::kInt8) continue;
      for (const DeviceArrayPair& scales : launch.scales) {
        if (scales.before == scales.after) continue;
        std::memcpy(reinterpret_cast<void*>(scales.after),
                    reinterpret_cast<const void*>(scales.before), launch.blocks * sizeof(float));
      }
    }
    for (const auto& call : calls) Run(call);
    return absl::OkStatus();
  }
  absl::Status Sum(const SumLaunch& launch) override { return RunPlan(gpu::PlanSum(launch)); }
  absl::Status MergePresence(const MergePresenceLaunch& launch) override {
    return RunPlan(gpu::PlanMergePresence(launch));
  }
  absl::Status Squares(const SquaresLaunch& launch) override {
    return RunPlan(gpu::PlanSquares(launch));
  }
  absl::Status Convert(const ConvertLaunch& launch) override {
    return RunPlan(gpu::PlanConvert(launch));
  }

 private:
  // Fewer blocks than there is work for, so that they go round.
  template <class Params>
  static void Run(const gpu::KernelCall<Params>& call) {
    const auto blocks = static_cast<uint32_t>(std::clamp<uint64_t>(call.blocks, 1, 3));
    HostKernels()[call.kernel].run(&call.params, blocks, call.rows);
  }
  template <class Params>
  static absl::Status RunPlan(const absl::StatusOr<gpu::KernelCall<Params>>& call) {
    if (call.ok()) Run(*call);
    return call.status();
  }

  std::vector<std::byte> memory_;
};

}  // namespace

absl::StatusOr<DeviceAddress> KernelDevice::Put(const void* data, size_t bytes) {
  const size_t begin = used_ + kAlignment;
  const size_t end = begin + bytes;
  const size_t next = (end + kAlignment - 1) / kAlignment * kAlignment;
  if (next + kAlignment > bytes_) return absl::ResourceExhaustedError("the arena is full");
  std::vector<std::byte> image(next + kAlignment - used_, kGuard);
  if (bytes > 0) std::memcpy(image.data() + kAlignment, data, bytes);
  ZS_RETURN_IF_ERROR(Write(arena_ + used_, image.data(), image.size()));
  used_ = next;
  extents_.push_back({begin, end});
  return arena_ + begin;
}

absl::Status KernelDevice::Clear() {
  std::vector<std::byte> image(used_ == 0 ? 0 : used_ + kAlignment);
  if (!image.empty()) ZS_RETURN_IF_ERROR(Get(arena_, image.data(), image.size()));
  for (const Extent& extent : extents_) {
    std::fill(image.begin() + static_cast<ptrdiff_t>(extent.begin),
              image.begin() + static_cast<ptrdiff_t>(extent.end), kGuard);
  }
  used_ = 0;
  extents_.clear();
  const auto changed =
      std::find_if(image.begin(), image.end(), [](std::byte b) { return b != kGuard; });
  if (changed == image.end()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("a kernel wrote outside of its arrays, at offset ",
                                          changed - image.begin(), " of the arena"));
}

std::unique_ptr<KernelDevice> MakeHostKernelDevice() {
  return std::make_unique<HostKernelDevice>();
}

}  // namespace zeroshard
