#include "server/checkpoint_ops.h"

#include <fcntl.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "base/status.h"
#include "base/version.h"
#include "storage/checkpoint.h"
#include "storage/named_dir.h"

namespace zeroshard {
namespace {

// A save of terabytes to a slow disk takes long; past this a worker is stuck.
constexpr absl::Duration kLongest = absl::Hours(2);

}  // namespace

absl::StatusOr<CheckpointOps::JobFacts> CheckpointOps::Facts(const std::string& job,
                                                             const std::string& token) {
  using Found = absl::StatusOr<JobFacts>;
  absl::StatusOr<Found> found = environment_.loop->Call<Found>([this, &job, &token]() -> Found {
    ZS_ASSIGN_OR_RETURN(JobHost* const host, environment_.table->Find(job));
    JobFacts facts;
    if (!token.empty()) {
      ZS_ASSIGN_OR_RETURN(facts.rank, host->RankOfToken(token));
    }
    facts.job_id = host->job_id();
    facts.attempt = host->Attempt();
    facts.workers = static_cast<uint32_t>(host->plan().workers.size());
    facts.plan = host->shared_plan();
    return facts;
  });
  if (!found.ok()) return found.status();
  return *std::move(found);
}

absl::StatusOr<CheckpointOps::Result> CheckpointOps::Once(const std::string& job,
                                                          const std::string& token,
                                                          const std::string& kind,
                                                          const std::string& arguments,
                                                          const Work& work) {
  if (token.empty()) return absl::InvalidArgumentError("token: expected the one of AttachReply");
  ZS_ASSIGN_OR_RETURN(const JobFacts facts, Facts(job, token));
  std::shared_ptr<Shared> mine;
  {
    absl::MutexLock lock(&mu_);
    std::shared_ptr<Shared>& slot = shared_[absl::StrCat(kind, " ", job)];
    const bool same = slot != nullptr && slot->arguments == arguments &&
                      slot->job_id == facts.job_id && slot->ranks.count(facts.rank) == 0;
    if (same && (!slot->done || slot->attempt == facts.attempt)) {
      const std::shared_ptr<Shared> other = slot;
      other->ranks.insert(facts.rank);
      mu_.Await(absl::Condition(&other->done));
      return other->result;
    }
    if (slot != nullptr && !slot->done) {
      return absl::FailedPreconditionError(
          absl::StrCat(kind, ": job '", job, "' is busy with another ", kind));
    }
    slot = std::make_shared<Shared>();
    slot->arguments = arguments;
    slot->job_id = facts.job_id;
    slot->ranks.insert(facts.rank);
    mine = slot;
  }
  absl::StatusOr<Result> result = work(facts);
  const absl::StatusOr<JobFacts> after = Facts(job, token);
  if (result.ok() && environment_.metrics != nullptr) {
    environment_.metrics->CountCheckpoint(job, kind, result->bytes);
  }
  absl::MutexLock lock(&mu_);
  mine->result = result;
  mine->attempt = after.ok() ? after->attempt : 0;
  mine->done = true;
  // What failed is not shared with those who come later.
  if (!result.ok()) mine->arguments.clear();
  return result;
}

absl::StatusOr<std::vector<internal::v1::ShardDone>> CheckpointOps::RunOnShards(
    const std::string& job, JobHost::ShardCommand command) {
  struct Wait {
    absl::Notification finished;
    JobHost::ShardAnswers answers = absl::UnknownError("no answer");
  };
  auto wait = std::make_shared<Wait>();
  auto shared = std::make_shared<JobHost::ShardCommand>(std::move(command));
  const std::string what = shared->what;
  const bool posted = environment_.loop->Post([this, job, shared, wait] {
    auto done = [wait](JobHost::ShardAnswers answers) {
      wait->answers = std::move(answers);
      wait->finished.Notify();
    };
    absl::StatusOr<JobHost*> host = environment_.table->Find(job);
    if (!host.ok()) return done(host.status());
    (*host)->RunOnShards(std::move(*shared), done);
  });
  if (!posted) return absl::UnavailableError("the daemon is shutting down");
  if (!wait->finished.WaitForNotificationWithTimeout(kLongest)) {
    environment_.loop->Post([this, job, what] {
      if (auto host = environment_.table->Find(job); host.ok()) {
        (*host)->AbandonShards(absl::DeadlineExceededError(
            absl::StrCat(what, ": a worker did not answer in ", absl::FormatDuration(kLongest))));
      }
    });
    wait->finished.WaitForNotification();
  }
  return std::move(wait->answers);
}

absl::StatusOr<trainer::v1::SaveReply> CheckpointOps::Save(
    const trainer::v1::SaveRequest& request) {
  ZS_RETURN_IF_ERROR(ValidateName(request.name()));
  ZS_ASSIGN_OR_RETURN(
      const Result result,
      Once(request.job(), request.token(), "save",
           absl::StrCat(request.name(), request.exclude_frozen() ? " without frozen" : ""),
           [&](const JobFacts& facts) { return DoSave(request, facts); }));
  trainer::v1::SaveReply reply;
  reply.set_step(result.step);
  reply.set_bytes(result.bytes);
  reply.set_directory(result.path);
  return reply;
}

absl::StatusOr<CheckpointOps::Result> CheckpointOps::DoSave(const trainer::v1::SaveRequest& request,
                                                            const JobFacts& facts) {
  ZS_ASSIGN_OR_RETURN(const UniqueFd root, OpenDirectory(environment_.config->checkpoint_dir));
  ZS_ASSIGN_OR_RETURN(CheckpointWriter writer,
                      CheckpointWriter::Create(root.get(), request.name()));
  JobHost::ShardCommand command;
  command.what = absl::StrCat("save ", request.name());
  command.message.mutable_save()->set_exclude_frozen(request.exclude_frozen());
  ZS_ASSIGN_OR_RETURN(command.fd, DuplicateFd(writer.dir_fd()));
  ZS_ASSIGN_OR_RETURN(const std::vector<internal::v1::ShardDone> answers,
                      RunOnShards(request.job(), std::move(command)));
  records::v1::CheckpointManifest manifest;
  manifest.set_job(request.job());
  manifest.set_job_id(facts.job_id);
  manifest.set_layout_fingerprint(facts.plan->layout.front().fingerprint());
  *manifest.mutable_manifest() = facts.plan->manifest;
  *manifest.mutable_config() = facts.plan->config;
  if (!manifest.mutable_state()->ParseFromString(answers.front().job_state())) {
    return absl::InternalError("worker 0 sent a job state that does not parse");
  }
  manifest.set_exclude_frozen(request.exclude_frozen());
  manifest.set_unix_micros(static_cast<uint64_t>(absl::ToUnixMicros(absl::Now())));
  manifest.set_version(kVersion);
  Result result;
  result.step = manifest.state().step();
  result.path = absl::StrCat(environment_.config->checkpoint_dir, "/", request.name());
  ZS_ASSIGN_OR_RETURN(result.bytes, std::move(writer).Commit(std::move(manifest), facts.workers));
  records::v1::JournalRecord record;
  record.mutable_checkpoint_written()->set_job(request.job());
  record.mutable_checkpoint_written()->set_name(request.name());
  record.mutable_checkpoint_written()->set_step(result.step);
  record.mutable_checkpoint_written()->set_bytes(result.bytes);
  environment_.journal(std::move(record));
  environment_.loop->Post([this, job = request.job(), name = request.name(), step = result.step] {
    if (auto host = environment_.table->Find(job); host.ok()) (*host)->NoteCheckpoint(name, step);
  });
  return result;
}

absl::StatusOr<trainer::v1::RestoreReply> CheckpointOps::Restore(
    const trainer::v1::RestoreRequest& request) {
  ZS_RETURN_IF_ERROR(ValidateName(request.name()));
  ZS_ASSIGN_OR_RETURN(const JobFacts facts, Facts(request.job(), request.token()));
  ZS_ASSIGN_OR_RETURN(
      const Result result,
      Once(request.job(), request.token(), "restore",
           absl::StrCat(request.name(), request.parameters_only() ? " parameters only" : ""),
           [&](const JobFacts& mine) { return DoRestore(request, mine); }));
  trainer::v1::RestoreReply reply;
  reply.set_step(result.step);
  reply.set_bytes(result.bytes);
  if (result.user_states.size() == facts.plan->ranks.size()) {
    reply.set_user_state(result.user_states[facts.rank]);
  }
  return reply;
}

absl::StatusOr<CheckpointOps::Result> CheckpointOps::DoRestore(
    const trainer::v1::RestoreRequest& request, const JobFacts& facts) {
  ZS_ASSIGN_OR_RETURN(const UniqueFd root, OpenDirectory(environment_.config->checkpoint_dir));
  ZS_ASSIGN_OR_RETURN(const CheckpointReader reader,
                      CheckpointReader::OpenByName(root.get(), request.name()));
  const uint64_t own = facts.plan->layout.front().fingerprint();
  if (reader.layout().fingerprint() != own) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "checkpoint '%s' was written by job '%s' with other parameters (layout %016x, this job has "
        "%016x): names, shapes, data types and the set of trainable parameters must be the same",
        request.name(), reader.manifest().job(), reader.layout().fingerprint(), own));
  }
  const records::v1::JobState& state = reader.manifest().state();
  JobHost::ShardCommand command;
  command.what = absl::StrCat("restore ", request.name());
  command.message.mutable_restore()->set_parameters_only(request.parameters_only());
  command.message.mutable_restore()->set_job_state(state.SerializeAsString());
  ZS_ASSIGN_OR_RETURN(command.fd, OpenBeneath(root.get(), request.name(), O_RDONLY | O_DIRECTORY));
  ZS_ASSIGN_OR_RETURN(const std::vector<internal::v1::ShardDone> answers,
                      RunOnShards(request.job(), std::move(command)));
  Result result;
  result.step = state.step();
  for (const internal::v1::ShardDone& answer : answers) result.bytes += answer.bytes();
  result.user_states.assign(state.user_states().begin(), state.user_states().end());
  return result;
}

