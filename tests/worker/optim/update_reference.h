// A scalar reference of the optimizer pass, written from docs/numerics.md and sharing nothing with
// the kernels but the random bits: one element after the other, codes found by trying all 256.
#ifndef ZEROSHARD_TESTS_WORKER_OPTIM_UPDATE_REFERENCE_H_
#define ZEROSHARD_TESTS_WORKER_OPTIM_UPDATE_REFERENCE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "tests/worker/random_values.h"
#include "worker/optim/kernels.h"

namespace zeroshard {

// The published code book (signed or not), sorted; fp64 rounded once.
std::array<float, 256> PublishedBook(StateMap map);

// The code of `value` in a block with this scale.
uint8_t ReferenceCode(StateMap map, float value, float scale);

// All arrays that any form of a pass may use, over one unit of some parameters.
struct UpdateTensors {
  UpdateArrays form;  // kinds and types; the pointers are set by Arrays()
  // Elements [offset[i], offset[i + 1]) are parameter i.
  std::vector<uint64_t> offsets;
  std::vector<size_t> block_of;  // each element's slot in absmax
  std::vector<std::byte> grad, state[kMaxStateSlots], out;
  std::vector<float> param, absmax[kMaxStateSlots];
  std::vector<uint16_t> high, low;

  size_t elements() const { return offsets.back(); }
  UpdateArrays Arrays();
  // The segments of the parameters for which updated[i] is not negative: the index of its args.
  std::vector<UpdateSegment> Segments(const std::vector<int>& updated) const;
  // Whether all bytes are the same.
  bool operator==(const UpdateTensors& other) const;
};

// Random contents; `form` says kinds and types. 8-bit states are encoded from random values.
UpdateTensors RandomTensors(std::mt19937_64& random, const UpdateArrays& form, OptimizerKind kind,
                            const std::vector<uint64_t>& offsets, Values values);

// Arguments of `count` random groups.
std::vector<UpdateArgs> RandomArgs(std::mt19937_64& random, OptimizerKind kind, size_t count);

// What the pass does to the elements of its segments.
void ReferenceUpdate(const UpdatePass& pass, UpdateTensors& tensors);

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_WORKER_OPTIM_UPDATE_REFERENCE_H_
