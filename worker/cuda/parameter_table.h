// The table of a unit's parameters that kernels look positions up in. Pure.
#ifndef ZEROSHARD_WORKER_CUDA_PARAMETER_TABLE_H_
#define ZEROSHARD_WORKER_CUDA_PARAMETER_TABLE_H_

#include <cstdint>
#include <vector>

#include "storage/layout.h"
#include "worker/cuda/kernel_args.h"

namespace zeroshard {

// One entry a parameter of the unit, in order of position; to be copied to device memory.
std::vector<DeviceParameter> ParameterTableOf(const Layout& layout, uint32_t unit);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_CUDA_PARAMETER_TABLE_H_
