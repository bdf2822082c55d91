// What travels with each piece of a gradient from one rank to another, and how a rank tells its own
// device what a gradient holds. Read by kernels: presence and weight by address.
#ifndef ZEROSHARD_CLIENT_DATAPLANE_EXCHANGE_HEADER_H_
#define ZEROSHARD_CLIENT_DATAPLANE_EXCHANGE_HEADER_H_

#include <cstddef>
#include <cstdint>

#include "storage/board.h"

namespace zeroshard {

struct alignas(64) ExchangeHeader {
  Tag tag = 0;  // attempt and micro-step; of sums over micro-steps the last one
  uint32_t unit = 0;
  float weight = 1.0F;
  Presence presence = {};  // parameters with a gradient
  Presence before = {};    // those that the target holds already (sums of one rank only)
};
static_assert(sizeof(ExchangeHeader) == 320);
static_assert(offsetof(ExchangeHeader, weight) == 12 && offsetof(ExchangeHeader, presence) == 16 &&
              offsetof(ExchangeHeader, before) == 144);

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_DATAPLANE_EXCHANGE_HEADER_H_
