// The part of JobHost that lets jobs with durability power survive the daemon.
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "server/job_host.h"

namespace zeroshard {

void JobHost::EndForNow() {
  for_now_ = IsPowerJob(*plan_) && environment_.power != nullptr;
  Feed(RemoveRequested{/*force=*/true});
}

// From now on the daemon's next start finds the job.
void JobHost::RememberJob(records::v1::JobCreated& created) {
  if (!IsPowerJob(*plan_) || environment_.power == nullptr) return;
  const absl::StatusOr<records::v1::PowerFacts> facts = PowerFactsOf(*plan_);
  if (!facts.ok()) return inputs_.push_back(StartFailed{facts.status()});
  PowerJob job{.job_id = job_id_, .facts = *facts};
  job.facts.set_begun(lost_.has_value() && lost_->facts.begun());
  *created.mutable_power() = job.facts;
  environment_.power->Put(state_.name, std::move(job));
}

// The job has ended: whether it can be resumed. A lost one that could not be started stays as it
// was, whatever the reason.
void JobHost::KeepOrForget() {
  if (!IsPowerJob(*plan_) || environment_.power == nullptr) return;
  for_now_ =
      for_now_ ? state_.ever_ready || lost_.has_value() : lost_.has_value() && !state_.ever_ready;
  if (!state_.started) return;
  PowerJob* const job = environment_.power->Find(state_.name);
  if (!for_now_) {
    if (job != nullptr && job->job_id == job_id_) environment_.power->Erase(state_.name);
    return;
  }
  if (nvme_ != nullptr) nvme_->KeepFiles();
  if (job != nullptr && state_.ever_ready) job->facts.set_begun(true);
  LogInfo(absl::StrCat("job ", state_.name,
                       " can be resumed: attach under its name, with the same parameters"));
}

void JobHost::OnPowerStates(uint32_t w, const internal::v1::PowerStates& states) {
  if (!lost_.has_value()) return;
  if (resume_.has_value()) return SendResume(w);  // a worker that was started again
  remains_.resize(workers_.size());
  remains_[w] = states;
  std::vector<internal::v1::PowerStates> all;
  for (const auto& one : remains_) {
    if (!one.has_value()) return;
    all.push_back(*one);
  }
  absl::StatusOr<internal::v1::ResumeJob> resume =
      ChooseResume(state_.name, lost_->facts.begun(), all);
  if (!resume.ok()) return Feed(StartFailed{resume.status()});
  resume_ = *std::move(resume);
  LogInfo(resume_->fresh()
              ? absl::StrCat("job ", state_.name, " begins anew: no step of it was committed")
              : absl::StrCat("job ", state_.name, " goes on after step ", resume_->state().step(),
                             " of an earlier daemon"));
  for (uint32_t other = 0; other < workers_.size(); ++other) SendResume(other);
}

void JobHost::SendResume(uint32_t w) {
  internal::v1::ToWorker message;
  *message.mutable_resume() = *resume_;
  SendToWorker(w, message);
}

}  // namespace zeroshard
