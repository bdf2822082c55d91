#include "server/job_host.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/checksum.h"
#include "base/futex.h"
#include "base/log.h"
#include "base/random_token.h"
#include "base/status.h"
#include "server/job_metrics.h"
#include "server/node_gpus.h"

namespace zeroshard {
namespace {

// Names are part of socket paths, which are short; a long one is replaced by its hash.
constexpr size_t kMaxFolderName = 16;

std::string SocketDir(const std::string& run_dir, const std::string& job) {
  const std::string folder =
      job.size() <= kMaxFolderName ? job : absl::StrFormat("%016x", Xxh3_64(job));
  return absl::StrCat(run_dir, "/jobs/", folder);
}

// How long ranks wait, beyond their own time, for files that are written before a job begins. A
// worker that does not get on is ended sooner.
constexpr double kSlowestDrive = 50e6;  // bytes a second
constexpr absl::Duration kLongestWriting = absl::Hours(1);

// 32 bytes, as the descriptor socket takes them.
std::string NewToken() {
  const std::string digits = RandomToken();
  return absl::HexStringToBytes(absl::string_view(digits));
}

trainer::v1::Region::Kind RegionKind(internal::v1::WorkerRegion::Kind kind) {
  switch (kind) {
    case internal::v1::WorkerRegion::KIND_PARAMETER_WINDOW:
      return trainer::v1::Region::KIND_PARAMETER_WINDOW;
    case internal::v1::WorkerRegion::KIND_GRADIENT_WINDOW:
      return trainer::v1::Region::KIND_GRADIENT_WINDOW;
    case internal::v1::WorkerRegion::KIND_DEVICE_SHARED:
      return trainer::v1::Region::KIND_DEVICE_SHARED;
    case internal::v1::WorkerRegion::KIND_DEVICE_COUNTERS:
      return trainer::v1::Region::KIND_DEVICE_COUNTERS;
    default:
      return trainer::v1::Region::KIND_RANK_PAGE;
  }
}

std::optional<PowerJob> LostJob(const HostEnvironment& environment, const std::string& name,
                                const JobPlan& plan) {
  if (environment.power == nullptr || !IsPowerJob(plan)) return std::nullopt;
  const PowerJob* const lost = environment.power->Find(name);
  if (lost == nullptr) return std::nullopt;
  return *lost;
}

}  // namespace

JobHost::JobHost(const HostEnvironment& environment, const std::string& name,
                 std::shared_ptr<const JobSpec> spec, std::shared_ptr<const JobPlan> plan)
    : environment_(environment),
      loop_(*environment.loop),
      lost_(LostJob(environment, name, *plan)),
      job_id_(lost_.has_value() ? lost_->job_id : RandomId()),
      plan_(std::move(plan)),
      watch_(WorkerWatch::BoundFor(environment.config->collective_timeout),
             plan_->placement.workers) {
  JobLimits limits;
  limits.rejoin_timeout = environment.config->rejoin_timeout;
  if (const uint64_t bytes = plan_->nvme_total(); bytes > 0) {
    limits.first_work = absl::StrCat(lost_.has_value() ? "read" : "write", " files of ",
                                     HumanBytes(bytes), " for the NVMe tier");
    limits.first_work_time =
        std::min(kLongestWriting, absl::Seconds(static_cast<double>(bytes) / kSlowestDrive));
  }
  const Placement& placement = plan_->placement;
  state_ = NewJob(name, *spec, placement.workers, limits);
  state_.spans = placement.spans();
  state_.data_plane = data_plane();
  state_.first_rank = placement.first_rank();
  state_.first_worker = placement.first_worker();
  for (uint32_t node = 0; placement.spans() && node < placement.nodes; ++node) {
    if (node == placement.node) continue;
    state_.missing_nodes.push_back(environment.config->cluster.NodeName(node));
  }
  ranks_.resize(spec->world_size);
  workers_.resize(placement.workers);
}

JobHost::~JobHost() {
  if (timer_) loop_.Cancel(*timer_);
  if (watch_timer_) loop_.Cancel(*watch_timer_);
  for (uint32_t r = 0; r < ranks_.size(); ++r) ForgetRank(r);
}

void JobHost::Attach(AttachCall call) {
  if (absl::Status device = CheckDevice(call); !device.ok()) return call.done(device);
  AttachRequested input;
  input.attach_id = call.id;
  input.rank = call.rank;
  input.pid = call.peer.pid;
  input.spec = call.spec;
  input.deadline = call.deadline;
  input.gave_up = call.gave_up;
  input.step = StepInFlight();
  if (call.nvme != nullptr && !state_.started) admission_ = call.nvme;
  calls_.emplace(call.id, std::move(call));
  Feed(std::move(input));
}

void JobHost::CancelAttach(uint64_t attach_id) { Feed(AttachCancelled{attach_id, StepInFlight()}); }

void JobHost::NoticeDeath(uint32_t rank) {
  if (rank >= state_.ranks.size()) return;
  const uint64_t attach_id = state_.ranks[rank].attach_id;
  const auto waiting = calls_.find(attach_id);
  const Peer& peer = waiting != calls_.end() ? waiting->second.peer : ranks_[rank].peer;
  if (!peer.pidfd.valid()) return;
  pollfd ended = {peer.pidfd.get(), POLLIN, 0};
  if (poll(&ended, 1, 0) == 1) Feed(RankGone{rank, attach_id, StepInFlight()});
}

void JobHost::NoticeDeaths() {
  for (uint32_t rank = 0; rank < state_.ranks.size(); ++rank) NoticeDeath(rank);
}

absl::StatusOr<uint32_t> JobHost::RankOfToken(const std::string& token) const {
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (!ranks_[r].token.empty() && ConstantTimeEquals(ranks_[r].token, token)) return r;
  }
  return absl::PermissionDeniedError(absl::StrCat("the token belongs to no attached rank of job '",
                                                  state_.name, "'; attach first"));
}

