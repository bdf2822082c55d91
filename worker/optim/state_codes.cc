#include "worker/optim/state_codes.h"

#include "worker/optim/kernel_tables.h"

namespace zeroshard {
namespace {

const optim_internal::StageTable& Stages() {
  static const optim_internal::StageTable& stages = optim_internal::StagesOf(BestIsa());
  return stages;
}

}  // namespace

float EncodeStates(StateMap map, const float* values, size_t n, uint8_t* codes) {
  const bool has_sign = map == StateMap::kSigned;
  return (has_sign ? Stages().encode_signed : Stages().encode_unsigned)(values, n, codes);
}

void DecodeStates(StateMap map, const uint8_t* codes, size_t n, float scale, float* values) {
  const bool has_sign = map == StateMap::kSigned;
  (has_sign ? Stages().decode_signed : Stages().decode_unsigned)(codes, n, scale, values);
}

}  // namespace zeroshard
