#include "server/job_metrics.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace zeroshard {
namespace {

constexpr auto kCounter = MetricType::kCounter;
constexpr auto kGauge = MetricType::kGauge;
constexpr auto kHistogram = MetricType::kHistogram;

// Workers count latencies in powers of two microseconds.
constexpr int kLatencyBuckets = 32;

std::vector<double> LatencySeconds() {
  std::vector<double> bounds;
  for (int i = 0; i < kLatencyBuckets; ++i) bounds.push_back(std::ldexp(1e-6, i));
  return bounds;
}

double Difference(uint64_t now, uint64_t before) {
  return now > before ? static_cast<double>(now - before) : 0;
}

}  // namespace

const std::vector<MetricDescription>& AllMetrics() {
  static const std::vector<MetricDescription> kAll = {
      {"zeroshard_jobs", kGauge, "state", "Jobs of this daemon"},
      {"zeroshard_tier_capacity_bytes", kGauge, "tier", "Bytes that the tier may hold"},
      {"zeroshard_tier_used_bytes", kGauge, "tier", "Bytes promised to jobs"},
      {"zeroshard_tier_free_bytes", kGauge, "tier", "Bytes that a further job may ask for"},
      {"zeroshard_cores", kGauge, "numa", "Cores that the workers of all jobs share"},
      {"zeroshard_cores_in_use", kGauge, "numa", "Cores that workers compute on now"},
      {"zeroshard_core_seconds_total", kCounter, "numa", "Time that cores were in use"},
      {"zeroshard_core_wait_seconds_total", kCounter, "numa",
       "Time that workers waited for a free core"},
      {"zeroshard_core_overdrafts_total", kCounter, "numa",
       "Passes that ran without a core because none came free in time"},
      {"zeroshard_nvme_read_bytes_total", kCounter, "job, path",
       "Bytes that the job has read from the path"},
      {"zeroshard_nvme_written_bytes_total", kCounter, "job, path",
       "Bytes that the job has written to the path"},
      {"zeroshard_nvme_wait_seconds_total", kCounter, "path",
       "Time that transfers waited for the I/O budget"},
      {"zeroshard_nvme_overdrafts_total", kCounter, "path",
       "Transfers beyond the depth because none completed in time"},
      {"zeroshard_nvme_write_budget_ratio", kGauge, "path",
       "Bytes written today (UTC) as a part of nvme_write_budget"},
      {"zeroshard_drive_temperature_celsius", kGauge, "path",
       "Temperature of the hottest drive behind the path"},
      {"zeroshard_drive_used_percent", kGauge, "path",
       "Life used by the makers' estimate, of the most used drive; may exceed 100"},
      {"zeroshard_drive_media_errors_total", kCounter, "path",
       "Media errors of the drives behind the path over their life"},
      {"zeroshard_drive_written_bytes_total", kCounter, "path",
       "Bytes written to the drives behind the path over their life, by anyone"},
      {"zeroshard_gpu_capacity_bytes", kGauge, "device",
       "Bytes of the GPU's memory that jobs may be promised"},
      {"zeroshard_gpu_used_bytes", kGauge, "device",
       "Bytes of the GPU's memory that jobs are promised, their trainers' windows included"},
      {"zeroshard_gpu_free_bytes", kGauge, "device",
       "Bytes of the GPU's memory that no process holds, as its driver last said"},
      {"zeroshard_gpu_job_bytes", kGauge, "job, device",
       "Bytes of the GPU's memory that the job is promised"},
      {"zeroshard_gpu_state_bytes", kGauge, "job, worker",
       "Bytes of state that are on the gpu tier now"},
      {"zeroshard_gpu_busy_seconds_total", kCounter, "job, worker",
       "Time that the GPU worked for the worker: updates, norms, copies"},
      {"zeroshard_gpu_mirror_step", kGauge, "job, worker",
       "Step of the last whole mirror in host memory, to which the job goes back when a GPU is "
       "lost"},
      {"zeroshard_gpu_mirror_seconds_total", kCounter, "job, worker",
       "Time in which mirrors of GPU memory were copied to the host"},
      {"zeroshard_gpu_damaged_mirrors_total", kCounter, "job, worker",
       "Mirrors that were found damaged when the job went back"},
      {"zeroshard_state_bytes", kGauge, "job, tier, holder, state",
       "Bytes of one kind of state at one holder (worker, rank or node)"},
      {"zeroshard_nvme_path_info", kGauge, "path, filesystem, backend, direct",
       "1 for each path of the NVMe tier: how it is used"},
      {"zeroshard_tier_pass_seconds_total", kCounter, "job, worker",
       "Time of passes over states on the NVMe tier"},
      {"zeroshard_tier_wait_seconds_total", kCounter, "job, worker",
       "Time of them in which nothing could be computed because transfers were awaited"},
      {"zeroshard_tier_seal_seconds_total", kCounter, "job, worker",
       "Time in which steps were made to survive the loss of power: flushes and manifests"},
      {"zeroshard_tier_compute_seconds_total", kCounter, "job, worker",
       "Time that the worker's lanes computed in them"},
      {"zeroshard_tier_retries_total", kCounter, "job, worker",
       "Transfers that failed and were tried again"},
      {"zeroshard_tier_damaged_images_total", kCounter, "job, worker",
       "Chunk images that were read and were not what had been written"},
      {"zeroshard_tier_rebuilt_images_total", kCounter, "job, worker",
       "Damaged images of parameters that were made anew of their masters"},
      {"zeroshard_tier_failed_slots_total", kCounter, "job, worker",
       "Slots that are not used any more because writes to them failed"},
      {"zeroshard_tier_state_bytes", kGauge, "job, worker",
       "Bytes of state that are on the NVMe tier now"},
      {"zeroshard_tier_move_left_bytes", kGauge, "job, worker",
       "Bytes of state that are still to be moved to the tier where they shall rest"},
      {"zeroshard_ranks_attached", kGauge, "job", "Ranks that are attached"},
      {"zeroshard_generation", kGauge, "job", "Generation of the job's membership"},
      {"zeroshard_rank_deaths_total", kCounter, "job", "Ranks that ended without detaching"},
      {"zeroshard_gone_back_total", kCounter, "job",
       "Times that the job went back to a mirror because a GPU was lost"},
      {"zeroshard_worker_restarts_total", kCounter, "job, worker", "Workers started again"},
      {"zeroshard_step", kGauge, "job", "Committed steps"},
      {"zeroshard_optimizer_updates_total", kCounter, "job", "Steps that were applied"},
      {"zeroshard_skipped_steps_total", kCounter, "job", "Steps skipped because of an overflow"},
      {"zeroshard_loss_scale", kGauge, "job", "Loss scale of the next step"},
      {"zeroshard_grad_norm", kGauge, "job", "Gradient norm of the last step, before clipping"},
      {"zeroshard_collective_elements_total", kCounter, "job, worker, kind",
       "Logical elements moved: gather, gather_persistent, scatter, step_gather"},
      {"zeroshard_wire_bytes_total", kCounter, "job, worker",
       "Bytes sent to workers that share no memory"},
      {"zeroshard_copied_bytes_total", kCounter, "job, worker", "Bytes copied inside the node"},
      {"zeroshard_window_bytes", kGauge, "job, worker",
       "Bytes of the parameter window that are backed by memory"},
      {"zeroshard_worker_pinned_bytes", kGauge, "job, worker",
       "Bytes of host memory that are locked, or will be once they are used"},
      {"zeroshard_worker_unpinned_bytes", kGauge, "job, worker",
       "Bytes of host memory that the job wants locked and that are not"},
      {"zeroshard_prefetch_hits_total", kCounter, "job, worker",
       "Gathers that were complete when they were needed"},
      {"zeroshard_prefetch_misses_total", kCounter, "job, worker",
       "Gathers that a rank had to wait for"},
      {"zeroshard_gather_seconds", kHistogram, "job, worker", "From a gather to its completion"},
      {"zeroshard_scatter_seconds", kHistogram, "job, worker", "From a scatter to its completion"},
      {"zeroshard_step_seconds", kHistogram, "job, worker",
       "From a rank's arrival at a step to its commit"},
      {"zeroshard_wait_seconds", kHistogram, "job, worker",
       "Time that ranks waited for their worker, per step"},
      {"zeroshard_checkpoints_total", kCounter, "job, kind",
       "Checkpoints and files written or read: save, restore, export"},
      {"zeroshard_checkpoint_bytes_total", kCounter, "job, kind", "Their bytes"},
  };
  return kAll;
}

