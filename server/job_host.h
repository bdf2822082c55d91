// JobHost: one job with everything it owns in this process: its state machine, memory, workers,
// ranks.
//
// The host feeds inputs to Decide (server/job.h), carries the actions out, and turns what the
// operating system reports (a pidfd, a link, a timer) into the next inputs. It lives on the
// decision thread; every method is called there, and callbacks are called there. Workers and
// trainers may die at any instant; the memory stays until the job ends.

#ifndef ZEROSHARD_SERVER_JOB_HOST_H_
#define ZEROSHARD_SERVER_JOB_HOST_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/admin.pb.h"
#include "proto/internal.pb.h"
#include "proto/trainer.pb.h"
#include "server/event_queue.h"
#include "server/host_environment.h"
#include "server/job.h"
#include "server/job_regions.h"
#include "server/kv_store.h"
#include "server/planner.h"
#include "server/power_jobs.h"
#include "server/tier_use.h"
#include "server/worker_process.h"
#include "server/worker_watch.h"

namespace zeroshard {

class JobHost {
 public:
  JobHost(const HostEnvironment& environment, const std::string& name,
          std::shared_ptr<const JobSpec> spec, std::shared_ptr<const JobPlan> plan);
  ~JobHost();
  JobHost(const JobHost&) = delete;
  JobHost& operator=(const JobHost&) = delete;

  void Attach(AttachCall call);
  void CancelAttach(uint64_t attach_id);
  // Looks whether the process that holds the rank is dead: its successor's Attach may be read
  // before the kernel's word of it.
  void NoticeDeath(uint32_t rank);
  // The same of all ranks: with a data plane a survivor may notice a death first.
  void NoticeDeaths();
  absl::Status Detach(uint32_t rank, const std::string& token, bool keep);
  // FailedPrecondition while ranks are attached, unless forced. Returns the bytes that were freed.
  absl::StatusOr<uint64_t> Remove(bool force);
  // Ends the job with the daemon, or instead of a failed one; what survives that is kept.
  void EndForNow();

  // The rank that holds `token`; PermissionDenied when nobody does.
  absl::StatusOr<uint32_t> RankOfToken(const std::string& token) const;
  struct Granted {
    std::vector<int> fds;  // owned by the host
  };
  // The descriptors of a rank, for the descriptor socket.
  std::optional<Granted> Descriptors(const std::string& token) const;

  // Sends a command with one descriptor to every worker and gathers their answers, in order of
  // worker. Only while ready or idle, one at a time. A worker's death or failure fails the whole.
  using ShardAnswers = absl::StatusOr<std::vector<internal::v1::ShardDone>>;
  struct ShardCommand {
    std::string what;  // "save ckpt-1", for messages
    internal::v1::ToWorker message;
    UniqueFd fd;
  };
  void RunOnShards(ShardCommand command, std::function<void(ShardAnswers)> done);
  // Gives up waiting; the workers' late answers are dropped.
  void AbandonShards(const absl::Status& status);

  // Moves states of this node's workers between tiers (job_host_tiers.cc).
  absl::StatusOr<admin::v1::MoveStatesReply> MoveStates(
      const admin::v1::MoveStatesRequest& request);

  // The key-value store of the generation, for the ranks' data planes (job_host_gpu.cc).
  void Rendezvous(const trainer::v1::RendezvousRequest& request, KvStore::Done done);
  // Device memory that the job may take, by device; nothing before it started.
  std::map<std::string, uint64_t> GpuHeld() const;

  // A checkpoint of this job was written; named as what to do when its states are lost.
  void NoteCheckpoint(const std::string& name, uint64_t step);

  void AddWatcher(std::shared_ptr<EventQueue> queue);

  // What other nodes say of a job that spans daemons; only node 0 hears it (job_host_cluster.cc).
  absl::StatusOr<cluster::v1::JoinReply> OnJoin(const cluster::v1::JoinRequest& request);
  absl::Status OnSetKey(const cluster::v1::SetKeyRequest& request);
  void OnGetKey(const cluster::v1::GetKeyRequest& request, KvStore::Done done);

  bool ended() const { return state_.phase == JobPhase::kEnded; }
  const JobState& state() const { return state_; }
  const JobPlan& plan() const { return *plan_; }
  std::shared_ptr<const JobPlan> shared_plan() const { return plan_; }
  uint64_t job_id() const { return job_id_; }
  // The step in flight; 0 before the job started.
  uint64_t Attempt() const { return regions_ ? regions_->board().attempt() : 0; }
  // Bytes of memory that the job may use, and that it does use now; 0 before it started.
  uint64_t MemoryHeld() const;
  uint64_t MemoryTouched() const;
  admin::v1::JobSummary Summary() const;
  admin::v1::GetJobReply View() const;