absl::StatusOr<trainer::v1::ExportReply> CheckpointOps::Export(
    const trainer::v1::ExportRequest& request) {
  ZS_RETURN_IF_ERROR(ValidateName(request.name()));
  absl::StatusOr<Result> result;
  if (request.token().empty()) {
    ZS_ASSIGN_OR_RETURN(const JobFacts facts, Facts(request.job(), ""));
    static_cast<void>(facts);
    result = DoExport(request);
  } else {
    result = Once(request.job(), request.token(), "export",
                  absl::StrCat(request.name(), request.overwrite() ? " again" : ""),
                  [&](const JobFacts&) { return DoExport(request); });
  }
  if (!result.ok()) return result.status();
  trainer::v1::ExportReply reply;
  reply.set_path(result->path);
  reply.set_bytes(result->bytes);
  reply.set_step(result->step);
  return reply;
}

absl::StatusOr<CheckpointOps::Result> CheckpointOps::DoExport(
    const trainer::v1::ExportRequest& request) {
  ZS_ASSIGN_OR_RETURN(const UniqueFd root, OpenDirectory(environment_.config->export_dir));
  const std::string name = request.name() + ".safetensors";
  ZS_ASSIGN_OR_RETURN(
      TemporaryFile file,
      TemporaryFile::Create(root.get(), name,
                            request.overwrite() ? Existing::kReplace : Existing::kRefuse));
  JobHost::ShardCommand command;
  command.what = absl::StrCat("export ", name);
  command.message.mutable_export_file();
  ZS_ASSIGN_OR_RETURN(command.fd, DuplicateFd(file.fd()));
  ZS_ASSIGN_OR_RETURN(const std::vector<internal::v1::ShardDone> answers,
                      RunOnShards(request.job(), std::move(command)));
  Result result;
  result.step = answers.front().step();
  const off_t end = lseek(file.fd(), 0, SEEK_END);
  if (end < 0) return ErrnoError(errno, "lseek", name);
  result.bytes = static_cast<uint64_t>(end);
  result.path = absl::StrCat(environment_.config->export_dir, "/", name);
  ZS_RETURN_IF_ERROR(std::move(file).Commit());
  return result;
}

}  // namespace zeroshard
