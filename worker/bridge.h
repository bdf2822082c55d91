// Bridge: makes the boards of workers that share no memory agree.
//
// With transport `gloo` every worker is an island with a board, a parameter window and ranks of its
// own. The bridge sends what its own worker and ranks wrote on the board to the others and writes
// what they sent into its own copy, so the engine needs to know nothing of it but two things:
// gradients of other islands' ranks come as partial sums (RemoteInputs), and parameters that are at
// rest in a window must be put into every window (pushed after an update, pulled for a gather).
//
// Everything sent is a copy of something that stays on the board or in a rank's window until every
// worker has acknowledged its use, so after a mesh was set up again all that may be missing is sent
// again, and receivers drop what they know. Frames for a step that this worker has not reached are
// kept until it does. Loop thread only.
#ifndef ZEROSHARD_WORKER_BRIDGE_H_
#define ZEROSHARD_WORKER_BRIDGE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/mesh.h"
#include "worker/engine_context.h"
#include "worker/shard.h"

namespace zeroshard {

class Bridge {
 public:
  // The gradient of an own rank for a micro-step; nothing while it may still come
  // (Engine::InputOf).
  using LocalInput =
      std::function<std::optional<GradientInput>(uint32_t rank, uint32_t unit, Tag tag)>;

  static absl::StatusOr<std::unique_ptr<Bridge>> Create(EngineContext& context, const Shard& shard,
                                                        ThreadPool& pool, Mesh& mesh,
                                                        LocalInput local_input);

  // The mesh stands: all that may be missing elsewhere is sent again.
  void OnConnected();
  void OnFrame(uint32_t peer, Frame frame);
  // Parameters of the unit were put: what the window holds of it is of before, and so is every
  // shard that is under way.
  void ForgetShards(uint32_t unit);
  // Sends what is new on the board. Returns whether anything was sent.
  bool Advance();

  // The inputs of a sum: the own ranks' gradients and the others' partial sums, matching plan().
  // Nothing while some are missing.
  std::optional<std::vector<GradientInput>> Inputs(uint32_t unit, Tag tag);
  const ReductionPlan& plan() const { return plan_; }
  // The partial sum of another worker that has waited longest for the own ranks' gradients.
  struct Waiting {
    uint32_t unit = 0;
    Tag tag = 0;
    uint32_t peer = 0;
    absl::Duration since;
  };
  std::optional<Waiting> OldestPartial() const;
  // The sum of `tag` is in the accumulator: its inputs are no longer needed.
  void Forget(uint32_t unit, Tag tag);

 private:
  // One partial sum of another island, for this worker's slice of a unit.
  struct Partial {
    bool any = false;
    DType dtype = DType::kFloat32;
    float weight = 1.0f;
    Presence present = {};
    uint64_t offset = 0;  // in the payload that it came in
  };
  struct Partials {
    FrameBytes payload;
    std::vector<Partial> sums;
  };
  struct Received {
    absl::Duration since;  // the first one came
    std::map<uint32_t, Partials> by_peer;
  };
  struct Sent {                        // to one peer, since the mesh stands
    std::vector<Tag> partial;          // by unit
    std::vector<Tag> merged;           // by unit
    std::vector<uint64_t> pulled;      // by unit: epoch asked for and not yet answered
    std::vector<uint64_t> pull;        // by unit: number of the pull whose answer counts, 0: none
    std::vector<uint8_t> initialized;  // by unit
    std::vector<uint64_t> order;       // by rank: order_end
    std::vector<uint64_t> arrival;     // by rank
    std::vector<uint64_t> put;         // by rank
    std::vector<Tag> contribution;     // by unit; data planes: of the own rank
    std::vector<Tag> micro_end;        // by rank
    uint64_t ready = 0, applied = 0, decision = 0, pushed = 0, poisoned = 0, drop = 0;
  };

  Bridge(EngineContext& context, const Shard& shard, ThreadPool& pool, Mesh& mesh,
         LocalInput local_input);
  absl::Status PlanSums();

  bool SendOrder(uint32_t peer, uint32_t rank);
  bool SendArrival(uint32_t peer, uint32_t rank);
  bool SendPut(uint32_t peer, uint32_t rank);
  bool SendPartial(uint32_t peer, uint32_t unit);
  // Jobs with a data plane: their ranks sum, and workers only tell each other what there was.
  bool SendContribution(uint32_t peer, uint32_t unit);
  bool SendMicroEnd(uint32_t peer, uint32_t rank);
  bool SendUnitMarks(uint32_t peer, uint32_t unit);
  bool SendWorkerMarks(uint32_t peer);
  void PushShards(uint32_t peer);
  void SendPull(uint32_t peer, uint32_t unit, uint64_t epoch);
  // Answers the pulls of those who have seen no put that is still on its way here.
  bool AnswerPulls();
  void SendShard(uint32_t peer, uint32_t unit, uint64_t number, uint64_t epoch);
  FrameBytes EncodePartials(uint32_t unit, uint32_t peer,
                            const std::vector<std::optional<GradientInput>>& inputs) const;
  void Post(uint32_t peer, Frame frame);

  void OnOrder(const Frame& frame);
  void OnArrival(const Frame& frame);
  void OnPut(uint32_t peer, Frame frame);
  void OnPartial(uint32_t peer, Frame frame);
  void OnContribution(const Frame& frame);
  void OnMicroEnd(const Frame& frame);
  void OnShard(uint32_t peer, const Frame& frame);
  void OnDecision(const Frame& frame);
  void OnPoison(uint32_t peer, const Frame& frame);
  void OnDrop(const Frame& frame);
  void OnWorkerMark(uint32_t peer, const Frame& frame);
  bool IsAhead(uint64_t attempt) const { return attempt > context_.board().attempt(); }

  bool has_data_plane() const { return context_.memory().config().data_plane(); }
  bool is_mine(uint32_t rank) const { return context_.memory().is_home_of(rank); }

  EngineContext& context_;
  const Shard& shard_;
  ThreadPool& pool_;
  Mesh& mesh_;
  const LocalInput local_input_;
  std::vector<std::vector<TreeNode>> nodes_;     // by worker: what it sums by itself
  std::vector<std::vector<uint32_t>> ranks_of_;  // by worker, increasing
  std::vector<ReductionPlan> node_plans_;        // own nodes over own ranks inside them
  ReductionPlan plan_;                           // own ranks, then the other workers' nodes
  std::vector<Sent> sent_;                       // by peer
  std::map<std::pair<uint32_t, Tag>, Received> partials_;
  // Partial sums that several peers need alike.
  struct Encoded {
    uint32_t unit = 0;
    Tag tag = 0;
    FrameBytes payload;
  };
  Encoded encoded_;
  std::vector<std::pair<uint32_t, Frame>> early_;  // frames of steps not reached yet
  std::vector<std::pair<uint32_t, Frame>> pulls_;  // not answered yet
  uint64_t last_pull_ = 0;
  uint64_t attempt_ = 0;
  uint64_t generation_ = 0;
  uint64_t wire_bytes_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_WORKER_BRIDGE_H_