JobMetrics::JobMetrics(std::shared_ptr<MetricsTable> table) : table_(std::move(table)) {
  for (const MetricDescription& one : AllMetrics()) descriptions_[one.name] = &one;
}

const MetricDescription& JobMetrics::Describe(const std::string& name) const {
  const auto it = descriptions_.find(name);
  ZS_CHECK(it != descriptions_.end(), name);
  return *it->second;
}

void JobMetrics::Grow(const std::string& name, const MetricLabels& labels, double amount) {
  table_->GetCounter(name, Describe(name).help, labels)->Increment(amount);
}

void JobMetrics::Set(const std::string& name, const MetricLabels& labels, double value) {
  table_->GetGauge(name, Describe(name).help, labels)->Set(value);
}

void JobMetrics::Observe(const std::string& name, const MetricLabels& labels,
                         const google::protobuf::RepeatedField<uint64_t>& before,
                         const google::protobuf::RepeatedField<uint64_t>& now) {
  constexpr uint64_t kMaxObservations = 100000;  // of one message: a worker cannot hold us up
  const auto histogram = table_->GetHistogram(name, Describe(name).help, labels, LatencySeconds());
  for (int i = 0; i < std::min(now.size(), kLatencyBuckets); ++i) {
    const uint64_t old = i < before.size() ? before[i] : 0;
    const uint64_t count = std::min(now[i] > old ? now[i] - old : 0, kMaxObservations);
    for (uint64_t n = 0; n < count; ++n) histogram->Observe(0.75 * std::ldexp(1e-6, i));
  }
}

