#include "server/metadata_log.h"

#include <unistd.h>

#include <fstream>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/status.h"
#include "base/version.h"
#include "storage/named_dir.h"

namespace zeroshard {
namespace {

constexpr char kJournalName[] = "jobs.journal";

std::string BootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(file, id);
  return id;
}

}  // namespace

absl::StatusOr<std::unique_ptr<MetadataLog>> MetadataLog::Open(const std::string& state_dir) {
  ZS_ASSIGN_OR_RETURN(const UniqueFd directory, OpenDirectory(state_dir));
  auto log = std::unique_ptr<MetadataLog>(new MetadataLog);
  std::map<std::string, records::v1::JobCreated> alive;
  auto replay = [&](uint64_t sequence, std::string_view payload) -> absl::Status {
    records::v1::JournalRecord record;
    if (!record.ParseFromArray(payload.data(), static_cast<int>(payload.size()))) {
      return absl::DataLossError(absl::StrCat("journal record ", sequence, " does not parse"));
    }
    if (record.has_job_created()) alive[record.job_created().job()] = record.job_created();
    if (record.has_rank_changed()) {
      // Ranks attach when all workers are ready.
      const auto job = alive.find(record.rank_changed().job());
      if (job != alive.end() && job->second.has_power()) {
        job->second.mutable_power()->set_begun(true);
      }
    }
    if (record.has_job_ended()) {
      const auto job = alive.extract(record.job_ended().job());
      if (!job.empty() && job.mapped().has_power()) {
        log->ended_power_jobs_.insert(job.mapped().job_id());
      }
    }
    return absl::OkStatus();
  };
  ZS_ASSIGN_OR_RETURN(log->journal_, Journal::Open(directory.get(), kJournalName, replay));
  std::vector<std::string> kept;
  for (const auto& [name, job] : alive) {
    if (job.has_power()) {
      records::v1::JournalRecord record;
      *record.mutable_job_created() = job;
      kept.push_back(record.SerializeAsString());
      log->power_jobs_.push_back(job);
    } else {
      log->lost_jobs_.push_back(name);
    }
  }
  // All others of the past are over: the journal starts anew with this daemon.
  ZS_RETURN_IF_ERROR(log->journal_->Compact(kept));
  records::v1::JournalRecord started;
  started.mutable_server_started()->set_version(kVersion);
  started.mutable_server_started()->set_pid(static_cast<uint32_t>(getpid()));
  started.mutable_server_started()->set_boot_id(BootId());
  log->Append(std::move(started));
  log->thread_ = std::thread([self = log.get()] { self->Run(); });
  return log;
}

MetadataLog::~MetadataLog() {
  {
    absl::MutexLock lock(&mu_);
    stop_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void MetadataLog::Append(records::v1::JournalRecord record) {
  record.set_unix_micros(static_cast<uint64_t>(absl::ToUnixMicros(absl::Now())));
  absl::MutexLock lock(&mu_);
  queue_.push_back(std::move(record));
}

void MetadataLog::Run() {
  bool failed = false;
  while (true) {
    records::v1::JournalRecord record;
    {
      absl::MutexLock lock(&mu_);
      mu_.Await(absl::Condition(this, &MetadataLog::HasWork));
      if (queue_.empty()) return;
      record = std::move(queue_.front());
      queue_.pop_front();
    }
    const absl::Status status = journal_->Append(record.SerializeAsString());
    if (!status.ok() && !std::exchange(failed, true)) {
      LogError(absl::StrCat("the journal cannot be written any more: ", status.message()));
    }
  }
}

}  // namespace zeroshard
