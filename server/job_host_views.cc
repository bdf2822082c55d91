// The part of JobHost that answers operators.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "server/job_host.h"

namespace zeroshard {
namespace {

using Counters = google::protobuf::Map<std::string, uint64_t>;

void AddCounters(const internal::v1::Stats& stats, Counters& counters) {
  counters["gather_elements"] += stats.gather_elements();
  counters["persistent_gather_elements"] += stats.persistent_gather_elements();
  counters["scatter_elements"] += stats.scatter_elements();
  counters["step_gather_elements"] += stats.step_gather_elements();
  counters["wire_bytes"] += stats.wire_bytes();
  counters["copied_bytes"] += stats.copied_bytes();
  counters["prefetch_hits"] += stats.prefetch_hits();
  counters["prefetch_misses"] += stats.prefetch_misses();
  counters["window_bytes"] += stats.window_bytes();
}

void AddTierCounters(const internal::v1::Stats& stats, Counters& counters) {
  for (const internal::v1::NvmePathStats& path : stats.nvme_paths()) {
    counters["nvme_read_bytes"] += path.read_bytes();
    counters["nvme_written_bytes"] += path.written_bytes();
  }
  counters["nvme_retries"] += stats.nvme_retries();
  counters["nvme_damaged_images"] += stats.nvme_damaged_images();
  counters["nvme_rebuilt_images"] += stats.nvme_rebuilt_images();
  counters["nvme_failed_slots"] += stats.nvme_failed_slots();
  counters["nvme_state_bytes"] += stats.nvme_state_bytes();
  counters["move_left_bytes"] += stats.move_left_bytes();
}

void AddGpuCounters(const internal::v1::Stats& stats, Counters& counters) {
  counters["gpu_state_bytes"] += stats.gpu_state_bytes();
  counters["move_left_bytes"] += stats.nvme_paths_size() > 0 ? 0 : stats.move_left_bytes();
}

// What one worker holds by itself, for its line in the view.
uint64_t WorkerBytes(const JobPlan& plan, uint32_t w) {
  const std::string holder = absl::StrCat("worker ", w);
  uint64_t bytes = 0;
  for (const model::v1::LedgerLine& line : plan.ledger) {
    if (line.holder() == holder && line.tier() == "host") bytes += line.bytes();
  }
  return bytes;
}

}  // namespace

uint64_t JobHost::MemoryHeld() const { return regions_ ? plan_->memory_bytes() : 0; }

// Staging is the workers' own memory; they take it before they are ready.
uint64_t JobHost::MemoryTouched() const {
  if (!regions_) return 0;
  return regions_->AllocatedBytes() + (state_.ever_ready ? plan_->staging_bytes : 0);
}

std::optional<JobHost::Granted> JobHost::Descriptors(const std::string& token) const {
  const absl::StatusOr<uint32_t> rank = RankOfToken(token);
  if (!rank.ok() || !regions_) return std::nullopt;
  Granted granted;
  for (const JobRegions::RankRegion& region : regions_->ForRank(*plan_, *rank)) {
    granted.fds.push_back(region.fd);
  }
  return granted;
}

admin::v1::JobSummary JobHost::Summary() const {
  admin::v1::JobSummary summary;
  summary.set_name(state_.name);
  summary.set_state(JobPhaseName(state_.phase));
  summary.set_reason(state_.reason);
  summary.set_generation(state_.generation);
  summary.set_world_size(state_.spec.world_size);
  summary.set_attached(static_cast<uint32_t>(
      std::count_if(state_.ranks.begin(), state_.ranks.end(),
                    [](const RankState& rank) { return rank.phase == RankPhase::kAttached; })));
  summary.set_workers(static_cast<uint32_t>(plan_->workers.size()));
  summary.set_stage(plan_->config.stage());
  summary.set_parameters(plan_->layout.front().data_elements());
  summary.set_step(regions_ ? regions_->board().numbers().step : 0);
  summary.set_bytes(MemoryHeld());
  return summary;
}

admin::v1::GetJobReply JobHost::View() const {
  admin::v1::GetJobReply view;
  *view.mutable_summary() = Summary();
  *view.mutable_config() = plan_->config;
  for (uint32_t r = 0; r < state_.ranks.size(); ++r) {
    if (!plan_->placement.has_rank(r)) continue;
    admin::v1::RankView& rank = *view.add_ranks();
    rank.set_rank(r);
    rank.set_pid(static_cast<uint32_t>(state_.ranks[r].pid));
    rank.set_state(RankPhaseName(state_.ranks[r].phase));
    rank.set_home_worker(plan_->ranks[r].home_worker());
  }
  for (uint32_t w = 0; w < workers_.size(); ++w) {
    admin::v1::WorkerView& worker = *view.add_workers();
    worker.set_worker(Global(w));
    worker.set_pid(workers_[w].process ? static_cast<uint32_t>(workers_[w].process->pid) : 0);
    worker.set_device(plan_->workers[Global(w)].device());
    worker.set_state(WorkerPhaseName(state_.workers[w].phase));
    worker.set_restarts(state_.workers[w].restarts);
    worker.set_last_exit(state_.workers[w].last_exit);
    worker.set_bytes(WorkerBytes(*plan_, Global(w)));
    AddCounters(workers_[w].before, *view.mutable_counters());
    AddCounters(workers_[w].stats, *view.mutable_counters());
    if (data_plane()) AddGpuCounters(workers_[w].stats, *view.mutable_counters());
    if (plan_->config.gpu_mirror_steps() > 0) {
      (*view.mutable_counters())["gpu_damaged_mirrors"] +=
          workers_[w].before.gpu_damaged_mirrors() + workers_[w].stats.gpu_damaged_mirrors();
      (*view.mutable_counters())["times_gone_back"] = times_gone_back_;
    }
    if (plan_->nvme_paths.empty()) continue;
    AddTierCounters(workers_[w].before, *view.mutable_counters());
    AddTierCounters(workers_[w].stats, *view.mutable_counters());
  }
  for (const model::v1::LedgerLine& line : plan_->ledger) *view.add_ledger() = line;
  for (const ResolvedValue& value : plan_->values) {
    admin::v1::ConfigValue& out = *view.add_config_values();
    out.set_key(value.path);
    out.set_value(value.value_text);
    out.set_origin(std::string(ValueOriginName(value.origin)));
    out.set_note(value.note);
  }
  for (const std::string& warning : plan_->warnings) view.add_warnings(warning);
  if (regions_) {
    const JobNumbers& numbers = regions_->board().numbers();
    (*view.mutable_counters())["updates"] = numbers.updates;
    (*view.mutable_counters())["skipped_steps"] = numbers.skipped;
    view.set_loss_scale(numbers.loss_scale);
    view.set_grad_norm(numbers.grad_norm);
  }
  view.set_moving(Moving());
  if (const std::string bottleneck = Bottleneck(); !bottleneck.empty()) view.add_notes(bottleneck);
  return view;
}

}  // namespace zeroshard
