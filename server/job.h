// A job as a pure state machine: Decide(state, input, now) -> next state, actions, and a sentence.
//
//   attach ...            all ranks in          every worker ready
//   ---------> Forming ---------------> Starting ----------------> Ready
//                 ^                                                  |  rank died: survivors wait,
//                 a | attach (a kept job forms again)                  |  successor may take its
//                 place |                       all ranks gone             |
//               Idle  <----------------------------------------------+
//   Failed: a worker died too often. Ended: the owner drops the job.
//
// Of a job that spans daemons each has a state of its own, of the ranks and workers of its node. It
// starts its workers when every other node has joined; when its last rank has detached it is
// Leaving until those of the other nodes have, because they may still need what this node holds.
// The step in flight is never dropped, since ranks of other nodes are in it: all ranks gone,
// successors take it up where it stands, and what they send twice counts once. A dead generation
// then stays dead: the job is Failed.
//
// Of a job with a data plane (`data_plane`) all ranks of a generation attach together, because its
// communicators are of all of them. A rank that dies, or gives its session up, ends the generation:
// the others get Aborted and attach again, from the same processes; once no rank is left in the
// dead generation the step in flight is dropped, and the next one forms. Where such a job spans
// daemons each of them is `parted` from the generation once its own ranks have left it; when all
// ranks of all nodes wait they agree on the number of the next one (GenerationAgreed), and the step
// in flight is dropped then.
//
// When a worker's GPU is lost with what it held, such a job goes back to the newest state that the
// mirrors of all workers have (`going_back`): the generation ends with Aborted, the worker is
// started again, and once all are ready each loads its mirror. Ranks form the next generation
// meanwhile, but are let in, and the step in flight is dropped, only after that. Without a mirror
// the job is Failed. Where it spans daemons they agree on that state, too, once all ranks of all
// nodes wait (GoBackAgreed), and on the next generation when the workers of all nodes have gone
// back.
//
// The generation rises with every change of the membership of a started job. A worker that dies is
// started again with the same memory, later each time; past kMaxRestarts in kRestartWindow, or when
// it gets stuck at one step again and again, the job fails. No function here does I/O, reads a
// clock, or knows a descriptor: the job host (server/job_host.h) carries the actions out and feeds
// what comes of them back as inputs. One thread: the decision thread.

#ifndef ZEROSHARD_SERVER_JOB_H_
#define ZEROSHARD_SERVER_JOB_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "storage/device_mirror.h"

