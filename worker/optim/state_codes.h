// Blocks of 8-bit optimizer states as the kernels hold them, for code outside the update: tests,
// conversions of checkpoints.
//
// Encoding: the scale is the largest finite magnitude of the block, and each value gets the nearest
// code of its share of the scale (worker/optim/code_book.h). An infinity becomes the largest code
// of its sign, a NaN 0; neither changes the scale nor another element. The unsigned book stores
// nothing negative (0 instead) and gives no value above 0 the code 0. Decoding: code value times
// scale in fp32; +0 where the scale is 0, whatever the codes. Pure, the same on every processor.
#ifndef ZEROSHARD_WORKER_OPTIM_STATE_CODES_H_
#define ZEROSHARD_WORKER_OPTIM_STATE_CODES_H_

#include <cstddef>
#include <cstdint>

#include "worker/optim/functor.h"

namespace zeroshard {

// Encodes one block and returns its scale. `map` is not kNone.
float EncodeStates(StateMap map, const float* values, size_t n, uint8_t* codes);

// Decodes one block.
void DecodeStates(StateMap map, const uint8_t* codes, size_t n, float scale, float* values);

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_OPTIM_STATE_CODES_H_