void JobMetrics::SetNode(const NodeMemory& memory, uint64_t limit, uint64_t held) {
  const uint64_t capacity = limit > 0 ? std::min(limit, memory.total) : memory.total;
  const uint64_t within_limit = limit > 0 ? limit - std::min(limit, held) : memory.available;
  const MetricLabels host = {{"tier", "host"}};
  Set("zeroshard_tier_capacity_bytes", host, static_cast<double>(capacity));
  Set("zeroshard_tier_used_bytes", host, static_cast<double>(held));
  Set("zeroshard_tier_free_bytes", host,
      static_cast<double>(std::min(within_limit, memory.available)));
}

void JobMetrics::SetJobs(const std::map<std::string, int>& by_state) {
  for (const char* state : {"forming", "starting", "ready", "idle", "failed"}) {
    const auto it = by_state.find(state);
    Set("zeroshard_jobs", {{"state", state}}, it == by_state.end() ? 0 : it->second);
  }
}

void JobMetrics::SetCores(const CoreBudget& budget) {
  for (uint32_t node = 0; node < budget.nodes(); ++node) {
    const MetricLabels labels = {{"numa", absl::StrCat(node)}};
    const CoreBudget::Usage now = budget.usage(node);
    CoreBudget::Usage& before = cores_[node];
    Set("zeroshard_cores", labels, now.cores);
    Set("zeroshard_cores_in_use", labels, now.in_use);
    Grow("zeroshard_core_seconds_total", labels, now.busy_seconds - before.busy_seconds);
    Grow("zeroshard_core_wait_seconds_total", labels, now.wait_seconds - before.wait_seconds);
    Grow("zeroshard_core_overdrafts_total", labels, Difference(now.overdrafts, before.overdrafts));
    before = now;
  }
}

void JobMetrics::SetLedger(const std::string& job, const JobPlan& plan) {
  std::map<MetricLabels, uint64_t> sums;
  for (const model::v1::LedgerLine& line : plan.ledger) {
    sums[{
        {"job", job}, {"tier", line.tier()}, {"holder", line.holder()}, {"state", line.state()}}] +=
        line.bytes();
  }
  std::set<MetricLabels>& known = ledgers_[job];
  // What was moved away is 0.
  for (const MetricLabels& labels : known) sums.emplace(labels, 0);
  for (uint32_t w = 0; w < plan.gpus.size(); ++w) {
    const std::string& device = plan.workers[plan.placement.first_worker() + w].device();
    Set("zeroshard_gpu_job_bytes", {{"job", job}, {"device", device}},
        static_cast<double>(plan.gpus[w].total()));
  }
  for (const auto& [labels, bytes] : sums) {
    Set("zeroshard_state_bytes", labels, static_cast<double>(bytes));
    known.insert(labels);
  }
}

