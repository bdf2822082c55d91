// Engine: one worker's part in its job, as a state machine over the board.
//
// Requests of the ranks and commands of the server come in; Advance looks at the board and does
// everything that can be done now: sums gradients, copies puts, fills windows, makes or follows the
// decision of a step, applies and commits it, completes requests. What it waits for is always an
// entry on the board, so a successor that calls Recover and then Advance goes on where its
// predecessor died.
//
// The life of a step (attempt a), on the board:
//   contributions, micro ends, arrival = a of every rank
//     -> every worker sums its slices of all micro-steps, ready = a with its part of the norm
//     -> the leader writes the decision of a
//     -> every worker applies it (what is on the NVMe tier: into new images), applied = a
//     -> the leader commits: update counts, numbers, commit = a, attempt = a + 1
//     -> home workers complete the ranks' step requests
// Loop thread only.
#ifndef ZEROSHARD_WORKER_ENGINE_H_
#define ZEROSHARD_WORKER_ENGINE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/records.pb.h"
#include "worker/bridge.h"
#include "worker/engine_context.h"
#include "worker/rank_port.h"
#include "worker/shard.h"
#include "worker/state_mover.h"
#include "worker/state_tier.h"
#include "worker/tier_set.h"
#include "worker/window_keeper.h"

namespace zeroshard {

class Engine {
 public:
  // `nvme`: of a job whose states can be on the NVMe tier, else null. `device`: of a job with a
  // data plane, else null.
  static absl::StatusOr<std::unique_ptr<Engine>> Create(
      JobMemory& memory, ThreadPool& pool, Clock& clock, EngineOutput& output,
      std::unique_ptr<NvmeTier> nvme = nullptr, std::unique_ptr<DeviceShard> device = nullptr);

  // For a job whose workers do not all share memory; before anything else. `mesh` must outlive
  // this.
  absl::Status Connect(Mesh& mesh);
  // The mesh's word, on the loop thread.
  void OnMeshConnected();
  void OnMeshLost(const absl::Status& reason);
  void OnMeshFrame(uint32_t peer, Frame frame) { bridge_->OnFrame(peer, std::move(frame)); }

  // After a predecessor's death: repairs torn groups. Returns a sentence about what was found.
  absl::StatusOr<std::string> Recover();

  // Instead of it, where the tier was opened to resume a job whose regions are lost: it goes on
  // from there, `committed` being the attempt of its state. Waits for worker 0.
  absl::Status Resume(uint64_t committed);

  // `rank` must be one of this worker's.
  void OnHello(uint32_t rank, const trainer::v1::Hello& hello);
  void OnRequest(uint32_t rank, const trainer::v1::SessionRequest& request);
  // Nobody waits for a dead rank but the server, which gives its successor time to attach.
  void OnRankDied(uint32_t rank);
  // All ranks are gone: the leader drops the step in flight unless it is decided, and other islands
  // follow it; clears a poison. May be said again.
  void OnDropAttempt(uint64_t generation);
  // Poison from the server (a rank did not come back in time).
  // The server says that generation `dead` is; nothing happens when the job has gone on after it.
  void OnPoison(const absl::Status& status, uint64_t dead) {
    if (dead >= context_.board().header().generation.load()) context_.Poison(status, dead);
  }

  // States change their tier, a few chunks with each call of MoveStates.
  void OnMove(const internal::v1::MoveStates& command);
  void MoveStates();
  // Whether MoveStates has anything to do, now or soon.
  bool IsMoving() const { return mover_.has_value() && mover_->pending(); }

  // A device was lost: this worker's states are again as its mirror of the attempt has them, and
  // the leader of the island sets the job's numbers; the generation is dead of it. May be done
  // again. Errors are the device's, or say that there is no such mirror.
  absl::Status GoBack(const internal::v1::GoBack& command);

  // Does all that can be done now.
  void Advance();
  // Checks deadlines; call a few times a second.
  void Tick();

  // Whether no step is being decided or applied: states are those of the last commit, and no mirror
  // of them is under way.
  bool AtBoundary() const;

