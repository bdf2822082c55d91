// Every kernel against the loops of the host, bit for bit. Run by tests on the fake device and by
// kernel_check on a real one.
#ifndef ZEROSHARD_TESTS_WORKER_CUDA_KERNEL_CASES_H_
#define ZEROSHARD_TESTS_WORKER_CUDA_KERNEL_CASES_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tests/worker/cuda/kernel_device.h"

namespace zeroshard {

struct KernelCase {
  std::string name;
  // The error names the first difference.
  std::function<absl::Status(KernelDevice&)> run;
};

// One case an optimizer, all its forms in each.
std::vector<KernelCase> UpdateCases();

// Sums, presence, squares and conversions.
std::vector<KernelCase> SumCases();

// Of both, and of everything that a launch refuses.
std::vector<KernelCase> AllKernelCases();

// Runs it and clears the device.
absl::Status RunKernelCase(const KernelCase& kernel_case, KernelDevice& device);

// OK when the bytes are the same; else DataLoss with the first difference.
absl::Status SameBytes(const std::string& what, const void* found, const void* expected,
                       size_t bytes);

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_WORKER_CUDA_KERNEL_CASES_H_
