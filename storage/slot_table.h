// SlotTable: which slot of the NVMe tier holds which chunk, in the worker's region.
//
// Written by the worker alone; held by the server, so that it outlives the worker. Every change is
// one 64-bit atomic store after which the table is right, so a kill at any instant leaves nothing
// to repair. Format, protocol and the argument why it holds: docs/nvme.md.
//
// One step of the worker:
//   Begin(attempt);
//   for each chunk that the step changes and that is not Prepared (a predecessor may have done it):
//     slot = Reserve(chunk);  read Current(chunk), compute, encode for the slot, write
//     Complete(chunk, image) once all bytes are written; or Release(slot) when the write failed
//   ... the job commits the attempt on the board ...
//   Commit(attempt);
// A successor: Adopt; Commit(the board's committed attempt); Begin(the same attempt again).
//
// What a dead predecessor may still be writing is never read and never reserved, until
// ReleaseDrained. One thread at a time; one process at a time, and the server starts a successor
// only when the predecessor was reaped.
#ifndef ZEROSHARD_STORAGE_SLOT_TABLE_H_
#define ZEROSHARD_STORAGE_SLOT_TABLE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace zeroshard {

// What an entry names: a whole image and the slot that it lies in.
struct SlotImage {
  uint32_t slot = 0;
  uint64_t generation = 0;
  uint64_t attempt = 0;
  uint64_t step = 0;
  uint64_t checksum = 0;  // of the image's header
  friend bool operator==(const SlotImage&, const SlotImage&) = default;
};

// What a table belongs to; all of it must agree on adoption.
struct SlotTableShape {
  uint32_t chunks = 0;
  uint32_t slots = 0;  // 2 * chunks home slots and the spares
  uint64_t job_id = 0;
  uint64_t layout_fingerprint = 0;
  uint64_t plan_fingerprint = 0;
};

class SlotTable {
 public:
  static uint64_t Bytes(uint32_t chunks, uint32_t slots);

  // Writes an empty table: no chunk has an image. `committed` is the last committed attempt,
  // `generation` (not 0) the first. InvalidArgument for memory that is too small or not aligned to
  // 64 bytes, or fewer slots than 2 * chunks.
  static absl::StatusOr<SlotTable> Format(std::span<std::byte> memory, const SlotTableShape& shape,
                                          uint64_t generation, uint64_t committed);
  // Adopts a predecessor's table under the next generation. DataLoss when it is not the shape's, or
  // contradicts itself.
  static absl::StatusOr<SlotTable> Adopt(std::span<std::byte> memory, const SlotTableShape& shape);

  uint64_t generation() const { return header_->generation.load(std::memory_order_relaxed); }
  uint64_t committed() const { return header_->committed.load(std::memory_order_relaxed) - 1; }
  uint32_t chunks() const { return header_->chunks; }

  // Opens an attempt and forgets what others than it prepared. With the committed attempt, what is
  // completed becomes current at once: for initial values and for moves to this tier.
  // InvalidArgument for an attempt before the committed one.
  absl::Status Begin(uint64_t attempt);

  // A slot to write `chunk` to; it is in flight until Complete, Release or, after this process is
  // dead, ReleaseDrained. FailedPrecondition when no attempt is open or the chunk is Prepared.
  // Unavailable when all slots that would do may still be written by a predecessor.
  absl::StatusOr<uint32_t> Reserve(uint32_t chunk);
  // The image is whole in its slot, which Reserve gave for the chunk. When its attempt is not the
  // open one any more, the slot is free by that and the result is FailedPrecondition.
  absl::Status Complete(uint32_t chunk, const SlotImage& image);
  // Nothing is in flight to the slot any more: the write was not submitted, or ended in an error.
  void Release(uint32_t slot);

  // Makes what the attempt prepared current. InvalidArgument for an attempt before the committed
  // one; nothing to do for that one itself.
  absl::Status Commit(uint64_t attempt);

  // The committed image of a chunk; none when it never had one.
  std::optional<SlotImage> Current(uint32_t chunk) const;
  // The image that the open attempt completed; none when it did not, or is the committed attempt.
  std::optional<SlotImage> Prepared(uint32_t chunk) const;

  // The chunk has no image any more: what it holds lies elsewhere. Nothing of the chunk may be in
  // flight. A kill leaves it with its current image or without any.
  void Forget(uint32_t chunk);

  // Names an image as current in a table that has none of the chunk; from a manifest.
  // InvalidArgument for a slot that cannot be the chunk's or is named already, or an attempt that
  // is not committed.
  absl::Status Restore(uint32_t chunk, const SlotImage& image);

  // Slots that predecessors may still be writing.
  uint32_t quarantined() const;
  uint32_t free_spares() const;
  // No write of a predecessor is in flight any more. Returns how many slots are free by that.
  uint32_t ReleaseDrained();

  // Called after each store to the table; for tests of what a kill leaves behind.
  void ObserveStores(std::function<void()> observer) { observer_ = std::move(observer); }

 private:
  struct Header {
    uint64_t magic;
    uint32_t version, chunks, slots, reserved;
    uint64_t job_id, layout_fingerprint, plan_fingerprint;
    std::atomic<uint64_t> generation;
    std::atomic<uint64_t> committed;  // attempt + 1
    uint64_t unused[8];
  };
  struct Entry {
    std::atomic<uint64_t> tag;  // attempt + 1, written last; 0 when empty
    uint64_t sequence;          // rises with each entry of the chunk
    uint32_t slot, reserved;
    uint64_t generation, step, checksum;
    uint64_t unused[2];
  };
  static_assert(sizeof(Header) == 128 && sizeof(Entry) == 64);
  static_assert(std::atomic<uint64_t>::is_always_lock_free);

  explicit SlotTable(std::span<std::byte> memory, uint32_t chunks);
  absl::Status CheckEntries();
  // Index of the chunk's current entry, or of that with the tag; -1 for none.
  int CurrentIndex(uint32_t chunk) const;
  int PreparedIndex(uint32_t chunk) const;
  SlotImage ImageOf(const Entry& entry) const;
  void Store(std::atomic<uint64_t>& word, uint64_t value) const;
  void Fill(Entry& entry, const SlotImage& image, uint64_t sequence);
  void Clear(Entry& entry);
  // Clears all entries that are neither current nor prepared by the attempt of the tag.
  void ClearOthers(uint64_t tag);
  bool IsFree(uint32_t slot) const;
  Entry* entries(uint32_t chunk) const { return entries_ + size_t{2} * chunk; }

  Header* header_;
  Entry* entries_;
  std::atomic<uint64_t>* words_;
  std::vector<bool> named_;  // by slot
  uint64_t open_ = 0;        // tag of the open attempt
  std::function<void()> observer_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_SLOT_TABLE_H_
