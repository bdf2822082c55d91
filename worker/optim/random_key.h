// The random numbers of stochastic rounding: pure functions of the job's seed, the step and the
// element's place, so that every number of workers, instruction set and cut of the range draws the
// same ones. No state, no order.
// Included by kernel files: no standard library.
#ifndef ZEROSHARD_WORKER_OPTIM_RANDOM_KEY_H_
#define ZEROSHARD_WORKER_OPTIM_RANDOM_KEY_H_

#include <cstdint>

#include "worker/kernel_math.h"

namespace zeroshard {

// A bijection of 64 bits without visible structure (the output function of splitmix64).
ZS_KERNEL_FN constexpr uint64_t MixBits(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The key of a unit in a step; `step` is the number of committed steps, not the attempt.
ZS_KERNEL_FN constexpr uint64_t RandomKey(uint64_t seed, uint64_t step, uint32_t unit) {
  return MixBits(MixBits(MixBits(seed + 0x9e3779b97f4a7c15u) + step) + unit);
}

// The key of a grain (256 elements from the unit's start).
ZS_KERNEL_FN constexpr uint64_t GrainKey(uint64_t random_key, uint64_t grain) {
  return MixBits(random_key + grain * 0x9e3779b97f4a7c15u);
}

// 16 random bits of the element at `lane` of the grain.
ZS_KERNEL_FN constexpr uint32_t RandomBits(uint64_t grain_key, uint32_t lane) {
  uint32_t x = static_cast<uint32_t>(grain_key) + lane * 0x9e3779b9u;
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x ^= static_cast<uint32_t>(grain_key >> 32);
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x >> 16;
}

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_OPTIM_RANDOM_KEY_H_
