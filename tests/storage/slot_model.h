// A small world in which the protocol of the NVMe tier is tried exhaustively: a disk that writes
// sectors late and in any order, a board, a region, and workers that really use SlotTable and chunk
// images.
#ifndef ZEROSHARD_TESTS_STORAGE_SLOT_MODEL_H_
#define ZEROSHARD_TESTS_STORAGE_SLOT_MODEL_H_

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "storage/chunk_image.h"
#include "storage/slot_table.h"

namespace zeroshard {

inline constexpr uint32_t kModelChunks = 2;
inline constexpr uint64_t kModelImageBytes = 8192;
// What of an image lands at once: its header, a sector that differs in every image, and one that
// is the same in every other step.
inline constexpr uint32_t kModelUnits = 3;
inline constexpr uint32_t kAllModelUnits = (1u << kModelUnits) - 1;

struct ModelWrite {
  uint32_t slot = 0;
  std::vector<std::byte> image;
};

// Slots, and writes that the disk has accepted and not done.
struct ModelDisk {
  explicit ModelDisk(uint32_t slots) : bytes(slots * kModelImageBytes) {}

  std::span<std::byte> slot(uint32_t slot) {
    return std::span(bytes).subspan(slot * kModelImageBytes, kModelImageBytes);
  }
  // Writes those units of a write that are in the mask.
  void Land(const ModelWrite& write, uint32_t units);

  std::vector<std::byte> bytes;
  std::vector<ModelWrite> in_flight;
};

// What the states of a step are: `salt` differs when an attempt at the step was dropped.
struct ModelState {
  uint64_t step = 0;
  uint64_t salt = 0;
};

struct ModelWorld {
  explicit ModelWorld(uint32_t spares);

  uint32_t slots() const { return 2 * kModelChunks + spares; }
  std::span<std::byte> region() { return std::as_writable_bytes(std::span(memory)); }
  SlotTableShape shape() const;

  uint32_t spares;
  std::vector<uint64_t> memory_storage;
  std::span<uint64_t> memory;  // aligned to 64 bytes, within memory_storage
  ModelDisk disk;
  uint64_t board_attempt = 0;  // committed
  ModelState committed;

  ModelWorld(const ModelWorld& other);
  ModelWorld& operator=(const ModelWorld& other) = delete;
};

ImageIdentity ModelIdentity(uint32_t chunk, const SlotImage& image);
const ChunkShape& ModelShape();
std::vector<std::byte> ModelImage(uint32_t chunk, SlotImage& image, uint64_t salt);

// Empty when the slot holds what the entry says and it is the chunk's part of the state; else what
// is wrong.
std::string CheckModelImage(ModelDisk& disk, uint32_t chunk, const SlotImage& image,
                            const ModelState& state);

// Called before each action on the disk and the board.
using ModelTick = std::function<void()>;

// One attempt of a worker at the step after the committed one, from Begin to Commit, with all
// chunks in flight at once. Returns what went wrong, or nothing.
std::string RunModelAttempt(ModelWorld& world, SlotTable& table, uint64_t attempt, uint64_t salt,
                            const ModelTick& tick);

// A world in which steps 0 and 1 are committed by generation 1; `table` goes on as that worker.
std::string FormatModel(ModelWorld& world);

}  // namespace zeroshard

#endif  // ZEROSHARD_TESTS_STORAGE_SLOT_MODEL_H_
