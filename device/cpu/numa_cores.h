// The processors of one NUMA node: what device/cpu/topology.h finds and a core budget shares out.
#ifndef ZEROSHARD_DEVICE_CPU_NUMA_CORES_H_
#define ZEROSHARD_DEVICE_CPU_NUMA_CORES_H_

#include <vector>

namespace zeroshard {

// A NUMA node with the processors of it that this process may use, as the kernel numbers them. What
// the kernel schedules on is meant: two for a core of two hardware threads.
struct NumaCores {
  int os_index = 0;
  std::vector<int> cpus;  // increasing
};

}  // namespace zeroshard

#endif  // ZEROSHARD_DEVICE_CPU_NUMA_CORES_H_
