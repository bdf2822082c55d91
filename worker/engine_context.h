// What the parts of the engine share: memory, board, doorbells, counters and the way out.
//
// One object per worker, owned by the Engine; loop thread only.
#ifndef ZEROSHARD_WORKER_ENGINE_CONTEXT_H_
#define ZEROSHARD_WORKER_ENGINE_CONTEXT_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "proto/internal.pb.h"
#include "proto/trainer.pb.h"
#include "storage/board.h"
#include "worker/job_memory.h"

namespace zeroshard {

// Latencies: bucket i counts values below 2^i microseconds, the last one all the rest.
class LatencyHistogram {
 public:
  static constexpr size_t kBuckets = 28;
  void Add(absl::Duration latency);
  const std::array<uint64_t, kBuckets>& buckets() const { return buckets_; }

 private:
  std::array<uint64_t, kBuckets> buckets_ = {};
};

// Monotonic counters of this worker.
struct EngineCounters {
  uint64_t gather_elements = 0;             // asked for by this worker's ranks at stage 3
  uint64_t persistent_gather_elements = 0;  // of units under the persistence threshold
  uint64_t scatter_elements = 0;
  uint64_t step_gather_elements = 0;  // stages 0 to 2: all parameters, once a step and rank
  uint64_t wire_bytes = 0;            // sent to other islands
  uint64_t copied_bytes = 0;          // copied into the window
  uint64_t prefetch_hits = 0;
  uint64_t prefetch_misses = 0;
  LatencyHistogram gather, scatter, step, wait;
};

// Where the engine's words go. Implemented by the worker's main loop and by tests.
class EngineOutput {
 public:
  virtual ~EngineOutput() = default;
  // To the trainer of `rank`; dropped when it has no stream.
  virtual void ToRank(uint32_t rank, const trainer::v1::Failure& failure) = 0;
  virtual void ToRank(uint32_t rank, const trainer::v1::HelloReply& reply) = 0;
  // To the server.
  virtual void ToServer(const internal::v1::FromWorker& message) = 0;
};

class EngineContext {
 public:
  EngineContext(JobMemory& memory, Clock& clock, EngineOutput& output)
      : memory_(memory), clock_(clock), output_(output) {}

  JobMemory& memory() const { return memory_; }
  const Board& board() const { return memory_.board(); }
  const Layout& layout() const { return memory_.layout(); }
  uint32_t me() const { return memory_.worker(); }
  // The worker that decides the job's steps.
  bool is_leader() const { return memory_.worker() == 0; }
  // The worker that commits steps on its island's board and keeps its window.
  bool is_island_leader() const {
    uint32_t first = 0;
    while (!memory_.in_island(first)) ++first;
    return first == me();
  }
  absl::Duration now() const { return clock_.Elapsed(); }
  void SleepFor(absl::Duration duration) { clock_.SleepFor(duration); }
  EngineCounters& counters() { return counters_; }
  const EngineCounters& counters() const { return counters_; }
  EngineOutput& output() { return output_; }

  // Wakes all workers of the island, this one included.
  void RingAll();
  // Marks a unit as changed for all workers of the island; RingAll must follow.
  void MarkDirty(uint32_t unit);
  void MarkAllDirty();
  // All units, for one worker alone.
  void MarkAllDirty(uint32_t worker);

  // Kills the generation of the board, or `dead` if that is later: every waiter of the job gets
  // `status`. The first reason wins.
  void Poison(const absl::Status& status, uint64_t dead = 0);
  // As above, because other nodes cannot be reached: the job cannot have another generation.
  void PoisonWithoutNodes(const absl::Status& status);
  // Not OK once the generation is dead.
  absl::Status poison() const;

  // The server says that the job was idle in `generation`: its step in flight is dropped, and no
  // rank is served before the board shows it.
  void ExpectDrop(uint64_t generation) {
    expected_generation_ = std::max(expected_generation_, generation);
  }
  bool IsDropDone() const { return board().header().generation.load() >= expected_generation_; }

  // Holds gather `index` of `rank` against what other ranks gathered there; poisons when they
  // differ.
  void CompareOrder(uint32_t rank, uint64_t attempt, uint64_t index, uint32_t unit);

  // "unit 3 (transformer.h.0.attn)" for messages.
  std::string UnitName(uint32_t unit) const;

  // Whether every worker is done with rank's gradient `tag` of `unit`.
  bool IsConsumed(uint32_t rank, uint32_t unit, Tag tag) const;

 private:
  void Poison(const absl::Status& status, uint64_t dead, bool nodes_lost);

  JobMemory& memory_;
  Clock& clock_;
  EngineOutput& output_;
  EngineCounters counters_;
  uint64_t expected_generation_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_ENGINE_CONTEXT_H_
