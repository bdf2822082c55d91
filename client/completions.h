// Completions: the trainer's view of its completion page (storage/rank_page.h, docs/pages.md).
//
// The page is written by the rank's worker and mapped read-only here. Reading an outcome is one
// load; a waiter takes a ticket, looks, and sleeps until the page was written after the ticket was
// taken. Does not own the mapping. Any thread.
#ifndef ZEROSHARD_CLIENT_COMPLETIONS_H_
#define ZEROSHARD_CLIENT_COMPLETIONS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "storage/rank_page.h"

namespace zeroshard {

class Completions {
 public:
  enum class Outcome {
    kPending,
    kOk,
    kFailed,
    kPast,  // complete, but its slot already tells of a later request
  };

  explicit Completions(const RankPage& page) : page_(&page) {}

  // Whether `bytes` at `page` are a completion page that no request has used yet. DataLoss for
  // other content, FailedPrecondition for slots that a predecessor left behind.
  static absl::Status Validate(const RankPage& page, uint64_t bytes);
  absl::Status CheckUnused() const;

  Outcome Look(uint64_t id) const;
  // The generation is dead; nothing will complete any more.
  bool poisoned() const { return page_->poisoned.load(std::memory_order_acquire) != 0; }
  // Why, if the server has said so in the page; else OK.
  absl::Status PoisonReason() const;
  uint64_t epoch() const { return page_->epoch.load(std::memory_order_acquire); }

  // To be taken before Look.
  uint32_t ticket() const { return page_->wake.load(std::memory_order_acquire); }
  // Returns when the page was written after `ticket`, or on Nudge, or after `at_most`, or for no
  // reason. Spins for a few microseconds before it sleeps.
  void Await(uint32_t ticket, absl::Duration at_most) const;
  // Wakes those who are in Await now, for news that are not in the page. One that is just about to
  // sleep is missed: callers of Await keep `at_most` short.
  void Nudge() const;

  // The result of the last committed step, whole. False when the writer is, or died, in the middle.
  bool ReadStepResult(StepResult& result) const;

 private:
  const RankPage* page_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_CLIENT_COMPLETIONS_H_
