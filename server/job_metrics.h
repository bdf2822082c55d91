// JobMetrics: what the daemon exports to Prometheus. Every family is described in docs/metrics.md.
//
// Called on the decision thread; the table itself is thread-safe.

#ifndef ZEROSHARD_SERVER_JOB_METRICS_H_
#define ZEROSHARD_SERVER_JOB_METRICS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/metrics.h"
#include "device/cpu/core_budget.h"
#include "proto/internal.pb.h"
#include "server/node_gpus.h"
#include "server/node_memory.h"
#include "server/nvme_store.h"
#include "server/planner.h"

namespace zeroshard {

// One exported family, for the table in the documentation and the test that compares the two.
struct MetricDescription {
  const char* name;
  MetricType type;
  const char* labels;
  const char* help;
};
const std::vector<MetricDescription>& AllMetrics();

class JobMetrics {
 public:
  explicit JobMetrics(std::shared_ptr<MetricsTable> table);

  // The node: capacity and free memory, jobs by state.
  void SetNode(const NodeMemory& memory, uint64_t limit, uint64_t held);
  void SetJobs(const std::map<std::string, int>& by_state);
  void SetCores(const CoreBudget& budget);

  // GPUs; `in_use`: promised to jobs, by device.
  void SetGpus(const NodeGpus& gpus, const std::map<std::string, uint64_t>& in_use);

  // The NVMe tier: of all file systems that its paths lie on.
  void SetNvme(const std::vector<NvmeStore::PathView>& paths, uint64_t limit);

  // A job: its ledger once it has memory, its members, its workers' counters as they grow.
  void SetLedger(const std::string& job, const JobPlan& plan);
  void SetRanks(const std::string& job, uint32_t attached, uint64_t generation);
  void CountRestart(const std::string& job, uint32_t worker);
  void CountRankDeath(const std::string& job);
  void CountGoneBack(const std::string& job);
  // `before` is what the same incarnation sent last; counters grow by the difference.
  void AddStats(const std::string& job, uint32_t worker, const internal::v1::Stats& before,
                const internal::v1::Stats& now);
  void CountCheckpoint(const std::string& job, const std::string& kind, uint64_t bytes);

  // The job has ended: its series go.
  void Remove(const std::string& job);

 private:
  struct Latency {
    std::shared_ptr<Histogram> histogram;
  };
  const MetricDescription& Describe(const std::string& name) const;
  void Grow(const std::string& name, const MetricLabels& labels, double amount);
  void Set(const std::string& name, const MetricLabels& labels, double value);
  void Observe(const std::string& name, const MetricLabels& labels,
               const google::protobuf::RepeatedField<uint64_t>& before,
               const google::protobuf::RepeatedField<uint64_t>& now);

  void AddTierStats(const MetricLabels& labels, const internal::v1::Stats& before,
                    const internal::v1::Stats& now);

  const std::shared_ptr<MetricsTable> table_;
  std::map<std::string, std::set<MetricLabels>> ledgers_;  // lines that are exported, by job
  std::map<std::string, const MetricDescription*> descriptions_;
  std::map<uint32_t, CoreBudget::Usage> cores_;  // as it was last exported, by NUMA node
};

}  // namespace zeroshard

#endif  // ZEROSHARD_SERVER_JOB_METRICS_H_
