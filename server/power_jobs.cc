#include "server/power_jobs.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status.h"
#include "storage/nvme_manifest.h"
#include "storage/partition.h"

namespace zeroshard {
namespace {

std::string HowToForget(const std::string& name) {
  return absl::StrCat("`zeroshard remove ", name, "` deletes what is left of it");
}

// Whether all values of a unit's shard are in images of parameters.
absl::StatusOr<bool> IsOnNvme(const JobPlan& plan, uint32_t unit) {
  for (uint32_t w = 0; w < plan.workers.size(); ++w) {
    ZS_ASSIGN_OR_RETURN(const PartitionPlan partition,
                        PartitionPlan::Create(plan.layout.front(), plan.config, w, plan.lanes));
    ZS_ASSIGN_OR_RETURN(const NvmePlan nvme, plan.NvmePlanOf(partition));
    const bool has_values = partition.unit(unit).shard.size() > 0;
    if (has_values && nvme.parameter_images(unit).count == 0) return false;
  }
  return true;
}

absl::Status CheckFrozen(const JobPlan& plan) {
  const std::span<const Unit> units = plan.layout.front().units();
  for (uint32_t u = 0; u < units.size(); ++u) {
    if (units[u].trainable || units[u].grains == 0) continue;
    ZS_ASSIGN_OR_RETURN(const bool on_nvme, IsOnNvme(plan, u));
    if (on_nvme) continue;
    const auto parameter = static_cast<int>(units[u].parameters.front());
    return absl::FailedPreconditionError(
        absl::StrCat("zeroshard.durability is \"power\", and parameter '",
                     plan.manifest.parameters(parameter).name(),
                     "' is frozen: its values are in memory only, which is lost with the power. "
                     "At stage 3, offload_param.device \"nvme\" with max_in_cpu 0 and "
                     "stage3_param_persistence_threshold 0 puts them on the drives; or write "
                     "\"process\""));
  }
  return absl::OkStatus();
}

void AddFact(records::v1::PowerFacts& facts, const std::string& key, const std::string& value) {
  records::v1::PowerFacts::Fact& fact = *facts.add_facts();
  fact.set_key(key);
  fact.set_value(value);
}

}  // namespace

PowerJob* PowerJobs::Find(const std::string& name) {
  const auto it = jobs_.find(name);
  return it == jobs_.end() ? nullptr : &it->second;
}

bool PowerJobs::HasId(uint64_t job_id) const {
  return std::ranges::any_of(jobs_, [&](const auto& job) { return job.second.job_id == job_id; });
}

bool IsPowerJob(const JobPlan& plan) {
  return !plan.nvme_paths.empty() && plan.config.nvme().durability() == model::v1::DURABILITY_POWER;
}

absl::Status CheckPowerPlan(const JobPlan& plan) {
  if (!IsPowerJob(plan)) return absl::OkStatus();
  if (plan.placement.spans() || plan.islands > 1) {
    return absl::FailedPreconditionError(absl::StrCat(
        "zeroshard.durability is \"power\", which needs workers that share memory, and the ",
        plan.placement.spans() ? "job spans daemons" : "transport is gloo",
        "; write \"process\", and save checkpoints"));
  }
  const uint64_t extra =
      NvmePlan::ManifestExtra(plan.config, plan.layout.front().parameters().size());
  if (extra > kMaxManifestExtra) {
    return absl::InvalidArgumentError(
        absl::StrCat("zeroshard.durability is \"power\", and the user_state of ",
                     plan.config.world_size(), " ranks with ", plan.config.user_state_bytes(),
                     " bytes each, and the numbers of ", plan.layout.front().parameters().size(),
                     " parameters, take ", extra, " bytes with each step; at most ",
                     kMaxManifestExtra, " are kept: lower zeroshard.user_state_bytes"));
  }
  return CheckFrozen(plan);
}

absl::StatusOr<records::v1::PowerFacts> PowerFactsOf(const JobPlan& plan) {
  records::v1::PowerFacts facts;
  const model::v1::EngineConfig& config = plan.config;
  AddFact(facts, "parameters", absl::StrFormat("layout %016x", plan.layout.front().fingerprint()));
  AddFact(facts, "world_size", absl::StrCat(config.world_size()));
  AddFact(facts, "workers", absl::StrCat(plan.workers.size()));
  AddFact(facts, "zero_optimization.stage", absl::StrCat(config.stage()));
  AddFact(facts, "optimizer", model::v1::OptimizerKind_Name(config.optimizer()));
  AddFact(facts, "optimizer states", absl::StrJoin(config.state_slots(), ", "));
  AddFact(facts, "zeroshard.optimizer_states", model::v1::StateFormat_Name(config.state_format()));
  AddFact(facts, "zeroshard.master", model::v1::MasterForm_Name(config.master_form()));
  AddFact(facts, "parameters on", model::v1::Tier_Name(config.parameter_tier()));
  AddFact(facts, "zeroshard.user_state_bytes", absl::StrCat(config.user_state_bytes()));
  std::vector<std::string> paths;
  for (const NvmePathConfig& path : plan.nvme_paths) {
    paths.push_back(absl::StrCat(path.path, "=", path.weight));
    facts.add_paths(path.path);
  }
  AddFact(facts, "nvme_path", absl::StrJoin(paths, ", "));
  // All else that decides where an image lies.
  for (uint32_t w = 0; w < plan.workers.size(); ++w) {
    ZS_ASSIGN_OR_RETURN(const PartitionPlan partition,
                        PartitionPlan::Create(plan.layout.front(), config, w, plan.lanes));
    ZS_ASSIGN_OR_RETURN(const NvmePlan nvme, plan.NvmePlanOf(partition));
    AddFact(facts,
            absl::StrCat("what lies where in the files of worker ", w,
                         " (sub_group_size, max_in_cpu, nvme_spares)"),
            absl::StrFormat("%016x", nvme.extents().fingerprint()));
  }
  return facts;
}

absl::Status CheckResumable(const std::string& name, const PowerJob& job, const JobPlan& plan) {
  const std::string what = absl::StrCat(
      "the states of an earlier job '", name, "' with durability power are on its nvme paths (",
      absl::StrJoin(job.facts.paths(), ", "), "), and this job cannot go on with them: ");
  const std::string advice =
      absl::StrCat("; attach as that job was, or use another job name, or ", HowToForget(name));
  if (!job.known) {
    return absl::FailedPreconditionError(absl::StrCat(
        "'", name, "' are files of a job whose name is not known; ", HowToForget(name)));
  }
  if (!IsPowerJob(plan)) {
    return absl::FailedPreconditionError(
        absl::StrCat(what, "its zeroshard.durability is not \"power\"", advice));
  }
  ZS_ASSIGN_OR_RETURN(const records::v1::PowerFacts now, PowerFactsOf(plan));
  for (int i = 0; i < std::min(now.facts_size(), job.facts.facts_size()); ++i) {
    const auto& was = job.facts.facts(i);
    const auto& is = now.facts(i);
    if (was.key() == is.key() && was.value() == is.value()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat(what, was.key(), " was ", was.value(), " and is ",
                     was.key() == is.key() ? is.value() : "missing", advice));
  }
  return absl::OkStatus();
}

absl::StatusOr<internal::v1::ResumeJob> ChooseResume(
    const std::string& name, bool begun, std::span<const internal::v1::PowerStates> workers) {
  internal::v1::ResumeJob resume;
  std::vector<std::vector<ManifestState>> states;
  uint64_t seen = 0;
  bool unused = false;
  bool none = true;
  std::string missing;
  std::string problems;
  for (size_t w = 0; w < workers.size(); ++w) {
    unused |= workers[w].unused();
    none &= workers[w].states().empty() && (workers[w].missing() || workers[w].unused());
    const std::string line = absl::StrCat("; worker ", w, ": ", workers[w].problem());
    if (workers[w].missing()) absl::StrAppend(&missing, line);
    if (!workers[w].problem().empty()) absl::StrAppend(&problems, line);
    states.emplace_back();
    for (const internal::v1::PowerState& state : workers[w].states()) {
      states.back().push_back({state.step(), state.attempt(), state.revision()});
      seen = std::max(seen, state.attempt());
    }
  }
  // No step is committed before all workers have a manifest.
  if (unused || (none && !begun)) {
    resume.set_fresh(true);
    return resume;
  }
  const std::string job = absl::StrCat("job '", name, "' cannot be resumed: ");
  if (!missing.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat(job, "files are not there", missing,
                     "; is the drive mounted? Nothing was changed; ", HowToForget(name)));
  }
  const absl::StatusOr<ManifestState> chosen = ChooseState(states);
  if (!chosen.ok()) {
    return absl::Status(chosen.status().code(), absl::StrCat(job, chosen.status().message(),
                                                             problems, "; ", HowToForget(name)));
  }
  resume.mutable_state()->set_step(chosen->step);
  resume.mutable_state()->set_attempt(chosen->attempt);
  resume.mutable_state()->set_revision(chosen->revision);
  resume.set_committed(seen + 1);
  return resume;
}

}  // namespace zeroshard
