// RankPage: the page in which a worker publishes to one rank that its requests are complete.
//
// The server creates it as a memfd; the rank's home worker (and, on a poisoned generation, the
// server) write it, the trainer maps it read-only. It outlives the worker: a successor goes on in
// the same page. Every field that the trainer waits for is one atomic word; `wake` is bumped after
// it and is what the trainer sleeps on. Format page: docs/pages.md.
#ifndef ZEROSHARD_STORAGE_RANK_PAGE_H_
#define ZEROSHARD_STORAGE_RANK_PAGE_H_

#include <atomic>
#include <cstdint>

namespace zeroshard {

inline constexpr uint64_t kRankPageMagic = 0x3150474b4e52535aULL;  // "ZSRNKGP1"
// Requests a rank may have without a completion; a further one waits in the client.
inline constexpr uint32_t kMaxPendingRequests = 4096;

// Of the reason why a generation is dead, the closing 0 included.
inline constexpr uint32_t kReasonBytes = 2044;

// What a committed step told its ranks.
struct StepResult {
  uint64_t step = 0;        // committed steps, this one included
  uint64_t attempt = 0;     // identity of the next step in flight
  uint64_t updates = 0;     // applied optimizer updates so far
  double loss_scale = 1.0;  // to use for the next step
  double grad_norm = 0.0;   // before clipping, unscaled; valid only if norm_valid
  uint32_t norm_valid = 0;
  uint32_t skipped = 0;  // 1: overflow, no state but the loss scale changed
};

struct RankPage {
  // How a request ended.
  enum Outcome : uint64_t { kOk = 1, kFailed = 2 };

  uint64_t magic = kRankPageMagic;
  uint64_t job_id = 0;
  std::atomic<uint32_t> wake{0};
  // Non-zero once the generation is dead; the reason comes on the stream, or stands below.
  std::atomic<uint32_t> poisoned{0};
  std::atomic<uint64_t> generation{0};
  // Parameter epoch: raised with every committed step and restore.
  std::atomic<uint64_t> epoch{0};
  // Guarded by `result_version`: odd while being written (a sequence lock; one writer).
  std::atomic<uint64_t> result_version{0};
  StepResult result;
  // slots[id % kMaxPendingRequests] == id * 4 + Outcome once request `id` is complete.
  alignas(64) std::atomic<uint64_t> slots[kMaxPendingRequests];
  // A gRPC code, 0 for none, and the text, written before it. By the server only: the worker may be
  // what the generation died of.
  std::atomic<uint32_t> reason_code{0};
  char reason[kReasonBytes] = {};
};

static_assert(std::atomic<uint64_t>::is_always_lock_free);

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_RANK_PAGE_H_
