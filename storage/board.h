// Board: the shared state by which the workers of one island (that share memory) coordinate a job.
//
// A memfd that the server creates and every worker of the island maps; trainers never see it.
// Coordination is state, not messages: each entry has one writer, is written tag-last with one
// atomic store, and says which step in flight (`attempt`) it belongs to. So an entry is either
// there or not, survives the death of any worker, and may be written again by a successor. After
// writing, a worker rings the doorbells of those who may wait for it; nobody relies on the
// doorbell's content.
//
//   entry                              written by                      read by
//   rank slot: order, micro end,       the rank's home worker          all workers
//     step arrival, put
//   contribution (unit, rank)          the rank's home worker          all workers
//   merge record (worker, unit)        that worker                     home workers
//   local record (rank, unit)          the rank's home worker          all workers (stage 1)
//   worker slot: ready, applied        that worker                     leader (worker 0), committer
//   decision                           the leader                      all workers
//   commit, attempt, epoch             island's first worker           all workers
//   update count (unit, parameter)     island's first, at commit       all workers
//   fill (worker, unit), pin, evict    owner / home / island's first   all workers (copied windows)
//
// A Tag orders the micro-steps of all attempts: attempt * 65536 + micro-step + 1. Format page:
// docs/board.md.
#ifndef ZEROSHARD_STORAGE_BOARD_H_
#define ZEROSHARD_STORAGE_BOARD_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/layout.h"