 private:
  struct Rank {
    std::string token;  // 32 bytes; empty when nobody is attached
    Peer peer;
    uint64_t generation = 0;
  };
  struct Worker {
    std::optional<WorkerProcess> process;
    absl::Status fatal;
    internal::v1::Stats stats;   // of the running incarnation
    internal::v1::Stats before;  // sums over the dead ones
    uint64_t messages = 0;       // received
    uint32_t file_commands = 0;  // that the running incarnation has not answered
    uint64_t went_back = 0;      // the last GoBack that the running incarnation has answered
    std::string stuck;           // why the running incarnation is being killed
    std::shared_ptr<const IoHolder> io;
    TierHistory tier;
  };
  // Another node of this job, as node 0 knows it.
  struct Member {
    uint64_t instance = 0;
    bool left = false;
    // Data planes: all ranks there wait for this round, as of the last time it was said.
    uint64_t round = 0;
    uint64_t generation = 0;
    Instant asked_at = -absl::InfiniteDuration();
    std::string lost = "";
    std::vector<MirrorPoint> mirrors = {};
    uint64_t attempt = 0;
  };
  struct ShardOperation {
    uint64_t request = 0;
    std::string what;
    std::vector<std::optional<internal::v1::ShardDone>> answers;
    std::function<void(ShardAnswers)> done;
  };

  // The state machine (job_host.cc).
  void Feed(JobInput input);
  void Step(const JobInput& input);
  void ArmTimer();
  void Do(const CreateJob&);
  void Do(const StartWorker& action);
  void Do(const AnnounceRank& action);
  void Do(const ReplyAttached& action);
  void Do(const FailAttach& action);
  void Do(const AnnounceRankDied& action);
  void Do(const DropAttempt&);
  void Do(const PoisonGeneration& action);
  void Do(const GoBack& action);
  void Do(const EndJob&);
  void Do(const RefuseRemove& action);
  void Do(const EmitEvent& action);
  trainer::v1::AttachReply MakeReply(uint32_t rank, bool resumed) const;
  void ForgetRank(uint32_t rank);
  void JournalRank(uint32_t rank, records::v1::RankChanged::State state);
  absl::Status CreateEverything();
  void SpawnWorkers();

  // Other nodes (job_host_cluster.cc). A job that spans daemons starts its workers when all have
  // joined; the daemon of node 0 keeps count and keeps the store.
  bool keeps_store() const { return plan_->placement.node == 0; }
  cluster::v1::Member Self() const;
  cluster::v1::JoinRequest MyJoin() const;
  std::string DifferenceTo(const cluster::v1::JoinRequest& request) const;
  absl::Status CheckMember(const cluster::v1::Member& member);
  std::vector<uint32_t> NodesMissing() const;
  void OnNodesMissing(const std::vector<uint32_t>& missing);
  void CheckAllLeft();
  void AskToJoin();
  void AskAgain();
  void OnJoinReply(const absl::StatusOr<cluster::v1::JoinReply>& reply);
  void ForwardStore(uint32_t w, const internal::v1::StoreRequest& request, KvStore::Done done);
  // The next generation of a job with a data plane (job_host_regroup.cc); Regroup calls itself
  // again.
  void Regroup();
  void AddRound(cluster::v1::JoinRequest& request) const;
  void CheckRound();
  void AgreeToGoBack(const std::string& lost);
  absl::StatusOr<cluster::v1::JoinReply> OnRound(const cluster::v1::JoinRequest& request);
  void OnRoundReply(const absl::StatusOr<cluster::v1::JoinReply>& reply);
  // To node 0, when this node's part is over before its time; calls itself again until `end`.
  void TellFailed(Instant end);
  void ForwardRendezvous(uint32_t rank, const trainer::v1::RendezvousRequest& request,
                         KvStore::Done done);
  absl::Status SetRendezvousKey(const std::string& key, const std::string& value);
  // The store that a key of another node's belongs to, and the key there.
  absl::StatusOr<std::pair<KvStore*, std::string>> StoreOf(const std::string& key);

  // GPUs (job_host_gpu.cc).
  bool data_plane() const { return plan_->config.data_plane(); }
  absl::Status CheckDevice(const AttachCall& call) const;
  absl::Status PlaceOnDevices();
  model::v1::Device DeviceOf(uint32_t w) const;
  std::string CoresOf(uint32_t w) const;
  void OnDeviceRegions(uint32_t w, const internal::v1::DeviceRegions& message,
                       std::vector<UniqueFd> fds);
  bool HasDevice(uint32_t w);
  absl::Status CheckGpuRoom(const std::vector<uint32_t>& units) const;
  void EndGeneration(const absl::Status& status);
  // Mirrors of device memory (job_host_mirror.cc).
  void OnDeviceLost(uint32_t w, uint32_t incarnation, const internal::v1::DeviceLost& message);
  void OnWentBack(uint32_t w, const internal::v1::WentBack& message);
  // States that the mirrors of all workers of this node hold, and that may be gone back to.
  std::vector<MirrorPoint> CommonMirrors() const;
  // The step in flight, for messages; 0 before the job started.
  uint64_t StepInFlight() const { return regions_ ? regions_->board().numbers().step + 1 : 0; }