absl::Status JobHost::Detach(uint32_t rank, const std::string& token, bool keep) {
  ZS_ASSIGN_OR_RETURN(const uint32_t holder, RankOfToken(token));
  if (holder != rank) {
    return absl::PermissionDeniedError(
        absl::StrCat("the token is that of rank ", holder, ", not of rank ", rank));
  }
  Feed(DetachRequested{rank, keep});
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> JobHost::Remove(bool force) {
  const uint64_t bytes = MemoryHeld();
  remove_refusal_ = absl::OkStatus();
  Feed(RemoveRequested{force});
  if (!remove_refusal_.ok()) return remove_refusal_;
  return bytes;
}

// Inputs that come up while one is handled wait for their turn.
void JobHost::Feed(JobInput input) {
  inputs_.push_back(std::move(input));
  if (feeding_) return;
  feeding_ = true;
  while (!inputs_.empty()) {
    const JobInput next = std::move(inputs_.front());
    inputs_.pop_front();
    Step(next);
  }
  feeding_ = false;
  ArmTimer();
}

void JobHost::Step(const JobInput& input) {
  const std::string before = state_.reason;
  const uint64_t generation = state_.generation;
  const JobPhase phase = state_.phase;
  JobDecision decision = Decide(state_, input, loop_.Now());
  state_ = std::move(decision.next);
  if (!decision.reason.empty() && decision.reason != before) {
    LogInfo(absl::StrCat("job ", state_.name, " is ", JobPhaseName(state_.phase), ": ",
                         decision.reason));
  }
  if (state_.generation != generation && state_.ever_ready) {
    records::v1::JournalRecord record;
    record.mutable_generation_raised()->set_job(state_.name);
    record.mutable_generation_raised()->set_generation(state_.generation);
    record.mutable_generation_raised()->set_reason(state_.reason);
    environment_.journal(std::move(record));
  }
  for (const JobAction& action : decision.actions) {
    std::visit([this](const auto& a) { Do(a); }, action);
  }
  if (state_.phase == JobPhase::kLeaving && phase != JobPhase::kLeaving) {
    keeps_store() ? CheckAllLeft() : AskToJoin();
  }
  const bool over = state_.phase == JobPhase::kFailed || state_.phase == JobPhase::kEnded;
  if (over && state_.phase != phase && phase != JobPhase::kLeaving) {
    TellFailed(loop_.Now() + environment_.config->rejoin_timeout);
  }
  if (!regrouping_ && WantsGeneration(state_)) Regroup();
  if (environment_.metrics != nullptr && state_.started && !ended()) {
    environment_.metrics->SetRanks(state_.name, PresentRanks(state_), state_.generation);
  }
}

void JobHost::ArmTimer() {
  if (timer_) loop_.Cancel(*timer_);
  timer_.reset();
  const Instant next =
      std::min({NextDeadline(state_), store_.Expire(loop_.Now()), rendezvous_.Expire(loop_.Now())});
  if (next == absl::InfiniteDuration() || ended()) return;
  timer_ = loop_.At(next, [this] {
    timer_.reset();
    Feed(Tick{});
  });
}

absl::Status JobHost::CreateEverything() {
  ZS_RETURN_IF_ERROR(PlaceOnDevices());
  ZS_ASSIGN_OR_RETURN(const NodeMemory node, ReadNodeMemory());
  ZS_RETURN_IF_ERROR(CheckMemory(state_.name, *plan_, node, environment_.config->host_memory_limit,
                                 environment_.memory_in_use()));
  const bool others = !environment_.config->allow_uids.empty();
  JobRegions::Options options;
  ZS_RETURN_IF_ERROR(ReserveNvme());
  options.job = state_.name;
  options.job_id = job_id_;
  options.socket_dir = SocketDir(environment_.config->run_dir, state_.name);
  options.directory_mode = others ? 0755 : 0750;
  options.socket_mode = others ? 0666 : 0660;
  ZS_ASSIGN_OR_RETURN(JobRegions regions, JobRegions::Create(*plan_, options));
  regions_.emplace(std::move(regions));
  return absl::OkStatus();
}

void JobHost::SpawnWorkers() {
  spawned_ = true;
  for (uint32_t w = 0; w < workers_.size(); ++w) {
    const absl::Status status = Spawn(w, state_.workers[w].incarnation, /*recover=*/false);
    if (!status.ok()) return inputs_.push_back(StartFailed{status});
  }
  WatchWorkers();
}

void JobHost::Do(const CreateJob&) {
  if (absl::Status status = CreateEverything(); !status.ok()) {
    inputs_.push_back(StartFailed{status});
    return;
  }
  if (environment_.metrics != nullptr) environment_.metrics->SetLedger(state_.name, *plan_);
  records::v1::JournalRecord record;
  records::v1::JobCreated& created = *record.mutable_job_created();
  created.set_job(state_.name);
  created.set_job_id(job_id_);
  created.set_world_size(state_.spec.world_size);
  created.set_local_ranks(state_.spec.local_ranks);
  *created.mutable_manifest() = plan_->manifest;
  *created.mutable_config() = plan_->config;
  for (const auto& worker : plan_->workers) created.add_worker_devices(worker.device());
  created.set_layout_fingerprint(plan_->layout.front().fingerprint());
  created.set_scheduler(plan_->scheduler);
  RememberJob(created);
  environment_.journal(std::move(record));
  if (!plan_->placement.spans()) return SpawnWorkers();
  if (!keeps_store()) AskToJoin();
}

void JobHost::Do(const StartWorker& action) {
  if (environment_.metrics != nullptr) {
    environment_.metrics->CountRestart(state_.name, Global(action.worker));
  }
  const absl::Status status = Spawn(action.worker, action.incarnation, action.recover);
  if (status.ok()) return;
  inputs_.push_back(WorkerDied{action.worker, action.incarnation,
                               absl::StrCat("could not be started: ", status.message()),
                               absl::OkStatus()});
}

void JobHost::Do(const AnnounceRank& action) {
  const uint64_t attach_id = state_.ranks[action.rank].attach_id;
  if (const auto call = calls_.find(attach_id); call != calls_.end()) {
    Rank& rank = ranks_[action.rank];
    rank.peer = std::move(call->second.peer);
    rank.token = NewToken();
    rank.generation = state_.generation;
    RankPage& page = regions_->rank_page(action.rank);
    page.generation.store(rank.generation, std::memory_order_release);
    page.reason_code.store(0, std::memory_order_relaxed);
    page.poisoned.store(0, std::memory_order_release);
    const int pidfd = rank.peer.pidfd.get();
    const absl::Status watched = loop_.Watch(pidfd, [this, r = action.rank, attach_id, pidfd] {
      loop_.Unwatch(pidfd);
      Feed(RankGone{r, attach_id, StepInFlight()});
    });
    if (!watched.ok()) LogWarn(absl::StrCat("rank ", action.rank, ": ", watched.message()));
  }
  SendToWorkers(AttachedMessage(action.rank));
  JournalRank(action.rank, records::v1::RankChanged::STATE_ATTACHED);
}

void JobHost::JournalRank(uint32_t rank, records::v1::RankChanged::State state) {
  records::v1::JournalRecord record;
  record.mutable_rank_changed()->set_job(state_.name);
  record.mutable_rank_changed()->set_rank(rank);
  record.mutable_rank_changed()->set_state(state);
  record.mutable_rank_changed()->set_generation(state_.generation);
  environment_.journal(std::move(record));
}

trainer::v1::AttachReply JobHost::MakeReply(uint32_t rank, bool resumed) const {
  trainer::v1::AttachReply reply;
  reply.set_token(ranks_[rank].token);
  reply.set_generation(ranks_[rank].generation);
  reply.set_worker_socket(regions_->socket_path(plan_->ranks[rank].home_worker()));
  reply.set_descriptor_socket(environment_.descriptor_socket);
  for (const JobRegions::RankRegion& region : regions_->ForRank(*plan_, rank)) {
    trainer::v1::Region& out = *reply.add_regions();
    out.set_kind(RegionKind(region.kind));
    out.set_bytes(region.bytes);
  }
  reply.set_layout_fingerprint(plan_->layout.front().fingerprint());
  *reply.mutable_config() = plan_->config;
  for (const std::string& warning : plan_->warnings) reply.add_warnings(warning);
  reply.set_scheduler(plan_->scheduler);
  reply.set_resumed(resumed || (resume_.has_value() && !resume_->fresh()));
  for (const model::v1::LedgerLine& line : plan_->ledger) *reply.add_ledger() = line;
  if (data_plane()) *reply.mutable_device() = DeviceOf(plan_->ranks[rank].home_worker());
  reply.set_node(plan_->placement.node);
  return reply;
}

void JobHost::Do(const ReplyAttached& action) {
  const auto it = calls_.find(action.attach_id);
  if (it == calls_.end()) return;
  const auto done = std::move(it->second.done);
  calls_.erase(it);
  done(MakeReply(action.rank, action.resumed));
}

void JobHost::Do(const FailAttach& action) {
  const auto it = calls_.find(action.attach_id);
  if (it == calls_.end()) return;
  const auto done = std::move(it->second.done);
  calls_.erase(it);
  done(action.status);
}

void JobHost::ForgetRank(uint32_t r) {
  Rank& rank = ranks_[r];
  if (rank.peer.pidfd.valid()) loop_.Unwatch(rank.peer.pidfd.get());
  rank = Rank{};
}

void JobHost::Do(const AnnounceRankDied& action) {
  ForgetRank(action.rank);
  internal::v1::ToWorker message;
  message.mutable_rank_died()->set_rank(action.rank);
  message.mutable_rank_died()->set_generation(state_.generation);
  message.mutable_rank_died()->set_reason(action.reason);
  SendToWorkers(message);
  const RankPhase phase = state_.ranks[action.rank].phase;
  JournalRank(action.rank, phase == RankPhase::kDetached ? records::v1::RankChanged::STATE_DETACHED
                                                         : records::v1::RankChanged::STATE_DEAD);
  // One that waits has attached again.
  if (phase == RankPhase::kDead && environment_.metrics != nullptr) {
    environment_.metrics->CountRankDeath(state_.name);
  }
}

void JobHost::Do(const DropAttempt&) {
  EndGeneration(absl::AbortedError(absl::StrCat("the ranks of job '", state_.name, "' ended")));
  internal::v1::ToWorker message;
  message.mutable_drop_attempt()->set_generation(state_.alive_since);
  SendToWorkers(message);
}

void JobHost::Do(const PoisonGeneration& action) {
  internal::v1::ToWorker message;
  message.mutable_poison()->set_generation(state_.generation);
  message.mutable_poison()->set_code(static_cast<uint32_t>(action.status.code()));
  message.mutable_poison()->set_message(std::string(action.status.message()));
  SendToWorkers(message);
  // Whoever waits in its page wakes up, also when its worker is not there to tell it.
  for (uint32_t r = 0; regions_ && r < ranks_.size(); ++r) {
    if (!plan_->placement.has_rank(r)) continue;
    RankPage& page = regions_->rank_page(r);
    if (page.reason_code.load(std::memory_order_relaxed) == 0) {
      page.reason[action.status.message().copy(page.reason, kReasonBytes - 1)] = 0;
      page.reason_code.store(static_cast<uint32_t>(action.status.raw_code()),
                             std::memory_order_release);
    }
    page.poisoned.store(1, std::memory_order_release);
    page.wake.fetch_add(1, std::memory_order_acq_rel);
    FutexWakeAll(page.wake);
  }
  EndGeneration(action.status);
  AbandonShards(action.status);
}

void JobHost::Do(const EndJob&) {
  AbandonShards(absl::CancelledError(absl::StrCat("job '", state_.name, "' has ended")));
  internal::v1::ToWorker stop;
  stop.mutable_stop();
  SendToWorkers(stop);
  for (Worker& worker : workers_) {
    if (!worker.process) continue;
    loop_.Unwatch(worker.process->link.get());
    loop_.Unwatch(worker.process->pidfd.get());
    environment_.retire(std::move(*worker.process));
    worker.process.reset();
  }
  store_.FailWaiters(absl::NotFoundError(absl::StrCat("job '", state_.name, "' has ended")));
  rendezvous_.FailWaiters(absl::AbortedError(absl::StrCat("job '", state_.name, "' has ended")));
  for (uint32_t r = 0; r < ranks_.size(); ++r) ForgetRank(r);
  KeepOrForget();
  if (state_.started && !for_now_) {
    records::v1::JournalRecord record;
    record.mutable_job_ended()->set_job(state_.name);
    record.mutable_job_ended()->set_reason(state_.reason);
    environment_.journal(std::move(record));
  }
  for (const auto& watcher : watchers_) {
    if (auto queue = watcher.lock()) queue->Close();
  }
  for (const auto& [device, bytes] : GpuHeld()) environment_.gpus->SetFree(device, std::nullopt);
  regions_.reset();
  nvme_.reset();  // files go when the last worker has been reaped
  if (environment_.metrics != nullptr) environment_.metrics->Remove(state_.name);
  if (environment_.drives != nullptr) environment_.drives->Remove(state_.name);
}

void JobHost::Do(const RefuseRemove& action) { remove_refusal_ = action.status; }

void JobHost::Do(const EmitEvent& action) {
  trainer::v1::WatchEvent event;
  event.set_generation(state_.generation);
  event.set_kind(action.kind);
  event.set_text(action.text);
  event.set_step(regions_ ? regions_->board().numbers().step : 0);
  std::erase_if(watchers_, [](const auto& watcher) { return watcher.expired(); });
  for (const auto& watcher : watchers_) {
    if (auto queue = watcher.lock()) queue->Push(event);
  }
}

void JobHost::AddWatcher(std::shared_ptr<EventQueue> queue) { watchers_.push_back(queue); }

}  // namespace zeroshard
