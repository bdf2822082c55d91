// The part of JobHost that talks to workers.
#include <csignal>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status.h"
#include "proto/worker_link.h"
#include "server/job_host.h"
#include "server/job_metrics.h"
#include "server/node_gpus.h"

namespace zeroshard {
namespace {

using internal::v1::FromWorker;
using internal::v1::ToWorker;

// A worker that does not read its link for this long is replaced: the decision thread waits no
// longer.
constexpr absl::Duration kSendTimeout = absl::Seconds(1);
constexpr absl::Duration kStartTimeout = absl::Seconds(5);
// The packets of one message come right after one another.
constexpr absl::Duration kReceiveTimeout = absl::Seconds(1);
// A worker that closed its link gets this long to end by itself.
constexpr absl::Duration kLingerTime = absl::Seconds(2);

// The status that a worker sent; a code that is none, or OK, is the worker's bug.
absl::Status SentStatus(uint32_t code, const std::string& message) {
  const bool known = code > 0 && code <= static_cast<uint32_t>(absl::StatusCode::kUnauthenticated);
  return absl::Status(known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kInternal,
                      message);
}

void SumCounters(internal::v1::Stats& sum, const internal::v1::Stats& more) {
  sum.set_gather_elements(sum.gather_elements() + more.gather_elements());
  sum.set_persistent_gather_elements(sum.persistent_gather_elements() +
                                     more.persistent_gather_elements());
  sum.set_scatter_elements(sum.scatter_elements() + more.scatter_elements());
  sum.set_step_gather_elements(sum.step_gather_elements() + more.step_gather_elements());
  sum.set_wire_bytes(sum.wire_bytes() + more.wire_bytes());
  sum.set_copied_bytes(sum.copied_bytes() + more.copied_bytes());
  sum.set_prefetch_hits(sum.prefetch_hits() + more.prefetch_hits());
  sum.set_prefetch_misses(sum.prefetch_misses() + more.prefetch_misses());
  sum.set_gpu_busy_us(sum.gpu_busy_us() + more.gpu_busy_us());
  sum.set_gpu_mirror_us(sum.gpu_mirror_us() + more.gpu_mirror_us());
  sum.set_nvme_retries(sum.nvme_retries() + more.nvme_retries());
  sum.set_nvme_damaged_images(sum.nvme_damaged_images() + more.nvme_damaged_images());
  sum.set_nvme_rebuilt_images(sum.nvme_rebuilt_images() + more.nvme_rebuilt_images());
  sum.set_gpu_damaged_mirrors(sum.gpu_damaged_mirrors() + more.gpu_damaged_mirrors());
  sum.set_nvme_failed_slots(sum.nvme_failed_slots() + more.nvme_failed_slots());
  for (int p = 0; p < more.nvme_paths_size(); ++p) {
    internal::v1::NvmePathStats& path =
        p < sum.nvme_paths_size() ? *sum.mutable_nvme_paths(p) : *sum.add_nvme_paths();
    path.set_read_bytes(path.read_bytes() + more.nvme_paths(p).read_bytes());
    path.set_written_bytes(path.written_bytes() + more.nvme_paths(p).written_bytes());
  }
}

}  // namespace

absl::Status JobHost::Spawn(uint32_t w, uint32_t incarnation, bool recover) {
  WorkerCommand command;
  command.binary = environment_.worker_binary;
  command.job = state_.name;
  command.worker = Global(w);
  command.incarnation = incarnation;
  CoreHolder cores;
  if (environment_.cores != nullptr) {
    ZS_ASSIGN_OR_RETURN(cores, environment_.cores->Add(CoresOf(w)));
  }
  ZS_ASSIGN_OR_RETURN(WorkerProcess process, SpawnWorker(command));
  process.cores = std::move(cores);
  Worker& worker = workers_[w];
  if (environment_.io != nullptr && nvme_ != nullptr && worker.io == nullptr) {
    ZS_ASSIGN_OR_RETURN(worker.io, environment_.io->Add(state_.name, Global(w)));
  }
  process.room = std::make_shared<
      std::pair<std::shared_ptr<const NvmeLease>, std::shared_ptr<const IoHolder>>>(nvme_,
                                                                                    worker.io);
  worker.process.emplace(std::move(process));
  worker.fatal = absl::OkStatus();
  ZS_RETURN_IF_ERROR(
      loop_.Watch(worker.process->link.get(), [this, w, incarnation] { OnLink(w, incarnation); }));
  ZS_RETURN_IF_ERROR(loop_.Watch(worker.process->pidfd.get(),
                                 [this, w, incarnation] { OnWorkerExit(w, incarnation); }));
  // A worker that died before it took its Start is noticed by its pidfd, like any other.
  if (absl::Status sent = SendStart(w, recover); !sent.ok()) {
    LogWarn(absl::StrCat("job ", state_.name, ": worker ", Global(w), ": ", sent.message()));
    KillWorker(*worker.process, SIGKILL);
  }
  return absl::OkStatus();
}

absl::Status JobHost::SendStart(uint32_t w, bool recover) {
  internal::v1::WorkerStart start;
  start.set_job(state_.name);
  start.set_job_id(job_id_);
  start.set_generation(state_.generation);
  start.set_worker(Global(w));
  start.set_workers(static_cast<uint32_t>(plan_->workers.size()));
  *start.mutable_config() = plan_->config;
  *start.mutable_manifest() = plan_->manifest;
  start.set_layout_fingerprint(plan_->layout.front().fingerprint());
  for (const auto& rank : plan_->ranks) *start.add_ranks() = rank;
  for (uint32_t other = 0; other < plan_->workers.size(); ++other) {
    internal::v1::WorkerPlace& place = *start.add_worker_places();
    place = plan_->workers[other];
    if (!plan_->placement.spans()) continue;
    place.set_node(environment_.config->cluster.NodeName(other / plan_->placement.workers));
  }
  JobRegions::WorkerView view = regions_->ForWorker(*plan_, Global(w));
  if (const CoreHolder& cores = workers_[w].process->cores; cores.valid()) {
    view.regions.push_back(environment_.cores->Describe(cores));
    view.fds.push_back(environment_.cores->descriptor());
  }
  if (const auto& io = workers_[w].io; io != nullptr) {
    view.regions.push_back(environment_.io->Describe(*io));
    view.fds.push_back(environment_.io->descriptor());
  }
  for (const auto& region : view.regions) *start.add_regions() = region;
  start.set_lanes(plan_->lanes);
  start.set_recover(recover);
  start.set_resume(lost_.has_value());
  DescribeTiers(start);
  if (data_plane()) *start.mutable_device() = DeviceOf(Global(w));
  const bool drops = state_.alive_since > 1 && !state_.going_back.has_value();
  if (drops) start.set_drop_generation(state_.alive_since);
  if (plan_->config.transport() == model::v1::TRANSPORT_GLOO) {
    start.set_gloo_address(environment_.config->gloo_address);
  }
  ZS_ASSIGN_OR_RETURN(const UniqueFd memfd, ToMemfd(start, absl::StrCat("zeroshard:", state_.name,
                                                                        ":start-", Global(w))));
  std::vector<int> fds = {memfd.get()};
  fds.insert(fds.end(), view.fds.begin(), view.fds.end());
  ToWorker message;
  message.mutable_start();
  const int link = workers_[w].process->link.get();
  ZS_RETURN_IF_ERROR(SendLinkMessage(link, message.SerializeAsString(), fds, kStartTimeout));
  for (uint32_t r = 0; r < ranks_.size(); ++r) {
    if (ranks_[r].token.empty()) continue;
    ZS_RETURN_IF_ERROR(
        SendLinkMessage(link, AttachedMessage(r).SerializeAsString(), {}, kSendTimeout));
  }
  return absl::OkStatus();
}

ToWorker JobHost::AttachedMessage(uint32_t rank) const {
  ToWorker message;
  internal::v1::RankAttached& attached = *message.mutable_rank_attached();
  attached.set_rank(rank);
  attached.set_generation(ranks_[rank].generation);
  attached.set_token(ranks_[rank].token);
  attached.set_uid(ranks_[rank].peer.uid);
  return message;
}

void JobHost::SendToWorker(uint32_t w, const ToWorker& message, int fd) {
  Worker& worker = workers_[w];
  if (!worker.process || !worker.process->link.valid()) return;
  const std::vector<int> fds = fd < 0 ? std::vector<int>{} : std::vector<int>{fd};
  const absl::Status sent =
      SendLinkMessage(worker.process->link.get(), message.SerializeAsString(), fds, kSendTimeout);
  if (sent.ok()) return;
  LogWarn(absl::StrCat("job ", state_.name, ": worker ", Global(w), " does not take messages (",
                       sent.message(), "); ending it"));
  KillWorker(*worker.process, SIGKILL);
}

void JobHost::SendToWorkers(const ToWorker& message) {
  for (uint32_t w = 0; w < workers_.size(); ++w) SendToWorker(w, message);
}

void JobHost::OnLink(uint32_t w, uint32_t incarnation) { ReceiveFrom(w, incarnation); }

// Takes one message. False when there is none, or none will come any more.
bool JobHost::ReceiveFrom(uint32_t w, uint32_t incarnation) {
  Worker& worker = workers_[w];
  if (state_.workers[w].incarnation != incarnation || !worker.process ||
      !worker.process->link.valid()) {
    return false;
  }
  const int link = worker.process->link.get();
  absl::StatusOr<LinkMessage> received = ReceiveLinkMessage(link, kReceiveTimeout);
  FromWorker message;
  if (received.ok() && message.ParseFromString(received->body)) {
    ++worker.messages;
    OnWorkerMessage(w, incarnation, message, std::move(received->fds));
    return true;
  }
  loop_.Unwatch(link);
  worker.process->link.reset();
  absl::StatusOr<UniqueFd> pidfd = worker.process->pidfd.Duplicate();
  if (!pidfd.ok()) {
    KillWorker(*worker.process, SIGKILL);
    return false;
  }
  auto lingering = std::make_shared<WorkerProcess>();
  lingering->pidfd = *std::move(pidfd);
  loop_.At(loop_.Now() + kLingerTime, [lingering] { KillWorker(*lingering, SIGKILL); });
  return false;
}

void JobHost::OnWorkerMessage(uint32_t w, uint32_t incarnation, const FromWorker& message,
                              std::vector<UniqueFd> fds) {
  switch (message.kind_case()) {
    case FromWorker::kReady:
      if (!message.ready().recovery().empty()) {
        LogInfo(absl::StrCat("job ", state_.name, ": worker ", Global(w),
                             " recovered: ", message.ready().recovery()));
      }
      if (!HasDevice(w)) return;
      SendMoves(w);
      return Feed(WorkerReady{w, incarnation});
    case FromWorker::kDeviceRegions:
      return OnDeviceRegions(w, message.device_regions(), std::move(fds));
    case FromWorker::kDeviceLost:
      return OnDeviceLost(w, incarnation, message.device_lost());
    case FromWorker::kWentBack:
      return OnWentBack(w, message.went_back());
    case FromWorker::kShardDone:
      return OnShardDone(w, message.shard_done());
    case FromWorker::kPoisoned:
      return Feed(
          GenerationPoisoned{message.poisoned().generation(),
                             SentStatus(message.poisoned().code(), message.poisoned().message()),
                             message.poisoned().nodes_lost()});
    case FromWorker::kStats:
      return OnStats(w, message.stats());
    case FromWorker::kFatal:
      workers_[w].fatal = SentStatus(message.fatal().code(), message.fatal().message());
      return;
    case FromWorker::kPowerStates:
      return OnPowerStates(w, message.power_states());
    case FromWorker::kStore:
      return OnStore(w, incarnation, message.store());
    case FromWorker::KIND_NOT_SET:
      return;
  }
}

void JobHost::OnStore(uint32_t w, uint32_t incarnation, const internal::v1::StoreRequest& request) {
  auto answer = [this, w, incarnation,
                 id = request.request()](const absl::StatusOr<std::string>& value) {
    if (state_.workers[w].incarnation != incarnation) return;
    ToWorker message;
    internal::v1::StoreReply& reply = *message.mutable_store_reply();
    reply.set_request(id);
    reply.set_code(static_cast<uint32_t>(value.status().code()));
    reply.set_message(std::string(value.status().message()));
    if (value.ok()) reply.set_value(*value);
    SendToWorker(w, message);
  };
  if (!keeps_store()) return ForwardStore(w, request, answer);
  if (request.has_value()) {
    const absl::Status set = store_.Set(request.key(), request.value());
    return answer(set.ok() ? absl::StatusOr<std::string>(request.value()) : set);
  }
  store_.Get(request.key(), Global(w), loop_.Now() + absl::Milliseconds(request.timeout_ms()),
             answer);
  ArmTimer();
}

void JobHost::OnStats(uint32_t w, const internal::v1::Stats& stats) {
  Worker& worker = workers_[w];
  if (environment_.metrics != nullptr) {
    environment_.metrics->AddStats(state_.name, Global(w), worker.stats, stats);
  }
  worker.stats = stats;
  worker.tier.Add(stats, loop_.Now());
  if (environment_.gpus != nullptr && stats.gpu_free_bytes() > 0) {
    environment_.gpus->SetFree(plan_->workers[Global(w)].device(), stats.gpu_free_bytes());
  }
  if (regions_ && regions_->board().numbers().step > last_step_) {
    last_step_ = regions_->board().numbers().step;
    Do(EmitEvent{"step", absl::StrCat("step ", last_step_, " is committed")});
  }
}

void JobHost::OnWorkerExit(uint32_t w, uint32_t incarnation) {
  Worker& worker = workers_[w];
  if (!worker.process || state_.workers[w].incarnation != incarnation) return;
  const std::optional<std::string> reason = ReapWorker(*worker.process);
  if (!reason) return;
  while (ReceiveFrom(w, incarnation)) {
  }
  if (!worker.process) return;  // its last words ended the job
  loop_.Unwatch(worker.process->pidfd.get());
  worker.process.reset();
  if (worker.io != nullptr) worker.io->Release();
  worker.file_commands = 0;
  worker.went_back = 0;
  const std::string stuck = std::exchange(worker.stuck, "");
  std::string how = stuck.empty() ? *reason : absl::StrCat(stuck, ", ", *reason);
  absl::Status fatal = worker.fatal;
  if (absl::IsAborted(fatal)) {
    // Of this process alone, as a device that was lost to it: another one is tried.
    absl::StrAppend(&how, ": ", fatal.message());
    fatal = absl::OkStatus();
  }
  SumCounters(worker.before, worker.stats);
  // Its successor counts from 0, but for what lies in the board.
  internal::v1::Stats fresh;
  fresh.set_updates(worker.stats.updates());
  fresh.set_skipped(worker.stats.skipped());
  worker.stats = fresh;
  store_.DropWaiters(Global(w));
  if (operation_) {
    AbandonShards(absl::UnavailableError(
        absl::StrCat(operation_->what, ": worker ", Global(w), " died (", how, ")")));
  }
  Feed(WorkerDied{w, incarnation, how, std::move(fatal), !stuck.empty(),
                  regions_ ? regions_->board().numbers().step : 0});
}

void JobHost::RunOnShards(ShardCommand command, std::function<void(ShardAnswers)> done) {
  const bool running = state_.phase == JobPhase::kReady || state_.phase == JobPhase::kIdle ||
                       state_.phase == JobPhase::kLeaving ||
                       (state_.phase == JobPhase::kForming && state_.started);
  const bool workers_ready =
      std::all_of(state_.workers.begin(), state_.workers.end(),
                  [](const WorkerState& worker) { return worker.phase == WorkerPhase::kReady; });
  const bool going_back = state_.going_back.has_value();
  if (!running || !workers_ready || going_back || !state_.poison.ok()) {
    return done(absl::FailedPreconditionError(
        absl::StrCat(command.what, ": job '", state_.name, "' is ", JobPhaseName(state_.phase),
                     workers_ready ? "" : " and a worker is starting",
                     going_back ? " and goes back to its last mirror" : "",
                     state_.poison.ok() ? "" : ": ", state_.poison.message())));
  }
  if (plan_->placement.spans() && !command.message.has_export_file()) {
    return done(absl::FailedPreconditionError(absl::StrCat(
        command.what, ": job '", state_.name, "' spans ", plan_->placement.nodes,
        " daemons, and checkpoints of such jobs are not in this build; Export works")));
  }
  if (operation_) {
    return done(absl::FailedPreconditionError(
        absl::StrCat(command.what, ": job '", state_.name, "' is busy with ", operation_->what)));
  }
  operation_.emplace();
  operation_->request = next_request_++;
  operation_->what = command.what;
  // A model file is written by one worker, which sees all parameters; a checkpoint by all.
  const uint32_t writers =
      command.message.has_export_file() ? 1 : static_cast<uint32_t>(workers_.size());
  operation_->answers.resize(writers);
  operation_->done = std::move(done);
  if (command.message.has_save()) command.message.mutable_save()->set_request(operation_->request);
  if (command.message.has_restore()) {
    command.message.mutable_restore()->set_request(operation_->request);
  }
  if (command.message.has_export_file()) {
    command.message.mutable_export_file()->set_request(operation_->request);
  }
  for (uint32_t w = 0; w < writers; ++w) {
    ++workers_[w].file_commands;
    SendToWorker(w, command.message, command.fd.get());
  }
}

void JobHost::AbandonShards(const absl::Status& status) {
  if (!operation_) return;
  const auto done = std::move(operation_->done);
  operation_.reset();
  done(status);
}

void JobHost::OnShardDone(uint32_t w, const internal::v1::ShardDone& answer) {
  if (workers_[w].file_commands > 0) --workers_[w].file_commands;
  if (!operation_ || operation_->request != answer.request()) return;
  if (w >= operation_->answers.size()) return;  // was not asked
  if (answer.code() != 0) {
    return AbandonShards(
        SentStatus(answer.code(),
                   absl::StrCat(operation_->what, ": worker ", Global(w), ": ", answer.message())));
  }
  operation_->answers[w] = answer;
  std::vector<internal::v1::ShardDone> all;
  for (const auto& one : operation_->answers) {
    if (!one) return;
    all.push_back(*one);
  }
  const auto done = std::move(operation_->done);
  operation_.reset();
  done(std::move(all));
}

}  // namespace zeroshard