  // Tiers (job_host_tiers.cc).
  absl::Status ReserveNvme();
  // Jobs that survive the daemon (job_host_power.cc).
  void KeepOrForget();
  void RememberJob(records::v1::JobCreated& created);
  void OnPowerStates(uint32_t w, const internal::v1::PowerStates& states);
  void SendResume(uint32_t w);
  void DescribeTiers(internal::v1::WorkerStart& start) const;
  absl::StatusOr<std::vector<uint32_t>> ChooseUnits(
      const admin::v1::MoveStatesRequest& request) const;
  void SendMoves(uint32_t w);
  bool Moving() const;
  std::string Bottleneck() const;

  // Workers (job_host_workers.cc), of this node and counted from 0.
  uint32_t Global(uint32_t w) const { return plan_->placement.first_worker() + w; }
  absl::Status Spawn(uint32_t w, uint32_t incarnation, bool recover);
  absl::Status SendStart(uint32_t w, bool recover);
  void SendToWorker(uint32_t w, const internal::v1::ToWorker& message, int fd = -1);
  void SendToWorkers(const internal::v1::ToWorker& message);
  void OnLink(uint32_t w, uint32_t incarnation);
  bool ReceiveFrom(uint32_t w, uint32_t incarnation);
  void OnWorkerMessage(uint32_t w, uint32_t incarnation, const internal::v1::FromWorker& message,
                       std::vector<UniqueFd> fds);
  void OnStore(uint32_t w, uint32_t incarnation, const internal::v1::StoreRequest& request);
  void OnStats(uint32_t w, const internal::v1::Stats& stats);
  void OnShardDone(uint32_t w, const internal::v1::ShardDone& done);
  void OnWorkerExit(uint32_t w, uint32_t incarnation);
  // Kills workers that make no progress (job_host_watch.cc); calls itself again.
  void WatchWorkers();
  void EndStuckWorker(uint32_t w);
  internal::v1::ToWorker AttachedMessage(uint32_t rank) const;

  // Constant after construction.
  const HostEnvironment environment_;
  EventLoop& loop_;
  const std::optional<PowerJob> lost_;  // the earlier job that this one goes on with
  const uint64_t job_id_;

  std::shared_ptr<const JobPlan> plan_;  // replaced when states are moved
  uint64_t move_rate_ = 0;               // bytes a second of each worker; 0: no bound
  JobState state_;
  std::deque<JobInput> inputs_;
  bool feeding_ = false;
  std::optional<uint64_t> timer_;
  std::map<uint64_t, AttachCall> calls_;            // by attach id, while they wait
  std::shared_ptr<const NvmeAdmission> admission_;  // of the last attach; until the job starts
  std::shared_ptr<const NvmeLease> nvme_;           // shared with the workers' processes
  std::map<std::string, std::string> io_devices_;   // by path of the NVMe tier: NodeIo::AddPath
  std::optional<JobRegions> regions_;
  std::vector<Rank> ranks_;
  std::vector<Worker> workers_;
  std::optional<ShardOperation> operation_;
  uint64_t next_request_ = 1;
  uint64_t go_back_ = 0;  // the last GoBack
  uint64_t times_gone_back_ = 0;
  uint64_t went_back_as_ = 0;    // the attempt that committed it the last time
  std::string last_checkpoint_;  // "ckpt-1 (step 30)"; empty: none
  absl::Status remove_refusal_;
  KvStore store_;
  KvStore rendezvous_;    // of the generation
  bool spawned_ = false;  // the workers were started
  bool for_now_ = false;  // EndForNow
  // What the workers of a lost job found, and where they go on.
  std::vector<std::optional<internal::v1::PowerStates>> remains_;
  std::optional<internal::v1::ResumeJob> resume_;
  WorkerWatch watch_;
  std::optional<uint64_t> watch_timer_;
  std::map<uint32_t, Member> members_;  // by node; node 0 only
  // Of a job with a data plane: the generations that the daemons have agreed on after the first.
  uint64_t round_ = 0;                       // how many, and how often that they go back instead
  uint64_t agreed_ = 0;                      // the last
  std::optional<GoBackAgreed> agreed_back_;  // the last; the last round ended so if agreed_ is 0
  bool regrouping_ = false;
  uint64_t keeper_ = 0;  // the instance on node 0, once known
  // Answers that come after the host has gone find it expired.
  const std::shared_ptr<const bool> alive_ = std::make_shared<const bool>(true);
  std::vector<std::weak_ptr<EventQueue>> watchers_;
  uint64_t last_step_ = 0;
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_JOB_HOST_H_
