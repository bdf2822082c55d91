// Kernels that the fake's own tests launch.

#include <cstdint>

#include "tests/fakes/cuda/fake_kernels.h"

namespace zeroshard::fake_cuda {
namespace {

template <typename T>
T Get(void** params, int i) {
  return *static_cast<T*>(params[i]);
}

// fake_cuda_add(float* values, uint32_t count, float addend): values[i] += addend.
const FakeKernelRegistration add("fake_cuda_add",
                                 {
                                     {sizeof(uint64_t), sizeof(uint32_t), sizeof(float)},
                                     [](void** params, Dim3 grid, Dim3 block, unsigned) {
                                       auto* const values = Get<float*>(params, 0);
                                       const uint32_t count = Get<uint32_t>(params, 1);
                                       for (uint32_t i = 0; i < grid.x * block.x; ++i) {
                                         if (i < count) values[i] += Get<float>(params, 2);
                                       }
                                     },
                                     [](void** params) -> std::vector<KernelRange> {
                                       return {{Get<uint64_t>(params, 0),
                                                sizeof(float) * Get<uint32_t>(params, 1),
                                                RangeAccess::kWrite, "values"}};
                                     },
                                 });

// fake_cuda_undeclared(float* value): writes where it did not say that it would.
const FakeKernelRegistration undeclared("fake_cuda_undeclared",
                                        {
                                            {sizeof(uint64_t)},
                                            [](void** params, Dim3, Dim3, unsigned) {
                                              *Get<volatile float*>(params, 0) = 1;
                                            },
                                            nullptr,
                                        });

}  // namespace
}  // namespace zeroshard::fake_cuda
