// How master parameters and optimizer states are held: the choices behind the ledger's term K.
#ifndef ZEROSHARD_STORAGE_STATE_FORMAT_H_
#define ZEROSHARD_STORAGE_STATE_FORMAT_H_

#include <cstdint>

namespace zeroshard {

// Of the optimizer's state arrays. A fresh state is all zero bytes and means zero in every format.
enum class StateFormat : uint8_t {
  kFloat32 = 0,
  kBfloat16 = 1,  // rounded to nearest even at every update
  kInt8 = 2,      // one code byte an element and one fp32 scale a block (docs/numerics.md)
};

// Of the parameter that the optimizer updates.
enum class MasterForm : uint8_t {
  kFloat32 = 0,  // an fp32 copy beside a 16-bit parameter; an fp32 parameter is its own master
  kSplit = 1,    // bf16 only: the parameter is the high half, 16 low bits lie beside it
  // bf16 only: the parameter itself, rounded stochastically. In tiered jobs a copy of it, from
  // which an update can be done again.
  kNone = 2,
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_STATE_FORMAT_H_
