#include "worker/protected_pass.h"

#include <optional>

#include "absl/status/status.h"
#include "base/check.h"
#include "base/strings.h"
#include "device/cpu/isa.h"

namespace zeroshard {
namespace protected_internal {

CopyFn BestUndoCopy() {
  static const CopyFn copy = [] {
    switch (BestIsa()) {
      case Isa::kX86V4:
        return kUndoCopyV4;
      case Isa::kX86V3:
        return kUndoCopyV3;
      case Isa::kX86V2:
        break;
    }
    return kUndoCopyV2;
  }();
  return copy;
}

uint64_t CheckedStart(const ProtectedPass& pass, uint32_t lane, uint32_t chunk_index,
                      const UndoChunk& chunk) {
  ZS_CHECK(lane < pass.area.lanes() && chunk_index < pass.area.chunks(), "no such lane or chunk");
  ZS_CHECK(pass.key.tag != 0, "tag 0 means no pass");
  const absl::Status status = ValidateUndoChunk(chunk);
  ZS_CHECK(status.ok(), Std(status.message()));
  const std::optional<UndoResume> in_flight = pass.area.InFlight(lane);
  if (!in_flight.has_value()) return 0;
  ZS_CHECK(in_flight->key == pass.key && in_flight->chunk == chunk_index,
           "the lane is in the middle of another chunk: finish or abandon that first");
  return in_flight->next_element;
}

}  // namespace protected_internal

}  // namespace zeroshard
