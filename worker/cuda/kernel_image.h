// The kernels as nvcc made them: a fatbin with code for the devices that the build knows, and PTX
// for newer ones. The symbol that the generated source defines.
#ifndef ZEROSHARD_WORKER_CUDA_KERNEL_IMAGE_H_
#define ZEROSHARD_WORKER_CUDA_KERNEL_IMAGE_H_

extern "C" const unsigned long long zeroshard_kernel_image[];

#endif  // ZEROSHARD_WORKER_CUDA_KERNEL_IMAGE_H_
