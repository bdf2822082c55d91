#include "server/job_table.h"

#include <csignal>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/log.h"
#include "server/power_jobs.h"

namespace zeroshard {
namespace {

constexpr absl::Duration kStopGrace = absl::Seconds(5);
constexpr absl::Duration kLeavingPoll = absl::Milliseconds(50);
constexpr absl::Duration kMetricsPeriod = absl::Seconds(1);
// Of those periods: how often the room on the NVMe tier's paths is looked at.
constexpr uint32_t kLookEvery = 10;

}  // namespace

JobTable::JobTable(HostEnvironment environment) : environment_(std::move(environment)) {
  environment_.retire = [this](WorkerProcess process) { Retire(std::move(process)); };
}

void JobTable::Attach(const std::string& name, AttachCall call) {
  auto it = jobs_.find(name);
  if (it != jobs_.end()) it->second->NoticeDeaths();
  // A job that failed goes on from its files, as if the daemon had been started again.
  if (it != jobs_.end() && it->second->state().phase == JobPhase::kFailed &&
      IsPowerJob(it->second->plan()) && PresentRanks(it->second->state()) == 0) {
    it->second->EndForNow();
  }
  if (it != jobs_.end() && it->second->ended()) {
    jobs_.erase(it);
    it = jobs_.end();
  }
  if (it == jobs_.end()) {
    const PowerJob* const lost =
        environment_.power == nullptr ? nullptr : environment_.power->Find(name);
    if (lost != nullptr) {
      absl::Status resumable = CheckResumable(name, *lost, *call.plan);
      if (!resumable.ok()) return call.done(resumable);
    }
    HostEnvironment environment = environment_;
    environment.memory_in_use = [this, name] { return InUse(name); };
    environment.gpu_in_use = [this, name] { return GpuInUse(name); };
    it = jobs_.emplace(name, std::make_unique<JobHost>(environment, name, call.spec, call.plan))
             .first;
  }
  count_.store(static_cast<uint32_t>(jobs_.size()), std::memory_order_relaxed);
  JobHost& job = *it->second;
  if (job.state().phase == JobPhase::kLeaving && environment_.loop->Now() < call.deadline) {
    // The job ends as soon as the other nodes' ranks have detached; then the name is free.
    auto shared = std::make_shared<AttachCall>(std::move(call));
    environment_.loop->At(environment_.loop->Now() + kLeavingPoll,
                          [this, name, shared] { Attach(name, std::move(*shared)); });
    return;
  }
  job.Attach(std::move(call));
  SweepLater();
}

void JobTable::CancelAttach(const std::string& name, uint64_t attach_id) {
  if (auto job = Find(name); job.ok()) (*job)->CancelAttach(attach_id);
  SweepLater();
}

absl::StatusOr<JobHost*> JobTable::Find(const std::string& name) {
  const auto it = jobs_.find(name);
  if (it != jobs_.end() && !it->second->ended()) return it->second.get();
  std::vector<std::string> names;
  for (const auto& [other, host] : jobs_) {
    if (!host->ended() && names.size() < 20) names.push_back(other);
  }
  if (environment_.power != nullptr && environment_.power->Find(name) != nullptr) {
    return absl::NotFoundError(absl::StrCat(
        "job '", name, "' is not running; its states are on nvme: attach under its name to go on, ",
        "or `zeroshard remove ", name, "` deletes them"));
  }
  return absl::NotFoundError(absl::StrCat(
      "there is no job '", name, "'; ",
      names.empty() ? "the daemon has none" : "there are: ", absl::StrJoin(names, ", ")));
}

std::optional<JobHost::Granted> JobTable::Descriptors(const std::string& token) const {
  for (const auto& [name, host] : jobs_) {
    if (auto granted = host->Descriptors(token)) return granted;
  }
  return std::nullopt;
}

absl::StatusOr<uint64_t> JobTable::Remove(const std::string& name, bool force) {
  absl::StatusOr<JobHost*> job = Find(name);
  if (!job.ok() && environment_.power != nullptr && environment_.power->Find(name) != nullptr) {
    return RemoveLost(name);
  }
  if (!job.ok()) return job.status();
  absl::StatusOr<uint64_t> bytes = (*job)->Remove(force);
  SweepLater();
  return bytes;
}

absl::StatusOr<uint64_t> JobTable::RemoveLost(const std::string& name) {
  const PowerJob lost = *environment_.power->Find(name);
  std::vector<NvmePathConfig> paths;
  for (const std::string& path : lost.facts.paths()) {
    paths.push_back({.path = path, .allow_network_path = true});
  }
  LogInfo(absl::StrCat("job ", name, ": what an earlier daemon left of it is removed"));
  environment_.nvme->RemoveKept(name, lost.job_id, paths);
  environment_.power->Erase(name);
  records::v1::JournalRecord record;
  record.mutable_job_ended()->set_job(name);
  record.mutable_job_ended()->set_reason("removed by an operator");
  environment_.journal(std::move(record));
  return uint64_t{0};
}

std::vector<admin::v1::JobSummary> JobTable::Resumable() const {
  std::vector<admin::v1::JobSummary> summaries;
  if (environment_.power == nullptr) return summaries;
  for (const auto& [name, lost] : environment_.power->all()) {
    if (const auto it = jobs_.find(name); it != jobs_.end() && !it->second->ended()) continue;
    admin::v1::JobSummary& summary = summaries.emplace_back();
    summary.set_name(name);
    summary.set_state("resumable");
    summary.set_reason(lost.known ? "its states are on nvme; attach under its name to go on"
                                  : "files of a job that the journal says nothing of");
  }
  return summaries;
}

void JobTable::Retire(WorkerProcess process) {
  const int pidfd = process.pidfd.get();
  auto shared = std::make_shared<WorkerProcess>(std::move(process));
  retired_[pidfd] = shared;
  const absl::Status watched = environment_.loop->Watch(pidfd, [this, pidfd] {
    const auto it = retired_.find(pidfd);
    if (it == retired_.end() || !ReapWorker(*it->second)) return;
    environment_.loop->Unwatch(pidfd);
    retired_.erase(it);
    SweepLater();
  });
  if (!watched.ok()) LogError(absl::StrCat("waiting for a worker: ", watched.message()));
  environment_.loop->At(environment_.loop->Now() + kStopGrace, [late = std::weak_ptr(shared)] {
    if (const auto process = late.lock()) KillWorker(*process, SIGKILL);
  });
}

void JobTable::SweepLater() {
  if (sweeping_) return;
  sweeping_ = true;
  environment_.loop->Post([this] {
    sweeping_ = false;
    std::erase_if(jobs_, [](const auto& entry) { return entry.second->ended(); });
    count_.store(static_cast<uint32_t>(jobs_.size()), std::memory_order_relaxed);
    if (all_gone_ && jobs_.empty() && retired_.empty()) std::exchange(all_gone_, nullptr)();
  });
}

void JobTable::Shutdown(std::function<void()> done) {
  all_gone_ = std::move(done);
  for (const auto& [name, host] : jobs_) {
    host->EndForNow();
  }
  SweepLater();
}

std::vector<admin::v1::JobSummary> JobTable::Summaries() const {
  std::vector<admin::v1::JobSummary> summaries;
  for (const auto& [name, host] : jobs_) {
    if (!host->ended()) summaries.push_back(host->Summary());
  }
  return summaries;
}

MemoryInUse JobTable::InUse(const std::string& except) const {
  MemoryInUse in_use;
  for (const auto& [name, host] : jobs_) {
    if (name == except || host->ended()) continue;
    const uint64_t held = host->MemoryHeld();
    const uint64_t touched = host->MemoryTouched();
    in_use.held += held;
    in_use.untouched += held - std::min(held, touched);
  }
  return in_use;
}

std::map<std::string, uint64_t> JobTable::GpuInUse(const std::string& except) const {
  std::map<std::string, uint64_t> in_use;
  for (const auto& [name, host] : jobs_) {
    if (name == except || host->ended()) continue;
    for (const auto& [device, bytes] : host->GpuHeld()) in_use[device] += bytes;
  }
  return in_use;
}

void JobTable::StartMetrics() {
  bool ended = false;
  std::map<std::string, int> by_state;
  for (const auto& [name, host] : jobs_) {
    ended |= host->ended();
    if (!host->ended()) ++by_state[JobPhaseName(host->state().phase)];
  }
  if (ended) SweepLater();
  if (environment_.metrics != nullptr) {
    environment_.metrics->SetJobs(by_state);
    if (auto node = ReadNodeMemory(); node.ok()) {
      environment_.metrics->SetNode(*node, environment_.config->host_memory_limit, InUse("").held);
    }
    if (environment_.nvme != nullptr) {
      if (++ticks_ % kLookEvery == 0) environment_.nvme->Refresh(absl::ZeroDuration());
      environment_.metrics->SetNvme(environment_.nvme->Paths(),
                                    environment_.config->tiers.nvme_limit);
    }
    if (environment_.gpus != nullptr)
      environment_.metrics->SetGpus(*environment_.gpus, GpuInUse(""));
    if (environment_.cores != nullptr) environment_.metrics->SetCores(environment_.cores->budget());
  }
  if (environment_.drives != nullptr) {
    for (const DriveNote& note : environment_.drives->Update()) {
      note.level == LogLevel::kInfo ? LogInfo(note.text) : LogWarn(note.text);
    }
  }
  environment_.loop->At(environment_.loop->Now() + kMetricsPeriod, [this] { StartMetrics(); });
}

}  // namespace zeroshard
