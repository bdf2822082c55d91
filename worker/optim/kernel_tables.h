// The tables of compiled loops by instruction set.
#ifndef ZEROSHARD_WORKER_OPTIM_KERNEL_TABLES_H_
#define ZEROSHARD_WORKER_OPTIM_KERNEL_TABLES_H_

#include "device/cpu/isa.h"
#include "worker/optim/kernel_table.h"

namespace zeroshard::optim_internal {

// `isa` must be supported by this processor.
const CoreTable& CoresOf(Isa isa);
const StageTable& StagesOf(Isa isa);

}  // namespace zeroshard::optim_internal

#endif  // ZEROSHARD_WORKER_OPTIM_KERNEL_TABLES_H_