void JobMetrics::SetNvme(const std::vector<NvmeStore::PathView>& paths, uint64_t limit) {
  std::map<uint64_t, NvmeSpace> devices;
  uint64_t promised = 0;
  for (const NvmeStore::PathView& path : paths) {
    devices[path.space.device] = path.space;
    promised += path.promised;
    Set("zeroshard_nvme_path_info",
        {{"path", path.path},
         {"filesystem", path.filesystem},
         {"backend", path.backend},
         {"direct", path.direct ? "yes" : "no"}},
        1);
  }
  if (paths.empty()) return;
  uint64_t capacity = 0;
  uint64_t room = 0;  // free, and used by jobs
  for (const auto& [device, space] : devices) {
    capacity += space.capacity;
    room += space.free + space.occupied;
  }
  if (limit > 0) {
    capacity = std::min(capacity, limit);
    room = std::min(room, limit);
  }
  const MetricLabels nvme = {{"tier", "nvme"}};
  Set("zeroshard_tier_capacity_bytes", nvme, static_cast<double>(capacity));
  Set("zeroshard_tier_used_bytes", nvme, static_cast<double>(promised));
  Set("zeroshard_tier_free_bytes", nvme, static_cast<double>(room - std::min(room, promised)));
}

void JobMetrics::SetGpus(const NodeGpus& gpus, const std::map<std::string, uint64_t>& in_use) {
  for (const Gpu& gpu : gpus.gpus()) {
    const MetricLabels labels = {{"device", gpu.device}};
    const auto it = in_use.find(gpu.device);
    Set("zeroshard_gpu_capacity_bytes", labels, static_cast<double>(gpus.Capacity(gpu)));
    Set("zeroshard_gpu_used_bytes", labels,
        it == in_use.end() ? 0 : static_cast<double>(it->second));
    if (const auto free = gpus.Free(gpu.device)) {
      Set("zeroshard_gpu_free_bytes", labels, static_cast<double>(*free));
    }
  }
}

void JobMetrics::SetRanks(const std::string& job, uint32_t attached, uint64_t generation) {
  Set("zeroshard_ranks_attached", {{"job", job}}, attached);
  Set("zeroshard_generation", {{"job", job}}, static_cast<double>(generation));
}

void JobMetrics::CountRestart(const std::string& job, uint32_t worker) {
  Grow("zeroshard_worker_restarts_total", {{"job", job}, {"worker", absl::StrCat(worker)}}, 1);
}

void JobMetrics::CountRankDeath(const std::string& job) {
  Grow("zeroshard_rank_deaths_total", {{"job", job}}, 1);
}

void JobMetrics::CountGoneBack(const std::string& job) {
  Grow("zeroshard_gone_back_total", {{"job", job}}, 1);
}

