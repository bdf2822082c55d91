#include "worker/cuda/kernels.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status.h"
#include "device/cuda/device.h"
#include "device/cuda/stream.h"
#include "worker/cuda/kernel_image.h"
#include "worker/cuda/kernel_launch.h"
#include "worker/cuda/launch_plan.h"

namespace zeroshard {
namespace {

// Blocks of a grid for each multiprocessor: several times what it runs at once, so that those that
// end early are followed by others.
constexpr uint64_t kGridBlocks = 32;

}  // namespace

struct CudaKernels::Module {
  explicit Module(const CudaDevice& of) : device(of) {}
  ~Module() {
    const CurrentDevice current(device);
    if (handle != nullptr && current.status().ok()) device.driver().ModuleUnload(handle);
  }
  Module(const Module&) = delete;
  Module& operator=(const Module&) = delete;

  absl::Status Load();
  template <class Params>
  absl::Status Launch(CudaStream& stream, const gpu::KernelCall<Params>& call) const;

  const CudaDevice& device;
  CUmodule handle = nullptr;
  std::array<CUfunction, gpu::kKernels> functions = {};
};

absl::Status CudaKernels::Module::Load() {
  const CurrentDevice current(device);
  ZS_RETURN_IF_ERROR(current.status());
  const CUresult loaded = device.driver().ModuleLoadData(&handle, zeroshard_kernel_image);
  if (loaded == CUDA_ERROR_NO_BINARY_FOR_GPU) {
    return absl::FailedPreconditionError(
        absl::StrCat(device.label(), ": the kernels of this build hold no code for ", device.name(),
                     ", compute capability ", device.compute_capability().major, ".",
                     device.compute_capability().minor));
  }
  if (loaded != CUDA_SUCCESS) return device.Error(loaded, "cuModuleLoadData of the kernels");
  for (size_t i = 0; i < functions.size(); ++i) {
    const char* const name = gpu::KernelNames()[i];
    const CUresult found = device.driver().ModuleGetFunction(&functions[i], handle, name);
    if (found != CUDA_SUCCESS) {
      return device.Error(found, absl::StrCat("cuModuleGetFunction of ", name));
    }
  }
  return absl::OkStatus();
}

template <class Params>
absl::Status CudaKernels::Module::Launch(CudaStream& stream,
                                         const gpu::KernelCall<Params>& call) const {
  const CurrentDevice current(device);
  ZS_RETURN_IF_ERROR(current.status());
  const auto limit = static_cast<uint64_t>(std::max(1, device.multiprocessors())) * kGridBlocks;
  const auto blocks = static_cast<unsigned>(std::clamp<uint64_t>(call.blocks, 1, limit));
  void* params[] = {const_cast<Params*>(&call.params)};
  const CUresult launched =
      device.driver().LaunchKernel(functions[call.kernel], blocks, call.rows, 1, gpu::kBlockThreads,
                                   1, 1, 0, stream.handle(), params, nullptr);
  if (launched == CUDA_SUCCESS) return absl::OkStatus();
  return device.Error(launched, absl::StrCat("launch of kernel ", gpu::KernelNames()[call.kernel]));
}

CudaKernels::CudaKernels(std::unique_ptr<Module> module) : module_(std::move(module)) {}
CudaKernels::~CudaKernels() = default;

absl::StatusOr<std::unique_ptr<CudaKernels>> CudaKernels::Load(const CudaDevice& device) {
  auto module = std::make_unique<Module>(device);
  ZS_RETURN_IF_ERROR(module->Load());
  return std::unique_ptr<CudaKernels>(new CudaKernels(std::move(module)));
}

absl::Status CudaKernels::Update(CudaStream& stream, const UpdateLaunch& launch) {
  return UpdateChunks(stream, {&launch, 1});
}

absl::Status CudaKernels::UpdateChunks(CudaStream& stream,
                                       absl::Span<const UpdateLaunch> launches) {
  ZS_ASSIGN_OR_RETURN(const std::vector<gpu::KernelCall<gpu::UpdateParams>> calls,
                      gpu::PlanUpdates(launches));
  for (const UpdateLaunch& launch : launches) {
    if (launch.state_format != StateFormat::kInt8) continue;
    // Of the blocks in no segment; the kernel writes the others.
    for (const DeviceArrayPair& scales : launch.scales) {
      if (scales.before == scales.after || launch.blocks == 0) continue;
      ZS_RETURN_IF_ERROR(
          stream.CopyOnDevice(scales.after, scales.before, launch.blocks * sizeof(float)));
    }
  }
  for (const auto& call : calls) ZS_RETURN_IF_ERROR(module_->Launch(stream, call));
  return absl::OkStatus();
}

absl::Status CudaKernels::Sum(CudaStream& stream, const SumLaunch& launch) {
  ZS_ASSIGN_OR_RETURN(const auto call, gpu::PlanSum(launch));
  return module_->Launch(stream, call);
}

absl::Status CudaKernels::MergePresence(CudaStream& stream, const MergePresenceLaunch& launch) {
  ZS_ASSIGN_OR_RETURN(const auto call, gpu::PlanMergePresence(launch));
  return module_->Launch(stream, call);
}

absl::Status CudaKernels::Squares(CudaStream& stream, const SquaresLaunch& launch) {
  ZS_ASSIGN_OR_RETURN(const auto call, gpu::PlanSquares(launch));
  return module_->Launch(stream, call);
}

absl::Status CudaKernels::Convert(CudaStream& stream, const ConvertLaunch& launch) {
  ZS_ASSIGN_OR_RETURN(const auto call, gpu::PlanConvert(launch));
  return module_->Launch(stream, call);
}

}  // namespace zeroshard
