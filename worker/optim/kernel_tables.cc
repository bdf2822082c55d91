#include "worker/optim/kernel_tables.h"

namespace zeroshard::optim_internal {

const CoreTable& CoresOf(Isa isa) {
  switch (isa) {
    case Isa::kX86V4:
      return kCoreTableV4;
    case Isa::kX86V3:
      return kCoreTableV3;
    case Isa::kX86V2:
      break;
  }
  return kCoreTableV2;
}

const StageTable& StagesOf(Isa isa) {
  switch (isa) {
    case Isa::kX86V4:
      return kStageTableV4;
    case Isa::kX86V3:
      return kStageTableV3;
    case Isa::kX86V2:
      break;
  }
  return kStageTableV2;
}

}  // namespace zeroshard::optim_internal