void JobMetrics::AddStats(const std::string& job, uint32_t worker,
                          const internal::v1::Stats& before, const internal::v1::Stats& now) {
  const MetricLabels labels = {{"job", job}, {"worker", absl::StrCat(worker)}};
  auto moved = [&](const char* kind, uint64_t after, uint64_t old) {
    MetricLabels with_kind = labels;
    with_kind["kind"] = kind;
    Grow("zeroshard_collective_elements_total", with_kind, Difference(after, old));
  };
  moved("gather", now.gather_elements(), before.gather_elements());
  moved("gather_persistent", now.persistent_gather_elements(), before.persistent_gather_elements());
  moved("scatter", now.scatter_elements(), before.scatter_elements());
  moved("step_gather", now.step_gather_elements(), before.step_gather_elements());
  Grow("zeroshard_wire_bytes_total", labels, Difference(now.wire_bytes(), before.wire_bytes()));
  Grow("zeroshard_copied_bytes_total", labels,
       Difference(now.copied_bytes(), before.copied_bytes()));
  Grow("zeroshard_prefetch_hits_total", labels,
       Difference(now.prefetch_hits(), before.prefetch_hits()));
  Grow("zeroshard_prefetch_misses_total", labels,
       Difference(now.prefetch_misses(), before.prefetch_misses()));
  Set("zeroshard_window_bytes", labels, static_cast<double>(now.window_bytes()));
  Set("zeroshard_worker_pinned_bytes", labels, static_cast<double>(now.pinned_bytes()));
  Set("zeroshard_worker_unpinned_bytes", labels, static_cast<double>(now.unpinned_bytes()));
  Observe("zeroshard_gather_seconds", labels, before.gather_us(), now.gather_us());
  Observe("zeroshard_scatter_seconds", labels, before.scatter_us(), now.scatter_us());
  Observe("zeroshard_step_seconds", labels, before.step_us(), now.step_us());
  Observe("zeroshard_wait_seconds", labels, before.wait_us(), now.wait_us());
  if (now.nvme_paths_size() > 0) AddTierStats(labels, before, now);
  if (now.gpu_free_bytes() > 0) {
    Set("zeroshard_gpu_state_bytes", labels, static_cast<double>(now.gpu_state_bytes()));
    Grow("zeroshard_gpu_busy_seconds_total", labels,
         Difference(now.gpu_busy_us(), before.gpu_busy_us()) * 1e-6);
    if (now.gpu_mirror_step() > 0) {
      Set("zeroshard_gpu_mirror_step", labels, static_cast<double>(now.gpu_mirror_step()));
    }
    Grow("zeroshard_gpu_mirror_seconds_total", labels,
         Difference(now.gpu_mirror_us(), before.gpu_mirror_us()) * 1e-6);
    Grow("zeroshard_gpu_damaged_mirrors_total", labels,
         Difference(now.gpu_damaged_mirrors(), before.gpu_damaged_mirrors()));
  }
  if (worker != 0) return;  // the job's own numbers are the same on every worker
  const MetricLabels of_job = {{"job", job}};
  Set("zeroshard_step", of_job, static_cast<double>(now.step()));
  Grow("zeroshard_optimizer_updates_total", of_job, Difference(now.updates(), before.updates()));
  Grow("zeroshard_skipped_steps_total", of_job, Difference(now.skipped(), before.skipped()));
  Set("zeroshard_loss_scale", of_job, now.loss_scale());
  Set("zeroshard_grad_norm", of_job, now.grad_norm());
}

void JobMetrics::AddTierStats(const MetricLabels& labels, const internal::v1::Stats& before,
                              const internal::v1::Stats& now) {
  auto grow = [&](const char* name, uint64_t after, uint64_t old, double unit = 1) {
    Grow(name, labels, Difference(after, old) * unit);
  };
  constexpr double kMicrosecond = 1e-6;
  grow("zeroshard_tier_pass_seconds_total", now.nvme_pass_us(), before.nvme_pass_us(),
       kMicrosecond);
  grow("zeroshard_tier_wait_seconds_total", now.nvme_wait_us(), before.nvme_wait_us(),
       kMicrosecond);
  grow("zeroshard_tier_seal_seconds_total", now.nvme_seal_us(), before.nvme_seal_us(),
       kMicrosecond);
  grow("zeroshard_tier_compute_seconds_total", now.nvme_compute_us(), before.nvme_compute_us(),
       kMicrosecond);
  grow("zeroshard_tier_retries_total", now.nvme_retries(), before.nvme_retries());
  grow("zeroshard_tier_damaged_images_total", now.nvme_damaged_images(),
       before.nvme_damaged_images());
  grow("zeroshard_tier_rebuilt_images_total", now.nvme_rebuilt_images(),
       before.nvme_rebuilt_images());
  grow("zeroshard_tier_failed_slots_total", now.nvme_failed_slots(), before.nvme_failed_slots());
  Set("zeroshard_tier_state_bytes", labels, static_cast<double>(now.nvme_state_bytes()));
  Set("zeroshard_tier_move_left_bytes", labels, static_cast<double>(now.move_left_bytes()));
}

void JobMetrics::CountCheckpoint(const std::string& job, const std::string& kind, uint64_t bytes) {
  Grow("zeroshard_checkpoints_total", {{"job", job}, {"kind", kind}}, 1);
  Grow("zeroshard_checkpoint_bytes_total", {{"job", job}, {"kind", kind}},
       static_cast<double>(bytes));
}

void JobMetrics::Remove(const std::string& job) {
  table_->RemoveSeries("job", job);
  ledgers_.erase(job);
}

}  // namespace zeroshard
