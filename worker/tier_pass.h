// TierPass: one run of work over items whose images lie on the NVMe tier.
//
// A ring of entries, each an item on its way: its image is read, verified and changed on a lane,
// encoded there for the slot it goes to, written, and completed in the slot table. Reads run ahead
// of the lanes and writes behind them. The loop thread begins and collects transfers between
// batches of one entry a lane; what is in flight then keeps the drives busy meanwhile.
#ifndef ZEROSHARD_WORKER_TIER_PASS_H_
#define ZEROSHARD_WORKER_TIER_PASS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "worker/tier_mover.h"
#include "worker/tier_store.h"
#include "worker/tier_types.h"

namespace zeroshard {

// What a pass works with; all of it outlives the pass.
struct TierPassContext {
  TierStore& store;
  TierMover& mover;  // prepared
  const NvmeTierOptions& options;
  TierCounters& counters;
  TierFeed* feed = nullptr;  // without one the work needs nothing else
};

class TierPass {
 public:
  TierPass(const TierPassContext& context, std::span<const TierItem> items, TierWork work);
  TierPass(const TierPass&) = delete;
  TierPass& operator=(const TierPass&) = delete;

  // As NvmeTier::Run. Afterwards nothing is in flight, unless the mover has failed.
  absl::Status Run();

 private:
  enum class Output : uint8_t { kNone, kNoSlot, kReserved, kWriting };
  // An image of an entry that is written.
  struct Target {
    void SetUp(uint32_t its_image, std::byte* its_memory) {
      state = Output::kNoSlot;
      image = its_image;
      memory = its_memory;
    }
    Output state = Output::kNone;
    uint32_t image = kNoImage;
    std::byte* memory = nullptr;
    TierPlace place;
    SlotImage written;
    TierMove move;
  };
  struct Entry {
    const TierItem* item = nullptr;
    uint32_t buffers[2] = {0, 0};  // of the mover
    uint32_t buffer_count = 0;
    TierBuffers bytes;
    TierPlace source;
    TierMove read;
    int reads = 0;            // that failed
    bool read_again = false;  // because it was not what it should be
    bool damaged = false;     // it is not
    bool worked = false;
    bool fed = false;     // what its work needs has begun to come
    bool left = false;    // what its work made has begun to go
    absl::Status status;  // of the lane
    absl::Duration compute;
    Target targets[2];
  };

  // Images that are computed before the queue is looked at again, at most.
  size_t BatchLimit() const;
  // Entries that are worth having: enough for the queue and for two batches, and then as many as
  // the caches hold.
  size_t EntryLimit() const;

  bool Done(const TierItem& item) const;
  // Takes items into the ring and begins their reads.
  void Admit();
  absl::Status AdmitOne(const TierItem& item);
  void StartRead(Entry& entry);
  void TakeBuffer(Entry& entry, std::byte*& memory);

  // Begins to bring what entries need, in the order in which they were admitted.
  void Feed();
  // Whether all is there that the entry's work needs.
  bool HasCome(const Entry& entry);

  bool MayCompute() const;
  // Runs a batch of entries on the lanes; false when none is ready.
  bool Compute();
  std::vector<Entry*> NextBatch();
  // Gives slots to what the entry writes; false when it must wait for one.
  bool ReserveSlots(Entry& entry);
  absl::Status NoSlot(const absl::Status& status);
  void RunLane(Entry& entry) const;
  void AfterLane(Entry& entry);
  void OnDamage(Entry& entry);
  void StartWrites(Entry& entry);

  Entry& EntryOf(const TierMove* move);
  void OnEnded(TierMove* move);
  void OnWithdrawn(TierMove* move);
  void OnRead(Entry& entry);
  void OnWritten(Entry& entry, Target& target);
  absl::Status Complete(const Entry& entry, const Target& target);
  // Once among those that are ready; also for a second reason.
  void MakeReady(Entry& entry);
  // Frees an entry that waits for nothing any more.
  void FreeIfDone(Entry& entry);
  void Free(Entry& entry);
  void Wait();
  // Nothing new is begun any more; entries that wait for no transfer are freed.
  void Fail(const absl::Status& status);
  void DropIdle();

  TierStore& store_;
  TierMover& mover_;
  const NvmeTierOptions& options_;
  TierCounters& counters_;
  TierFeed* const feed_;
  const std::span<const TierItem> items_;
  const TierWork work_;
  const size_t lanes_;
  size_t next_ = 0;
  std::vector<Entry> entries_;
  std::vector<Entry*> free_entries_;
  std::vector<uint32_t> free_buffers_;
  std::deque<Entry*> ready_;                     // to be computed, or encoded again
  std::deque<Entry*> unfed_;                     // with a feed
  bool starved_ = false;                         // all that are ready wait for what they need
  uint32_t reading_ = 0;                         // entries
  uint32_t writing_ = 0;                         // images
  std::optional<absl::Duration> blocked_since_;  // no slot for the first that is ready
  absl::Status write_error_;                     // the last one
  absl::Status error_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_TIER_PASS_H_
