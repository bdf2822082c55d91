// Checks the kernels on the first CUDA device, for tests/gpu/run: PASS or FAIL, a line a case, and
// with --bandwidth the speed of a fused AdamW step against that of a copy on the device.
//
//   kernel_check [--bandwidth] [--chunks N]
//
// Exit status: 0, or 1 after a FAIL, 2 without a device.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/status.h"
#include "device/cuda/device.h"
#include "device/cuda/memory.h"
#include "device/cuda/stream.h"
#include "tests/worker/cuda/cuda_kernel_device.h"
#include "tests/worker/cuda/kernel_cases.h"
#include "worker/cuda/kernels.h"

namespace zeroshard {
namespace {

constexpr double kWantedRatio = 0.88;
constexpr uint64_t kChunkElements = uint64_t{1} << 21;
constexpr int kRounds = 20;
constexpr int kWarmUp = 3;
constexpr absl::Duration kDeadline = absl::Seconds(120);

bool Report(const std::string& name, const absl::Status& status) {
  if (status.ok()) {
    std::printf("PASS kernels: %s\n", name.c_str());
  } else {
    std::printf("FAIL kernels: %s: %s\n", name.c_str(), status.ToString().c_str());
  }
  return status.ok();
}

// A step of AdamW as the worker has it: gradients and states in fp32, from images to other images,
// a bf16 parameter beside. And a copy, on the device, of the same memory.
class Bandwidth {
 public:
  static constexpr uint64_t kGradBytes = 4, kImageBytes = 12, kParameterBytes = 2;
  static constexpr uint64_t kElementBytes = kGradBytes + 2 * kImageBytes + kParameterBytes;

  Bandwidth(const CudaDevice& device, uint64_t elements) : device_(device), elements_(elements) {}

  absl::Status Run() {
    ZS_ASSIGN_OR_RETURN(CudaStream stream, CudaStream::Create(device_, StreamPriority::kNormal));
    stream_ = std::make_unique<CudaStream>(std::move(stream));
    ZS_ASSIGN_OR_RETURN(kernels_, CudaKernels::Load(device_));
    ZS_ASSIGN_OR_RETURN(memory_, DeviceMemory::Create(device_, elements_ * kElementBytes));
    ZS_RETURN_IF_ERROR(stream_->Fill(memory_.address(), 0, memory_.bytes()));
    const uint64_t half = elements_ * kElementBytes / 2;
    ZS_ASSIGN_OR_RETURN(const double copy, BestSeconds([&] {
                          return stream_->CopyOnDevice(memory_.address() + half, memory_.address(),
                                                       half);
                        }));
    ZS_ASSIGN_OR_RETURN(const double whole, BestSeconds([&] { return Update(elements_); }));
    ZS_ASSIGN_OR_RETURN(const double chunks, BestSeconds([&] { return Update(kChunkElements); }));
    // Both move every byte of the memory once: read or written.
    const double bytes = static_cast<double>(elements_ * kElementBytes) / 1e9;
    std::printf(
        "copy on the device %.1f GB/s; fused AdamW %.1f GB/s, in chunks of %llu elements "
        "%.1f GB/s\n",
        bytes / copy, bytes / whole, static_cast<unsigned long long>(kChunkElements),
        bytes / chunks);
    const double ratio = copy / whole;
    std::printf("%s bandwidth: fused AdamW against a copy: %.3f, at least %.2f; in chunks %.3f\n",
                ratio >= kWantedRatio ? "PASS" : "FAIL", ratio, kWantedRatio, copy / chunks);
    if (ratio >= kWantedRatio) return absl::OkStatus();
    return absl::FailedPreconditionError("too slow");
  }

 private:
  // Of chunks of `chunk` elements.
  absl::Status Update(uint64_t chunk) {
    const std::vector<UpdateArgs> args = {MakeUpdateArgs({.weight_decay = 0.01}, 10)};
    const std::vector<UpdateSegment> segments = {{.begin = 0, .end = chunk, .args = 0}};
    const uint64_t image = chunk * kImageBytes;
    const uint64_t array = chunk * sizeof(float);
    std::vector<UpdateLaunch> launches;
    for (uint64_t at = 0; at + chunk <= elements_; at += chunk) {
      const DeviceAddress base = memory_.address() + at * kElementBytes;
      const DeviceAddress before = base + array;
      UpdateLaunch launch;
      launch.kind = OptimizerKind::kAdamW;
      launch.elements = chunk;
      launch.grad = base;
      launch.master = {before, before + image};
      launch.state[0] = {before + array, before + image + array};
      launch.state[1] = {before + 2 * array, before + image + 2 * array};
      launch.parameter = before + 2 * image;
      launch.segments = segments;
      launch.args = args;
      launches.push_back(launch);
    }
    return kernels_->UpdateChunks(*stream_, launches);
  }

  // The shortest of kRounds runs.
  template <class Work>
  absl::StatusOr<double> BestSeconds(const Work& work) {
    ZS_ASSIGN_OR_RETURN(CudaEvent start, CudaEvent::Create(device_, EventKind::kTimed));
    ZS_ASSIGN_OR_RETURN(CudaEvent end, CudaEvent::Create(device_, EventKind::kTimed));
    absl::Duration best = absl::InfiniteDuration();
    for (int round = 0; round < kWarmUp + kRounds; ++round) {
      ZS_RETURN_IF_ERROR(stream_->Record(start));
      ZS_RETURN_IF_ERROR(work());
      ZS_RETURN_IF_ERROR(stream_->Record(end));
      ZS_RETURN_IF_ERROR(stream_->Synchronize(kDeadline));
      ZS_ASSIGN_OR_RETURN(const absl::Duration took, end.Since(start));
      if (round >= kWarmUp) best = std::min(best, took);
    }
    return absl::ToDoubleSeconds(best);
  }

  const CudaDevice& device_;
  const uint64_t elements_;
  std::unique_ptr<CudaStream> stream_;
  std::unique_ptr<CudaKernels> kernels_;
  DeviceMemory memory_;
};

absl::StatusOr<bool> CheckAll(const CudaDevice& device) {
  ZS_ASSIGN_OR_RETURN(const std::unique_ptr<KernelDevice> kernels, MakeCudaKernelDevice(device));
  bool passed = true;
  for (const KernelCase& kernel_case : AllKernelCases()) {
    passed &= Report(kernel_case.name, RunKernelCase(kernel_case, *kernels));
  }
  return passed;
}

int Main(int argc, char** argv) {
  bool bandwidth = false;
  uint64_t chunks = 32;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--bandwidth") == 0) bandwidth = true;
    if (std::strcmp(argv[i], "--chunks") == 0 && i + 1 < argc) {
      chunks = std::max(1ul, std::strtoul(argv[i + 1], nullptr, 10));
    }
  }
  const auto device = CudaDevice::Open(0);
  if (!device.ok()) {
    std::printf("%s\n", std::string(device.status().message()).c_str());
    return 2;
  }
  if (bandwidth) {
    const absl::Status status = Bandwidth(**device, chunks * kChunkElements).Run();
    if (!status.ok() && !absl::IsFailedPrecondition(status)) Report("bandwidth", status);
    return status.ok() ? 0 : 1;
  }
  const absl::StatusOr<bool> passed = CheckAll(**device);
  if (!passed.ok()) Report("start", passed.status());
  return passed.ok() && *passed ? 0 : 1;
}

}  // namespace
}  // namespace zeroshard

int main(int argc, char** argv) { return zeroshard::Main(argc, argv); }