namespace zeroshard {

// Time since some fixed moment (Clock::Elapsed).
using Instant = absl::Duration;

inline constexpr int kMaxRestarts = 5;
inline constexpr absl::Duration kRestartWindow = absl::Seconds(60);
// So often may a worker get stuck within kHangWindow while no step is committed.
inline constexpr int kMaxHangs = 2;
inline constexpr absl::Duration kHangWindow = absl::Minutes(10);

// What every rank of a job must agree on, as text so that a difference can be shown.
struct JobSpec {
  uint32_t world_size = 0;
  uint32_t local_ranks = 0;  // ranks that attach to this daemon
  bool forward_only = false;
  std::vector<std::string>
      parameters;                   // "w: float32[4,2], trainable, group 0, module fc", in order
  std::vector<std::string> config;  // "zero_optimization.stage = 3", sorted
  friend bool operator==(const JobSpec&, const JobSpec&) = default;
};

// What differs, or "" when nothing does: "world_size is 2 on rank 0 but 3 on rank 1". The names say
// whose the two specs are.
std::string Difference(const JobSpec& a, const std::string& a_name, const JobSpec& b,
                       const std::string& b_name);

struct JobLimits {
  absl::Duration rejoin_timeout = absl::Seconds(300);
  // What the workers do before they are ready, and how much longer ranks may wait for it.
  std::string first_work = "";  // "write files of 1.00 GiB"; empty: nothing that takes long
  absl::Duration first_work_time = absl::ZeroDuration();
};

enum class RankPhase { kAbsent, kWaiting, kAttached, kDead, kDetached };
enum class WorkerPhase { kNone, kStarting, kReady, kDead };
enum class JobPhase { kForming, kStarting, kReady, kIdle, kLeaving, kFailed, kEnded };

std::string JobPhaseName(JobPhase phase);
std::string RankPhaseName(RankPhase phase);
std::string WorkerPhaseName(WorkerPhase phase);

struct RankState {
  RankPhase phase = RankPhase::kAbsent;
  int64_t pid = 0;
  uint64_t attach_id = 0;  // the call that waits, or that attached the rank
  // kWaiting: of the call; kDead: for a successor.
  Instant deadline = absl::InfiniteDuration();
  bool keep = false;  // kDetached: asked to keep the job
};

struct WorkerState {
  WorkerPhase phase = WorkerPhase::kNone;
  uint32_t incarnation = 0;     // raised with every start
  bool was_ready = false;       // its memory may hold state
  std::vector<Instant> deaths;  // within the restart window
  std::vector<Instant> hangs;   // within the hang window, all at hung_step
  uint64_t hung_step = 0;
  Instant start_at;  // kDead: when to start it again
  uint32_t restarts = 0;
  std::string last_exit;  // how the predecessor ended
};

struct JobState {
  std::string name;
  JobSpec spec;
  JobLimits limits;
  JobPhase phase = JobPhase::kForming;
  bool started = false;     // has memory and workers
  bool ever_ready = false;  // may hold values that somebody wants back
  uint64_t generation = 0;
  uint64_t alive_since = 0;  // generation in which the job last was idle or started
  absl::Status poison;       // the generation is dead: every waiter got this error
  std::string reason;        // the sentence of the last decision
  std::vector<RankState> ranks;
  std::vector<WorkerState> workers;  // of this node
  // Of a job that spans daemons; else as they are here.
  bool spans = false;
  uint32_t first_rank = 0;                 // of this node, which has spec.local_ranks
  uint32_t first_worker = 0;               // of this node; inputs and actions count from 0
  std::vector<std::string> missing_nodes;  // "node 1 (10.0.0.2:7401)": not joined yet
  Instant leave_deadline = absl::InfiniteDuration();  // kLeaving: the others are waited for
  bool data_plane = false;                            // the death of a rank is everybody's
  bool parted = false;  // spans, data_plane: no rank here is in the last generation agreed upon
  // A GPU was lost: where the job goes back to, until all workers have.
  std::optional<MirrorPoint> going_back = std::nullopt;
  // spans: "device lost on worker 3", of this node, until its workers have gone back; else empty.
  std::string lost = "";
  uint64_t goes_back_as = 0;  // spans: the attempt that this commits
};

// A new job whose first rank is about to attach.
JobState NewJob(const std::string& name, const JobSpec& spec, uint32_t workers,
                const JobLimits& limits);

// Inputs.
struct AttachRequested {
  uint64_t attach_id = 0;
  uint32_t rank = 0;
  int64_t pid = 0;
  std::shared_ptr<const JobSpec> spec;
  Instant deadline;
  // Why this process gave up the session that it has as this rank; empty: it has none, or the
  // generation is dead. Data planes only.
  std::string gave_up = "";
  uint64_t step = 0;  // in flight, for messages; 0: unknown
};
struct AttachCancelled {  // the caller is gone or gave up
  uint64_t attach_id = 0;
  uint64_t step = 0;  // as above
};
struct RankGone {  // the process has ended
  uint32_t rank = 0;
  uint64_t attach_id = 0;
  uint64_t step = 0;  // as above
};
struct DetachRequested {
  uint32_t rank = 0;
  bool keep = false;
};
struct StartFailed {  // the memory or the workers could not be made
  absl::Status status;
};
struct WorkerReady {
  uint32_t worker = 0;
  uint32_t incarnation = 0;
};
struct WorkerDied {
  uint32_t worker = 0;
  uint32_t incarnation = 0;
  std::string reason;
  absl::Status fatal;  // not OK: the worker said itself that it cannot go on
  bool stuck = false;  // it was killed because it made no progress
  uint64_t step = 0;   // committed steps then
};
struct GenerationPoisoned {  // a worker found the ranks in disagreement, or one missing
  uint64_t generation = 0;
  absl::Status status;
  bool nodes_lost = false;  // it could not reach others for long
};
struct DeviceLost {  // the worker said so, and ends
  uint32_t worker = 0;
  uint32_t incarnation = 0;
  std::string why;
  std::optional<MirrorPoint> mirror;  // the newest that all workers have
  std::string advice;                 // without one
};
struct GoBackAgreed {  // by all daemons, whose ranks all waited; one of them had lost something
  MirrorPoint mirror;
  uint64_t committed_as = 0;
  std::string lost;
};
struct WentBack {};  // all workers of this node have
struct RemoveRequested {
  bool force = false;
};
struct NodesMissing {  // who has not joined yet
  std::vector<std::string> nodes;
};
struct NodesLeft {};       // the ranks of all other nodes have detached
struct GenerationAgreed {  // by all daemons, whose ranks all waited
  uint64_t generation = 0;
};
struct NodeLost {  // another daemon has no part of this job any more
  absl::Status status;
};
struct Tick {};  // time has passed

using JobInput =
    std::variant<AttachRequested, AttachCancelled, RankGone, DetachRequested, StartFailed,
                 WorkerReady, WorkerDied, GenerationPoisoned, DeviceLost, GoBackAgreed, WentBack,
                 RemoveRequested, NodesMissing, NodesLeft, GenerationAgreed, NodeLost, Tick>;

// Actions, carried out in order.
struct CreateJob {};  // plan, make all memory, then start every worker
struct StartWorker {
  uint32_t worker = 0;
  uint32_t incarnation = 0;
  bool recover = false;
};
struct AnnounceRank {  // tell the workers of an attached rank
  uint32_t rank = 0;
};
struct ReplyAttached {
  uint32_t rank = 0;
  uint64_t attach_id = 0;
  bool resumed = false;
};
struct FailAttach {
  uint64_t attach_id = 0;
  absl::Status status;
};
struct AnnounceRankDied {
  uint32_t rank = 0;
  std::string reason;
};
struct DropAttempt {};
struct PoisonGeneration {
  absl::Status status;
};
struct GoBack {  // every worker loads its mirror of that state
  MirrorPoint mirror;
  uint64_t committed_as = 0;  // 0: as the attempt in flight
};
struct EndJob {};  // stop the workers, free the memory, forget the job
struct RefuseRemove {
  absl::Status status;
};
struct EmitEvent {
  std::string kind;
  std::string text;
};

using JobAction =
    std::variant<CreateJob, StartWorker, AnnounceRank, ReplyAttached, FailAttach, AnnounceRankDied,
                 DropAttempt, PoisonGeneration, GoBack, EndJob, RefuseRemove, EmitEvent>;

struct JobDecision {
  JobState next;
  std::vector<JobAction> actions;
  std::string reason;  // one sentence for the log; "" when nothing changed
};

JobDecision Decide(const JobState& state, const JobInput& input, Instant now);

// When the job next needs a Tick; InfiniteDuration when only an input can change it.
Instant NextDeadline(const JobState& state);

// Whether all ranks of this node wait for a generation that the daemons have to agree upon.
bool WantsGeneration(const JobState& state);

// Ranks that are attached, or wait to be.
uint32_t PresentRanks(const JobState& state);

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_JOB_H_
