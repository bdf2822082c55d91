#include "worker/optim/split_master.h"

namespace zeroshard {

void SplitMaster(const float* values, size_t n, uint16_t* high, uint16_t* low) {
  for (size_t i = 0; i < n; ++i) {
    const kernel::Halves halves = kernel::SplitOf(values[i]);
    high[i] = halves.high;
    low[i] = halves.low;
  }
}

void JoinMaster(const uint16_t* high, const uint16_t* low, size_t n, float* values) {
  for (size_t i = 0; i < n; ++i) values[i] = kernel::JoinedMaster(high[i], low[i]);
}

void CanonicalMaster(float* values, size_t n) {
  for (size_t i = 0; i < n; ++i) values[i] = kernel::CanonicalMaster(values[i]);
}

}  // namespace zeroshard