  // The job's numbers, update counts and user_states as of the last commit.
  records::v1::JobState JobState() const;
  // After this worker's shard was loaded: every worker forgets gradients of the step in flight; the
  // leader of each island sets the job's numbers, committed as the attempt in flight, or as a later
  // one `committed_as`. With parameters_only the numbers stay.
  absl::Status FinishRestore(const records::v1::JobState& state, bool parameters_only,
                             uint64_t committed_as = 0);
  // What brings frames and requests to this engine while it waits by itself (MakeReadable) and
  // between the sums of two large units or of some small ones.
  void SetPump(std::function<void()> pump) { pump_ = std::move(pump); }
  // Waits until `unit` lies whole in the window, which a copied window may take other workers for.
  absl::Status MakeReadable(uint32_t unit, absl::Duration timeout);
  // The caller has read it: a copied window keeps it no longer than a rank does.
  void DoneReading(uint32_t unit) { keeper_.GiveBack(unit); }

  // Not OK once this worker's device is lost: its process must end, and its successor may find the
  // device well again.
  absl::Status health() const { return device_ == nullptr ? absl::OkStatus() : device_->health(); }

  Shard& shard() { return shard_; }
  EngineContext& context() { return context_; }
  internal::v1::Stats Stats() const;

 private:
  Engine(JobMemory& memory, Clock& clock, EngineOutput& output, std::unique_ptr<TierSet> tiers,
         Shard shard, ThreadPool& pool, ReductionPlan plan, ReductionPlan single);
  absl::Status OpenLocalAccumulators();
  absl::StatusOr<std::optional<uint32_t>> RecoverLocal(uint32_t rank);
  std::optional<uint32_t> UnfinishedUnit(const UndoArea& undo, const PartitionPlan& plan) const;
  void CheckMesh(absl::Duration timeout);
  void CheckArrivals(absl::Duration timeout);
  void CheckScatters(uint32_t rank, absl::Duration timeout);
  // `waiter` waits for the island's ranks' gradients of a unit.
  void CheckGradients(const std::string& waiter, uint32_t unit, Tag tag, absl::Duration timeout);

  bool AdvanceOnce();
  bool FollowDrop();
  void FinishDrop(uint64_t generation);
  // Whether this island has yet to commit what the leader had decided before a drop.
  bool CommitsBeforeDrop() const;
  bool FollowAttempt();
  bool MergeDirty();
  void CompleteScatters();
  bool MergeUnit(uint32_t unit);
  // Jobs with a data plane (engine_device.cc). What ranks have summed on the device is noted.
  bool MergePresence(uint32_t unit);
  // Whether this worker's rank has summed all gradients of the step.
  bool HasSums();
  absl::StatusOr<ExactSum> SquaresOnDevice(Tag last);
  // Mirrors of what the device holds (engine_mirror.cc). Whether this worker's is as the job wants
  // it, so that states may change; starts one that is due.
  bool IsMirrored();
  bool IsMirrorDue() const;
  void FailMirror(const absl::Status& status);
  // What the device held is lost: the server says where the job goes back to.
  bool GoesBack() const {
    return context_.memory().mirror_plan() != nullptr && IsMemoryLost(health());
  }
  // The generation dies of it: the step in flight, unless it is decided, is lost.
  void Abort(const std::string& why);
  // Whether the rank has sent anything for the step in flight.
  bool HasBegun(uint32_t rank) const;
  bool CheckDataPlane();
  void CheckSums(absl::Duration timeout);
  bool MergeLocal(uint32_t rank, uint32_t unit);
  void FinishUnit(std::optional<uint32_t>& unfinished);
  std::optional<std::vector<GradientInput>> Inputs(uint32_t unit, Tag tag) const;
  std::optional<GradientInput> InputOf(uint32_t rank, uint32_t unit, Tag tag) const;
  std::optional<GradientInput> SourceOf(uint32_t rank, uint32_t unit, Tag tag) const;
  bool CopyPuts();
  bool CopyShards();
  bool FillWanted(std::span<const uint32_t> units);
  bool AnnounceReady();
  // The squares of this worker's sums of all units, which are complete up to `last`.
  ExactSum Squares(Tag last) const;
  bool Decide();
  bool Apply();
  absl::Status DoStep();
  absl::Status Update();
  // Durability `power`: what the step in flight prepared survives, with the numbers after it;
  // before that, what it begins with.
  absl::Status Seal();
  bool SealCommitted();
  bool IsPowerSafe() const;
  uint64_t PutsPosted() const;
  records::v1::JobState StateAfterStep() const;
  // The step in flight cannot be done here; it stays decided. Ranks are told; while there are none
  // it is tried again now and then.
  void FailStep(const absl::Status& status);
  bool MayApply();
  // Somebody has come since the last drop, and waits for the step.
  bool IsAwaited() const;
  // What may fail begins.
  void NoteAttempt();
  void NoteDrop(uint64_t generation);
  uint64_t RankActivity() const;
  bool Commit();
  bool AllArrived() const;
  uint64_t CountWord(uint32_t unit, uint32_t parameter) const;
  uint64_t CountBefore(uint32_t unit, uint32_t parameter) const;
  bool AllCountsEqual(uint32_t unit) const;
  void CountUpdates(uint32_t unit, const Presence& present) const;
  void FindGroupsOfUnits();
  void SetInitialized(uint32_t unit);
  void AddTierStats(internal::v1::Stats& stats) const;

