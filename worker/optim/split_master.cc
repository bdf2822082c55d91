#include "worker/optim/split_master.h"

namespace zeroshard {

void SplitMaster(const float* values, size_t n, uint16_t* high, uint16_t* low) {
  for (size_t i = 0; i < n; ++i) {
    const float canonical = kernel::CanonicalMaster(values[i]);
    high[i] = kernel::HighHalf(canonical);
    low[i] = kernel::LowHalf(canonical);
  }
}

void JoinMaster(const uint16_t* high, const uint16_t* low, size_t n, float* values) {
  for (size_t i = 0; i < n; ++i) values[i] = kernel::JoinedMaster(high[i], low[i]);
}

void CanonicalMaster(float* values, size_t n) {
  for (size_t i = 0; i < n; ++i) values[i] = kernel::CanonicalMaster(values[i]);
}

}  // namespace zeroshard
