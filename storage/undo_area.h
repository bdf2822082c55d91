// The undo records of a worker: what makes in-place passes over region memory survive kill -9.
//
// Layout of the area, plain bytes in a shared region held by the server (all offsets from its
// start, 64-byte aligned):
//   UndoAreaHeader | lanes x LaneArea | chunks x uint64 done tag
//
// Protocol. A pass (an optimizer step, or `acc += sum` of one micro-step) has a tag, unique for the
// life of the area and not 0. Each lane, one thread at a time, takes chunks, and each chunk in
// groups of elements:
//   1. the bytes the group is about to change go to the lane's record that is not live (two records
//      in turn, each describing itself);
//   2. the lane's position, one 64-bit atomic, is set to that record's sequence number, which makes
//      it the live one;
//   3. the group is updated in place;
//   after the last group of a chunk: done[chunk] = tag, then position = 0 (idle).
// Compiler fences stand around the stores of the position and of done. No hardware fence is needed:
// exceptions on x86 and Arm are precise, so a killed process has done all stores before some point
// in program order and none after it, and the successor maps the same memory.
// So when a process dies, each lane has at most one torn group, and the live record holds its old
// bytes: a record is overwritten only while the other one is live.
//
// Conditions, for which the caller answers:
//   - what a group's update reads beside the arrays of the record (gradients, sources, arguments)
//     does not change until the whole pass is committed; what it writes beside them (the rounded
//     parameter) is written in full by a redo;
//   - two lanes never work on the same chunk, and a new pass over a chunk starts only when the last
//     one over it is committed (noted elsewhere) or abandoned;
//   - all threads run with the same MXCSR (ThreadPool sees to it);
//   - a process that adopts an area calls Recover before anything else.
#ifndef ZEROSHARD_STORAGE_UNDO_AREA_H_
#define ZEROSHARD_STORAGE_UNDO_AREA_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace zeroshard {

inline constexpr uint32_t kMaxUndoArrays = 8;
inline constexpr uint32_t kUndoPayloadBytes = 2048;
inline constexpr uint32_t kDefaultUndoGroup = 128;

// One array that a pass changes in place. Usually it has a value for each element, and `data`
// points to that of the chunk's first. With `slots` it has some for each group: group k (of the
// chunk's elements from k * group_elements on) has those from slots[k] up to slots[k + 1], and
// `data` points to value 0.
struct UndoArray {
  std::byte* data = nullptr;
  uint32_t element_bytes = 0;
  const uint64_t* slots = nullptr;
};

// What a pass changes in one chunk. A group is `group_elements` consecutive elements (the last may
// be shorter); the arrays' bytes of one group must fit in kUndoPayloadBytes.
struct UndoChunk {
  std::array<UndoArray, kMaxUndoArrays> arrays = {};
  uint32_t array_count = 0;
  uint64_t elements = 0;
  uint32_t group_elements = kDefaultUndoGroup;
  uint32_t max_slots = 0;  // of one group, where an array has slots
};

// Where the bytes of array `array` lie for the group of `elements` elements from `begin` on.
inline std::span<std::byte> UndoBytes(const UndoChunk& chunk, uint32_t array, uint64_t begin,
                                      uint32_t elements) {
  const UndoArray& a = chunk.arrays[array];
  uint64_t first = begin;
  uint64_t values = elements;
  if (a.slots != nullptr) {
    const uint64_t* slots = a.slots + begin / chunk.group_elements;
    first = slots[0];
    values = slots[1] - slots[0];
  }
  return {a.data + first * a.element_bytes, values * a.element_bytes};
}

// Whether the groups of a chunk fit in a record; InvalidArgument when not.
absl::Status ValidateUndoChunk(const UndoChunk& chunk);

// Which pass, and what it does (the caller's own number: the resolver of Recover needs it to find
// the arrays).
struct UndoKey {
  uint64_t tag = 0;
  uint32_t op = 0;
  friend bool operator==(const UndoKey&, const UndoKey&) = default;
};

struct LaneRecord {
  uint64_t sequence;
  uint64_t tag;
  uint64_t begin;  // first element of the group in the chunk
  uint32_t chunk;
  uint32_t op;
  uint32_t elements;
  uint32_t array_count;
  uint16_t element_bytes[kMaxUndoArrays];
  uint64_t reserved;
  std::byte payload[kUndoPayloadBytes];
};
static_assert(sizeof(LaneRecord) == 64 + kUndoPayloadBytes);

struct LaneHeader {
  std::atomic<uint64_t> position;  // sequence of the live record; 0: idle
  uint64_t reserved[7];
};
static_assert(sizeof(LaneHeader) == 64 && std::atomic<uint64_t>::is_always_lock_free);

// The record of sequence s is records[s % 2].
struct LaneArea {
  LaneHeader header;
  LaneRecord records[2];
};
static_assert(sizeof(LaneArea) == 64 + 2 * sizeof(LaneRecord));

struct UndoAreaHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t lanes;
  uint32_t chunks;
  uint32_t payload_bytes;
  uint64_t reserved[5];
};
static_assert(sizeof(UndoAreaHeader) == 64);

// A chunk that a dead process left in the middle; its elements from `next_element` on still have
// their old values.
struct UndoResume {
  uint32_t lane = 0;
  UndoKey key = {};
  uint32_t chunk = 0;
  uint64_t next_element = 0;
};

// A view of the area; copyable, does not own the memory.
class UndoArea {
 public:
  static size_t BytesNeeded(uint32_t lanes, uint32_t chunks);

  // Writes an empty area: all lanes idle, all done tags 0. InvalidArgument when `memory` is not
  // 64-byte aligned, is smaller than BytesNeeded, or lanes or chunks is 0.
  static absl::StatusOr<UndoArea> Format(std::byte* memory, size_t bytes, uint32_t lanes,
                                         uint32_t chunks);

  // Adopts an area that Format wrote; DataLoss when it does not look like one or does not fit in
  // `bytes`.
  static absl::StatusOr<UndoArea> Adopt(std::byte* memory, size_t bytes);

  uint32_t lanes() const { return lanes_; }
  uint32_t chunks() const { return chunks_; }
  LaneArea& lane(uint32_t lane) const { return lane_areas_[lane]; }
  std::atomic<uint64_t>& done(uint32_t chunk) const { return done_[chunk]; }
  bool IsDone(uint32_t chunk, uint64_t tag) const {
    return done_[chunk].load(std::memory_order_acquire) == tag;
  }

  // Finds the arrays of a chunk as the dead process had them.
  using Resolver = absl::FunctionRef<absl::StatusOr<UndoChunk>(const UndoKey& key, uint32_t chunk)>;

  // Puts the old bytes of every torn group back. Can be called, and die, any number of times before
  // the pass goes on. Returns what is left in the middle, in lane order; the pass must be finished
  // (RunProtected does it) or abandoned. DataLoss when a live record contradicts itself or the
  // arrays; nothing is then written for that lane or later ones.
  absl::StatusOr<std::vector<UndoResume>> Recover(Resolver resolver) const;

  // What lane `lane` has in the middle now; nothing when it is idle.
  std::optional<UndoResume> InFlight(uint32_t lane) const;

  // Forgets all chunks in the middle: the caller throws their contents away.
  void Abandon() const;

 private:
  UndoArea(std::byte* memory, uint32_t lanes, uint32_t chunks);

  LaneArea* lane_areas_;
  std::atomic<uint64_t>* done_;
  uint32_t lanes_;
  uint32_t chunks_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_UNDO_AREA_H_