  EngineContext context_;
  ThreadPool& pool_;
  std::unique_ptr<TierSet> tiers_;
  StateTier* const tier_;      // null in a job without an NVMe tier
  DeviceShard* const device_;  // null in a job without a data plane
  Shard shard_;
  const ReductionPlan plan_;                            // over the ranks
  const ReductionPlan single_;                          // of one input
  std::vector<std::unique_ptr<RankPort>> ports_;        // by rank; null for others' ranks
  std::vector<std::optional<AccumulatorSpace>> local_;  // by rank; stage 1, own ranks
  WindowKeeper keeper_;
  std::optional<StateMover> mover_;
  std::unique_ptr<Bridge> bridge_;  // null where all workers share memory
  // Since when the mesh does not stand, and why.
  std::optional<absl::Duration> mesh_lost_at_;
  // Of a step that failed while there were no ranks: when it is tried again if none come.
  absl::Duration retry_at_ = -absl::InfiniteDuration();
  uint64_t retrying_ = ~uint64_t{0};  // the generation that was dropped before the failure
  uint64_t dropped_ = 0;              // the last generation that was to be dropped
  uint64_t activity_at_drop_ = 0;
  // The last drop before the attempt to do the step, if it was awaited when it began.
  uint64_t awaited_at_ = ~uint64_t{0};
  absl::Status mesh_reason_;
  std::function<void()> pump_ = [] {};
  // A unit whose sum a predecessor left in the middle: no other is summed in place before it.
  std::optional<uint32_t> unfinished_;
  std::vector<std::optional<uint32_t>> unfinished_local_;  // by rank
  // What the last sum of each unit found in its pass. A successor of a killed process has it only
  // of the units that it summed itself.
  struct UnitSquares {
    Tag tag = 0;
    Presence present = {};
    ExactSum sum;
  };
  std::vector<UnitSquares> squares_;
  std::vector<uint32_t> group_of_unit_;  // of all its parameters, or kMixedGroups; empty at first
  uint64_t attempt_ = 0;                 // as of the last FollowAttempt
  uint64_t awaited_sums_ = 0;            // attempt that the device was asked to ring for
  std::optional<absl::Duration> sums_awaited_since_;
  bool mirrors_anew_ = false;  // the one under way is the first after a restore
  bool went_back_ = false;     // what was restored last is a mirror
  bool mirroring_ = false;     // a mirror is under way
  uint64_t unmirrored_ = 0;    // attempt whose mirror failed
  // Leader: since when it waits for arrivals, and when each rank was last heard of.
  std::optional<absl::Duration> waiting_since_;
  std::vector<uint64_t> activity_;
  std::vector<absl::Duration> active_at_;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_ENGINE_H_
