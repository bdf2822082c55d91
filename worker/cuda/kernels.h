// The numeric kernels on a GPU: the optimizers' updates, sums of gradients, squared norms.
//
// The functors and the orders of the host, compiled by nvcc without fma contraction, flushing or
// fast division: the bits are those of worker/optim/kernels.h, worker/reduce_kernel.h and
// worker/grad_norm.h (docs/numerics.md, "On GPUs"). Launches are asynchronous: they return once
// the kernel is in the stream. Errors that a kernel meets show in the stream later.
//
//   ZS_ASSIGN_OR_RETURN(auto kernels, CudaKernels::Load(device));
//   ZS_RETURN_IF_ERROR(kernels->Update(stream, {.kind = OptimizerKind::kAdamW, ...}));
//
// One object a device and process. Any thread in which the device is current (MakeCurrent).
#ifndef ZEROSHARD_WORKER_CUDA_KERNELS_H_
#define ZEROSHARD_WORKER_CUDA_KERNELS_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/cuda/kernel_args.h"

namespace zeroshard {

class CudaDevice;
class CudaStream;

class CudaKernels {
 public:
  // Loads the embedded kernels into the device's context. FailedPrecondition: they hold no code for
  // this device.
  static absl::StatusOr<std::unique_ptr<CudaKernels>> Load(const CudaDevice& device);
  ~CudaKernels();
  CudaKernels(const CudaKernels&) = delete;
  CudaKernels& operator=(const CudaKernels&) = delete;

  // InvalidArgument, before anything is launched: a form that has no kernel, an address that is
  // missing or not aligned, a range that is no multiple of 16 elements, too many inputs.
  absl::Status Update(CudaStream& stream, const UpdateLaunch& launch);
  // Several chunks, which do not overlap: neighbours that differ in nothing but addresses, ranges
  // and segments (the same `args` among what is the same) share a kernel, up to eight, so that the
  // end of one is not waited for before the next begins. After an error some may be in the stream.
  absl::Status UpdateChunks(CudaStream& stream, absl::Span<const UpdateLaunch> launches);
  absl::Status Sum(CudaStream& stream, const SumLaunch& launch);
  absl::Status MergePresence(CudaStream& stream, const MergePresenceLaunch& launch);
  absl::Status Squares(CudaStream& stream, const SquaresLaunch& launch);
  absl::Status Convert(CudaStream& stream, const ConvertLaunch& launch);

 private:
  struct Module;
  explicit CudaKernels(std::unique_ptr<Module> module);

  std::unique_ptr<Module> module_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_CUDA_KERNELS_H_