namespace zeroshard {

inline constexpr uint64_t kBoardMagic = 0x31445241424f535aULL;  // "ZSOBARD1"
inline constexpr uint32_t kBoardVersion = 2;
// Gathers of one rank that are kept for comparison with those of other ranks.
inline constexpr uint32_t kOrderRing = 1024;
inline constexpr uint32_t kMaxGroups = 64;
inline constexpr uint32_t kMaxMicroSteps = 65534;
inline constexpr uint32_t kPoisonTextBytes = 2048;
inline constexpr uint32_t kPresenceWords = kMaxUnitParameters / 64;

using Tag = uint64_t;
constexpr Tag MakeTag(uint64_t attempt, uint32_t micro_step) {
  return attempt << 16 | (micro_step + 1);
}
constexpr uint64_t AttemptOf(Tag tag) { return tag >> 16; }
constexpr uint32_t MicroStepOf(Tag tag) { return static_cast<uint32_t>(tag & 0xffff) - 1; }

// Which parameters of a unit have a gradient, by their position in the unit.
using Presence = std::array<uint64_t, kPresenceWords>;

// Hyperparameters of one parameter group, as the client sent them with the step.
struct GroupHyper {
  double lr, weight_decay, beta1, beta2, eps, momentum, dampening;
  uint32_t nesterov, bias_correction;
};

// What a rank brings to a step.
struct StepInput {
  uint32_t micro_steps;
  uint32_t groups;
  double weight_total;
  GroupHyper group[kMaxGroups];
};

struct alignas(64) RankSlot {
  std::atomic<uint64_t> attached;  // generation of the attached process, 0 for none
  std::atomic<uint64_t> activity;  // requests received; tells a slow rank from a stuck one
  std::atomic<uint64_t> posted;    // the last scatter, micro end or step whose effects are complete
  std::atomic<uint64_t> order_start;  // request id << 24 | index at which its first gather stands
  std::atomic<uint64_t> order_end;    // attempt << 32 | collective gathers posted in it
  std::atomic<Tag> micro_end;         // the last micro-step whose scatters are all posted
  uint64_t arrival_request;           // id of the step request behind `arrival`
  uint64_t arrival_attempt;
  std::atomic<uint64_t> arrival;  // attempt for which `input` and the user_state are complete
  std::atomic<uint64_t> put_tag;  // identity of the put below; rises by one
  uint32_t put_unit;
  uint32_t reserved;
  uint64_t put_offset, put_elements, put_window_offset;
  std::atomic<uint64_t> order[kOrderRing];  // see OrderEntry
  StepInput input;
};

// One gather in a rank's order: attempt (16 bits), index in the attempt (24), unit (24).
constexpr uint64_t OrderEntry(uint64_t attempt, uint64_t index, uint32_t unit) {
  return (attempt & 0xffff) << 48 | (index & 0xffffff) << 24 | (unit & 0xffffff);
}

// A rank's gradient of one unit.
struct alignas(64) Contribution {
  std::atomic<Tag> tag;
  uint64_t window_offset;
  float weight;
  uint32_t reserved;
  Presence present;
};

// How far the micro-steps of one unit are summed by one worker (or, stage 1, accumulated for one
// rank).
struct alignas(64) MergeRecord {
  struct State {
    Tag tag;
    Presence present;  // parameters with a gradient in any micro-step of the attempt up to `tag`
  };
  std::atomic<Tag> tag;
  State states[2];  // the one whose tag equals `tag` is valid; the other is being prepared
};

struct alignas(64) WorkerSlot {
  std::atomic<uint64_t> ready;    // attempt of the norm below
  std::atomic<uint64_t> applied;  // attempt
  std::atomic<uint64_t> fence;    // the header's fence as seen before the worker's current round
  std::byte norm[560];            // ExactSum of squares over the worker's slices
  // Raised by whatever the worker does. The server takes one that stands still for stuck.
  std::atomic<uint64_t> beats;
};

// The job's own numbers; double-buffered by the commit word.
struct JobNumbers {
  uint64_t step;     // committed steps, skipped ones included
  uint64_t updates;  // applied optimizer updates
  uint64_t skipped;
  double loss_scale;
  uint64_t scaler_iteration;     // steps seen by the loss scaler
  int64_t scaler_last_overflow;  // iteration of the last overflow, -1 for none
  uint32_t scaler_hysteresis;    // overflows left before the scale drops
  uint32_t last_skipped;
  double grad_norm;  // of the last step, before clipping
  uint32_t norm_valid;
  uint32_t reserved;
};

// The decision of a step, complete before the first element is touched.
struct Decision {
  std::atomic<uint64_t> attempt;
  uint32_t skip;
  uint32_t micro_steps;
  float grad_scale;  // clip factor / (loss scale * count)
  uint32_t groups;
  JobNumbers next;
  GroupHyper group[kMaxGroups];
};

struct BoardShape {
  uint32_t workers = 0;
  uint32_t ranks = 0;
  uint32_t units = 0;
  uint32_t parameters = 0;
  friend bool operator==(const BoardShape&, const BoardShape&) = default;
};

struct alignas(64) BoardHeader {
  uint64_t magic;
  uint32_t version;
  uint32_t reserved;
  uint64_t job_id;
  uint64_t layout_fingerprint;
  BoardShape shape;
  std::atomic<uint64_t> generation;  // in which the job last was idle and its step dropped
  // The last drop, as the leader made it: attempts above drop_after and below drop_until never
  // commit. Islands other than the leader's may have to commit earlier ones first.
  std::atomic<uint64_t> drop_generation;  // written last
  std::atomic<uint64_t> drop_after;
  std::atomic<uint64_t> drop_until;
  std::atomic<uint64_t> attempt;  // the step in flight, from 1
  std::atomic<uint64_t> commit;   // last committed attempt << 1 | index of its JobNumbers
  std::atomic<uint64_t> epoch;    // raised with every committed step and restore
  // Raised by a home worker that took something back from the board; nobody uses the old value any
  // more once every worker has copied the new fence into its slot.
  std::atomic<uint64_t> fence;
  std::atomic<uint64_t> poison_claim;  // generation of the one who writes the text
  std::atomic<uint64_t> poisoned;      // generation << 8 | status code; of an older one: void
  char poison_text[kPoisonTextBytes];
  JobNumbers numbers[2];
  Decision decision;
};

// A view of the mapped board; copyable, does not own the memory. Fields may be read by any thread.
class Board {
 public:
  static uint64_t Bytes(const BoardShape& shape);

  // Writes an empty board into zeroed memory: attempt 1, nothing committed, `loss_scale` for the
  // first step.
  static absl::StatusOr<Board> Format(std::span<std::byte> memory, const BoardShape& shape,
                                      uint64_t job_id, uint64_t layout_fingerprint,
                                      double loss_scale, uint32_t hysteresis);
  // Adopts a board; DataLoss when it is not this job's.
  static absl::StatusOr<Board> Adopt(std::span<std::byte> memory, const BoardShape& shape,
                                     uint64_t job_id, uint64_t layout_fingerprint);

