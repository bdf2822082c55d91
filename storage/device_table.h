// DeviceTable: which slot of a worker's device memory holds which image, and where each image shall
// rest; in the worker's region DEVICE_TABLE.
//
// Written by the worker alone; held by the server, so that it outlives the worker. Every change is
// one 64-bit atomic store after which the table is right, so a kill at any instant leaves nothing
// to repair. Format, protocol and why it holds: docs/device.md.
//
//   slot = Reserve(image, kUpdate);   enqueue kernels that read slot(image) and fill `slot`
//   ... their event ...               Name(image, slot, attempt)
// Which slots are reserved is known to this process only: a successor finds them free. One thread
// at a time.
#ifndef ZEROSHARD_STORAGE_DEVICE_TABLE_H_
#define ZEROSHARD_STORAGE_DEVICE_TABLE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/device_plan.h"

namespace zeroshard {

// Where an image shall rest.
enum class DeviceTarget : uint64_t { kAsPlanned = 0, kHost = 1, kNvme = 2, kGpu = 3 };

class DeviceTable {
 public:
  // Of an image that the device holds.
  struct Place {
    uint32_t slot = 0;
    uint64_t attempt = 0;  // that made it
    friend bool operator==(const Place&, const Place&) = default;
  };
  // kUpdate may take the last free slot of a class, kMove may not: an update could not go on.
  enum class Purpose : uint8_t { kUpdate, kMove };

  // A predecessor's table, or an empty one in zeroed memory. `plan` and `memory` must outlive this.
  // InvalidArgument for memory that is too small or not aligned to 64 bytes; DataLoss for a table
  // that is another job's or plan's, or that names a slot twice, or one that does not fit.
  static absl::StatusOr<DeviceTable> Open(std::span<std::byte> memory, const DevicePlan& plan,
                                          uint64_t job_id, uint64_t layout_fingerprint);

  std::optional<Place> place(uint32_t image) const;
  bool Holds(uint32_t image) const { return word(image).load(std::memory_order_acquire) != 0; }

  // A free slot that the image fits in, the smallest first; nothing when there is none.
  std::optional<uint32_t> Reserve(uint32_t image, Purpose purpose);
  // The reserved slot will not be used.
  void Release(uint32_t slot) { used_[slot] = false; }
  // The image is whole in the slot, which was reserved for it; the one that it was in is free.
  void Name(uint32_t image, uint32_t slot, uint64_t attempt);
  // What the image holds lies elsewhere, or will be written anew.
  void Forget(uint32_t image);

  DeviceTarget target(uint32_t image) const;
  void SetTarget(uint32_t image, DeviceTarget target);

  uint32_t free_slots() const;

  // Called after each store to the table; for tests of what a kill leaves behind.
  void ObserveStores(std::function<void()> observer) { observer_ = std::move(observer); }

 private:
  struct Header {
    uint64_t magic;
    uint32_t version, images, slots, reserved;
    uint64_t job_id, layout_fingerprint, plan_fingerprint;
    uint64_t unused[9];
    std::atomic<uint64_t> formatted;
  };
  static_assert(sizeof(Header) == 128);
  static_assert(std::atomic<uint64_t>::is_always_lock_free);

  DeviceTable(std::span<std::byte> memory, const DevicePlan& plan);
  void Format(uint64_t job_id, uint64_t layout_fingerprint);
  absl::Status Check(uint64_t job_id, uint64_t layout_fingerprint);
  absl::Status Adopt();
  std::atomic<uint64_t>& word(uint32_t image) const { return words_[image]; }
  void Store(std::atomic<uint64_t>& word, uint64_t value) const;
  bool Fits(uint32_t image, uint32_t slot) const;

  const DevicePlan* plan_;
  Header* header_;
  std::atomic<uint64_t>* words_;
  std::atomic<uint64_t>* targets_;
  std::vector<bool> used_;  // by slot: named or reserved
  std::function<void()> observer_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_DEVICE_TABLE_H_
