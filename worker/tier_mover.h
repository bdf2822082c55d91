// TierMover: moves whole images between staging memory and files.
//
// Owns the tier's staging memory (this process' alone: what a killed process still has in flight
// must not land in its successor's) and its I/O queue. An image is moved in transfers of at most
// block_bytes, up to queue_depth of them at a time in each direction, and what one direction leaves
// the other may use; those of a path are begun in the order of Start, those of several paths in
// turn.
//
// Loop thread only. A transfer past its deadline, or a kernel that refuses the queue, fails the
// mover: every move then ends with an error, and Settle must be called before the next Prepare,
// which makes a new queue, and new memory where the kernel still holds the old.
#ifndef ZEROSHARD_WORKER_TIER_MOVER_H_
#define ZEROSHARD_WORKER_TIER_MOVER_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "storage/aligned_buffer.h"
#include "storage/io_queue.h"
#include "worker/tier_types.h"

namespace zeroshard {

// One image on its way; from Start until Turn or Withdraw returns it, it belongs to the mover.
struct TierMove {
  IoOperation operation = IoOperation::kRead;
  uint32_t path = 0;
  uint64_t offset = 0;  // in the path's file
  std::byte* memory = nullptr;
  uint64_t bytes = 0;
  absl::Status status;  // the first error

  uint64_t submitted = 0;  // the mover's
  uint32_t in_flight = 0;
};

class TierMover {
 public:
  // `fds`: the file of each path, open as long as this. `options` outlives this.
  TierMover(const NvmePlan& plan, const NvmeTierOptions& options, std::vector<int> fds);
  TierMover(const TierMover&) = delete;
  TierMover& operator=(const TierMover&) = delete;
  ~TierMover() { Settle(); }

  // Images that staging memory has room for: what the configuration says, or at least what keeps
  // all lanes at work while as many images come and go; never more than there are, none is moved
  // twice at a time.
  static uint32_t StagingImages(const NvmePlan& plan, const NvmeTierOptions& options);

  // Sees to it that there are memory and a queue.
  absl::Status Prepare();

  // Staging memory: each buffer holds any image.
  uint32_t buffers() const { return buffer_count_; }
  std::byte* buffer(uint32_t index) const;

  void Start(TierMove* move);
  // Begins what may be begun, waits at most `wait` for something to end, returns what has ended.
  // More may have ended than it returns: called again until it returns nothing, all the room there
  // is has been used.
  std::vector<TierMove*> Turn(absl::Duration wait);
  // Takes back what has not begun.
  std::vector<TierMove*> Withdraw();
  // What ended before is on disk afterwards. With nothing else under way.
  absl::Status Sync();

  bool failed() const { return !failure_.ok(); }
  // Ends a queue that failed, within seconds: nothing of it touches the memory that Prepare gives.
  void Settle();
  // The kernel may still use a file's descriptor: it must stay open until the process ends.
  bool held() const { return held_; }

  std::span<const TierPathCounters> counters() const { return counters_; }
  std::string description() const;

 private:
  struct Path {
    std::deque<TierMove*> waiting[2];  // reads, writes
    uint32_t in_flight = 0;
    absl::Duration busy_since;  // of SystemClock
  };

  // Begins all that may be begun.
  void Begin();
  // Begins one transfer of the path; false when it cannot.
  bool BeginOne(uint32_t path, int direction);
  absl::Status Submit(TierMove* move, uint64_t bytes);
  void End(TierMove* move);
  // Whether a transfer has ended.
  bool Reap(absl::Duration wait);
  void OnCompletion(TierMove* move, const absl::Status& status);

  const NvmeTierOptions& options_;
  const std::vector<int> fds_;
  const uint64_t stride_;  // of buffers
  uint32_t buffer_count_ = 0;
  std::vector<AlignedBuffer> memory_;
  uint32_t buffers_per_memory_ = 1;
  std::vector<Path> paths_;
  uint32_t in_flight_[2] = {0, 0};
  uint32_t next_path_ = 0;
  absl::Duration gate_wait_ = absl::InfiniteDuration();
  std::vector<TierMove*> ended_;
  std::vector<TierPathCounters> counters_;
  absl::Status failure_;
  bool held_ = false;
  std::unique_ptr<IoQueue> queue_;  // destroyed before the memory
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_TIER_MOVER_H_