  BoardHeader& header() const { return *header_; }
  RankSlot& rank(uint32_t rank) const { return ranks_[rank]; }
  WorkerSlot& worker(uint32_t worker) const { return workers_[worker]; }
  Contribution& contribution(uint32_t unit, uint32_t rank) const {
    return contributions_[uint64_t{unit} * shape_.ranks + rank];
  }
  MergeRecord& merged(uint32_t worker, uint32_t unit) const {
    return merged_[uint64_t{worker} * shape_.units + unit];
  }
  MergeRecord& local(uint32_t rank, uint32_t unit) const {
    return local_[uint64_t{rank} * shape_.units + unit];
  }
  // Last put of `rank` that `worker` has copied.
  std::atomic<uint64_t>& put_done(uint32_t worker, uint32_t rank) const {
    return put_done_[uint64_t{worker} * shape_.ranks + rank];
  }
  // 1 once `worker` holds values for its whole shard of `unit`.
  std::atomic<uint32_t>& initialized(uint32_t worker, uint32_t unit) const {
    return initialized_[uint64_t{worker} * shape_.units + unit];
  }
  // Copied windows: the parameter epoch of `worker`'s shard in the window, 0 for none.
  std::atomic<uint64_t>& fill(uint32_t worker, uint32_t unit) const {
    return fill_[uint64_t{worker} * shape_.units + unit];
  }
  // Copied windows: the epoch that some rank waits for.
  std::atomic<uint64_t>& wanted(uint32_t unit) const { return wanted_[unit]; }
  // Copied windows: request id << 16 | gathers without release of `rank`.
  std::atomic<uint64_t>& pins(uint32_t rank, uint32_t unit) const {
    return pins_[uint64_t{rank} * shape_.units + unit];
  }
  // Copied windows: 1 while the unit's pages are given back.
  std::atomic<uint32_t>& evicting(uint32_t unit) const { return evicting_[unit]; }
  // Units of which something changed, for one worker: bit per unit.
  std::span<std::atomic<uint64_t>> dirty(uint32_t worker) const {
    return {dirty_ + uint64_t{worker} * dirty_words_, dirty_words_};
  }
  // Updates of a parameter: low half-attempt of the last one << 32 | count including it. Says
  // nothing while the unit has a common count.
  std::atomic<uint64_t>& update_count(uint32_t parameter) const {
    return update_counts_[parameter];
  }
  // The same word for all parameters of a unit that were always updated together, 0 for others.
  std::atomic<uint64_t>& common_count(uint32_t unit) const { return common_counts_[unit]; }

  const BoardShape& shape() const { return shape_; }

  // The committed numbers.
  const JobNumbers& numbers() const {
    return header_->numbers[header_->commit.load(std::memory_order_acquire) & 1];
  }
  uint64_t attempt() const { return header_->attempt.load(std::memory_order_acquire); }
  uint64_t committed_attempt() const {
    return header_->commit.load(std::memory_order_acquire) >> 1;
  }

 private:
  Board(std::span<std::byte> memory, const BoardShape& shape);

  BoardShape shape_;
  uint64_t dirty_words_ = 0;
  BoardHeader* header_ = nullptr;
  RankSlot* ranks_ = nullptr;
  WorkerSlot* workers_ = nullptr;
  Contribution* contributions_ = nullptr;
  MergeRecord* merged_ = nullptr;
  MergeRecord* local_ = nullptr;
  std::atomic<uint64_t>* put_done_ = nullptr;
  std::atomic<uint64_t>* fill_ = nullptr;
  std::atomic<uint64_t>* wanted_ = nullptr;
  std::atomic<uint64_t>* dirty_ = nullptr;
  std::atomic<uint64_t>* update_counts_ = nullptr;
  std::atomic<uint64_t>* common_counts_ = nullptr;
  std::atomic<uint32_t>* initialized_ = nullptr;
  std::atomic<uint64_t>* pins_ = nullptr;
  std::atomic<uint32_t>* evicting_ = nullptr;
};

// user_state of every rank: two areas each, the one with the committed attempt being valid.
class UserStates {
 public:
  static uint64_t Bytes(uint32_t ranks, uint64_t capacity);

  UserStates(std::span<std::byte> memory, uint32_t ranks, uint64_t capacity)
      : memory_(memory), ranks_(ranks), capacity_(capacity) {}

  uint64_t capacity() const { return capacity_; }
  // Writes what becomes valid when `attempt` commits; `committed` is the last committed attempt.
  absl::Status Write(uint32_t rank, uint64_t attempt, uint64_t committed,
                     std::span<const std::byte> bytes) const;
  // The bytes committed with `committed`; empty when the rank wrote none for it.
  std::span<const std::byte> Read(uint32_t rank, uint64_t committed) const;

 private:
  struct Area {
    std::atomic<uint64_t> attempt;
    uint64_t bytes;
  };
  Area* area(uint32_t rank, uint32_t index) const;

  std::span<std::byte> memory_;
  uint32_t ranks_;
  uint64_t capacity_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_STORAGE_BOARD_H_
