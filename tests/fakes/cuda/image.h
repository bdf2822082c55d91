#ifndef ZEROSHARD_TESTS_FAKES_CUDA_IMAGE_H_
#define ZEROSHARD_TESTS_FAKES_CUDA_IMAGE_H_

#include <cuda.h>

namespace zeroshard::fake_cuda {

// Whether a device of compute capability major.minor can load `image`: a fat binary (as nvcc
// -fatbin writes it, or in the wrapper that nvcc embeds), a cubin or PTX. CUDA_ERROR_INVALID_IMAGE
// when it is none of these, CUDA_ERROR_NO_BINARY_FOR_GPU when a fat binary has neither code for the
// device nor PTX of its capability or a lower one.
CUresult CheckImage(const void* image, int major, int minor);

}  // namespace zeroshard::fake_cuda

#endif  // ZEROSHARD_TESTS_FAKES_CUDA_IMAGE_H_
