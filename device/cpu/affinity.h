// The processors that threads may run on, as the kernel numbers them.
#ifndef ZEROSHARD_DEVICE_CPU_AFFINITY_H_
#define ZEROSHARD_DEVICE_CPU_AFFINITY_H_

#include <vector>

#include "absl/status/status.h"

namespace zeroshard {

// The processors that this process may use, in increasing order.
std::vector<int> AllowedCpus();

// Lets the calling thread, and threads that it makes, run on `cpus` only. An error from the kernel
// when none of them is allowed.
absl::Status BindThisThread(const std::vector<int>& cpus);

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CPU_AFFINITY_H_
