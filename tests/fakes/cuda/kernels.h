#ifndef ZEROSHARD_TESTS_FAKES_CUDA_KERNELS_H_
#define ZEROSHARD_TESTS_FAKES_CUDA_KERNELS_H_

#include <string>

#include "tests/fakes/cuda/fake_kernels.h"

namespace zeroshard::fake_cuda {

// Null when no kernel of that name is linked in.
const FakeKernel* FindFakeKernel(const std::string& name);

}  // namespace zeroshard::fake_cuda

#endif  // ZEROSHARD_TESTS_FAKES_CUDA_KERNELS_H_
