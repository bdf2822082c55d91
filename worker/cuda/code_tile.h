// The update of 8-bit states: 64 threads a grain, which find the scales of its blocks together.
//
// A block of threads takes four grains of the unit at a time, in three phases: values are updated
// and kept in fp32 in shared memory; the largest magnitude of each row of 16 elements is found, a
// row being of one parameter; each thread takes the largest of its block's rows, which is the
// scale, and encodes.
//
// Included by kernel files: no standard library.
#ifndef ZEROSHARD_WORKER_CUDA_CODE_TILE_H_
#define ZEROSHARD_WORKER_CUDA_CODE_TILE_H_

#include <cstdint>

#include "worker/cuda/kernel_launch.h"
#include "worker/cuda/kernel_params.h"
#include "worker/cuda/update_kernel.h"
#include "worker/optim/code_book_values.h"
#include "worker/optim/state_code_math.h"

namespace zeroshard::gpu {

#if defined(__CUDACC__)
__device__ const SignedBook zs_signed_book = code_book_internal::MakeSigned();
__device__ const UnsignedBook zs_unsigned_book = code_book_internal::MakeUnsigned();
#else
inline constexpr SignedBook zs_signed_book = code_book_internal::MakeSigned();
inline constexpr UnsignedBook zs_unsigned_book = code_book_internal::MakeUnsigned();
#endif

inline constexpr uint32_t kTileElements = kBlockThreads * kVector;  // four grains
inline constexpr uint32_t kTileRow = 16;
inline constexpr uint32_t kRowThreads = kTileRow / kVector;

struct CodeTile {
  Floats value[kMaxStateSlots][kBlockThreads];
  int32_t largest[kMaxStateSlots][kBlockThreads];  // finite magnitude, by vector
  int32_t of_row[kMaxStateSlots][kBlockThreads / kRowThreads];
};

template <class Functor, int kSlot>
ZS_KERNEL_FN const auto& BookOf() {
  if constexpr (Functor::kStateMaps[kSlot] == StateMap::kSigned) {
    return zs_signed_book;
  } else {
    return zs_unsigned_book;
  }
}

// A thread's vector of a tile. Tiles are counted from the grain that holds the range's first
// element.
struct TileVector {
  bool inside;       // the range
  uint32_t element;  // counted from the range's first
  uint64_t of_unit;  // the same, of the unit
  VectorRun run;
};

ZS_KERNEL_FN TileVector VectorOf(const UpdateParams& params, const UpdateChunk& chunk,
                                 uint32_t tile, uint32_t thread) {
  const uint64_t skipped = chunk.first % kStateGrain;
  const uint64_t place = uint64_t{tile} * kTileElements + thread * kVector;
  TileVector vector = {};
  vector.inside = place >= skipped && place - skipped < chunk.elements;
  if (!vector.inside) return vector;
  vector.element = static_cast<uint32_t>(place - skipped);
  vector.of_unit = chunk.first + vector.element;
  vector.run = FindRun(params, chunk, vector.element);
  return vector;
}

ZS_KERNEL_FN uint32_t ScaleIndex(const UpdateParams& params, const TileVector& vector) {
  return static_cast<uint32_t>(vector.of_unit / kStateGrain) +
         params.run[vector.run.index].block_shift;
}

template <class Functor, int kSlot>
ZS_KERNEL_FN void DecodeVector(const UpdateParams& params, const UpdateChunk& chunk,
                               const TileVector& vector, Floats& state) {
  const uint32_t codes = *At<const uint32_t>(chunk.state_before[kSlot], vector.element / kVector);
  const float scale = *At<const float>(chunk.scales_before[kSlot], ScaleIndex(params, vector));
  ZS_UNROLL for (uint32_t i = 0; i < kVector; ++i) {
    state.at[i] = kernel::DecodedState(BookOf<Functor, kSlot>(),
                                       static_cast<uint8_t>(codes >> (8 * i)), scale);
  }
}

template <int kSlot>
ZS_KERNEL_FN void KeepVector(CodeTile& tile, uint32_t thread, VectorRun run, const Floats& state) {
  int32_t largest = 0;
  ZS_UNROLL for (uint32_t i = 0; i < kVector; ++i) {
    const int32_t magnitude = i < run.end ? kernel::FiniteMagnitude(state.at[i]) : 0;
    largest = magnitude > largest ? magnitude : largest;
  }
  tile.value[kSlot][thread] = state;
  tile.largest[kSlot][thread] = largest;
}

// Phase 1. Codes of vectors in no run are copied here.
template <class Functor>
ZS_KERNEL_FN void UpdateTile(const UpdateParams& params, const UpdateChunk& chunk,
                             uint32_t tile_index, uint32_t thread, CodeTile& tile) {
  ZS_UNROLL for (int slot = 0; slot < Functor::kStates; ++slot) tile.largest[slot][thread] = 0;
  const TileVector vector = VectorOf(params, chunk, tile_index, thread);
  if (!vector.inside) return;
  Floats master = Load(MasterType(params), chunk.master_before, vector.element);
  if (vector.run.end == 0) {
    ZS_UNROLL for (int slot = 0; slot < Functor::kStates; ++slot) {
      *At<uint32_t>(chunk.state_after[slot], vector.element / kVector) =
          *At<const uint32_t>(chunk.state_before[slot], vector.element / kVector);
    }
  } else {
    const Floats grad = Load(params.grad_type, chunk.grad, vector.element);
    Floats state[kMaxStateSlots] = {};
    DecodeVector<Functor, 0>(params, chunk, vector, state[0]);
    if constexpr (Functor::kStates > 1) DecodeVector<Functor, 1>(params, chunk, vector, state[1]);
    UpdateVector<Functor>(params, vector.run, grad, master, state);
    KeepVector<0>(tile, thread, vector.run, state[0]);
    if constexpr (Functor::kStates > 1) KeepVector<1>(tile, thread, vector.run, state[1]);
  }
  StoreAnyMaster(params, chunk, vector.element, vector.run, master);
}

// Phase 2.
template <class Functor>
ZS_KERNEL_FN void FindLargestOfRow(uint32_t thread, CodeTile& tile) {
  if (thread % kRowThreads != 0) return;
  ZS_UNROLL for (int slot = 0; slot < Functor::kStates; ++slot) {
    int32_t largest = 0;
    ZS_UNROLL for (uint32_t i = 0; i < kRowThreads; ++i) {
      const int32_t other = tile.largest[slot][thread + i];
      largest = other > largest ? other : largest;
    }
    tile.of_row[slot][thread / kRowThreads] = largest;
  }
}

template <class Functor, int kSlot>
ZS_KERNEL_FN void EncodeVector(const UpdateParams& params, const UpdateChunk& chunk,
                               const TileVector& vector, uint32_t first_row, uint32_t end_row,
                               bool writes_scale, const CodeTile& tile, uint32_t thread) {
  int32_t largest = 0;
  for (uint32_t row = first_row; row < end_row; ++row) {
    const int32_t other = tile.of_row[kSlot][row];
    largest = other > largest ? other : largest;
  }
  const float absmax = kernel::FloatOf(static_cast<uint32_t>(largest));
  const float divisor = kernel::StateDivisor(absmax);
  const uint32_t before = *At<const uint32_t>(chunk.state_before[kSlot], vector.element / kVector);
  uint32_t codes = 0;
  ZS_UNROLL for (uint32_t i = 0; i < kVector; ++i) {
    const uint32_t code =
        kernel::EncodedState(BookOf<Functor, kSlot>(), tile.value[kSlot][thread].at[i], divisor);
    codes |= (i < vector.run.end ? code : before >> (8 * i) & 0xffu) << (8 * i);
  }
  *At<uint32_t>(chunk.state_after[kSlot], vector.element / kVector) = codes;
  if (writes_scale) *At<float>(chunk.scales_after[kSlot], ScaleIndex(params, vector)) = absmax;
}

// Phase 3.
template <class Functor>
ZS_KERNEL_FN void EncodeTile(const UpdateParams& params, const UpdateChunk& chunk,
                             uint32_t tile_index, uint32_t thread, const CodeTile& tile) {
  const TileVector vector = VectorOf(params, chunk, tile_index, thread);
  if (!vector.inside || vector.run.end == 0) return;
  // The vector's block: where its run and its grain overlap, in elements of the tile.
  const uint32_t at = thread * kVector;
  const uint32_t grain = at / kStateGrain * kStateGrain;
  const uint32_t before = vector.element - params.run[vector.run.index].begin;
  const uint32_t begin = at - grain > before ? at - before : grain;
  const uint32_t left = vector.run.end;
  const uint32_t end = grain + kStateGrain - at > left ? at + left : grain + kStateGrain;
  const uint32_t first_row = begin / kTileRow;
  const uint32_t end_row = (end + kTileRow - 1) / kTileRow;
  EncodeVector<Functor, 0>(params, chunk, vector, first_row, end_row, at == begin, tile, thread);
  if constexpr (Functor::kStates > 1) {
    EncodeVector<Functor, 1>(params, chunk, vector, first_row, end_row, at == begin, tile, thread);
  }
}

}  // namespace zeroshard::gpu

#endif  // ZEROSHARD_WORKER_CUDA_CODE_TILE_H_
